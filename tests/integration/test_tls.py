"""Every hop encrypted, both ends known by certificate; files change while all of it runs."""

import asyncio
import dataclasses
import hashlib
import sys

import grpc
import pytest
import structlog
import trustme
from click.testing import CliRunner

from noria import AsyncClient, Client, NoriaError, Tls, UnreachableError
from noria.cli.main import main
from noria.reasons import Reason
from noria.service import tls_watch
from noria.v1 import tokenizer_pb2, tokenizer_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.app import running_router
from tests.support.canary import API_KEY
from tests.support.certificates import Fleet
from tests.support.processes import ROOT
from tests.support.stack import running_stack
from tests.support.waiting import until


@pytest.fixture
def certificates(tmp_path, monkeypatch):
    monkeypatch.setattr(tls_watch, "POLL_S", 0.01)
    folder = tmp_path / "tls"
    folder.mkdir()
    return Fleet(folder)


def stack(certificates, golden_model, script_file):
    script = script_file(mean_output_tokens=4, token_ids=[32, 127])
    return running_stack(golden_model, tls=certificates, script=script)


async def answers(address, tls, **more):
    async with AsyncClient(address, api_key=API_KEY, tls=tls, timeout=10, **more) as client:
        return (await client.chat("a", max_tokens=4)).usage.output_tokens


async def is_refused(address, tls):
    try:
        await answers(address, tls)
    except UnreachableError:
        return True
    return False


async def test_all_hops_are_encrypted_and_know_each_other(certificates, golden_model, script_file):
    """Without TLS, without a certificate or with one of another CA nobody gets in anywhere."""
    async with stack(certificates, golden_model, script_file) as running:
        router, tokenizer, worker = running.addresses
        known = certificates.client()
        assert await answers(router, known) > 0
        foreign = certificates.client("foreign", of=trustme.CA())
        nameless = dataclasses.replace(known, cert=None, key=None)
        distrusting = dataclasses.replace(known, ca=certificates.file("inner-ca.pem"))
        for tls in (None, nameless, foreign, distrusting):
            assert await is_refused(router, tls), tls
        wrong_name = dataclasses.replace(known, server_name="elsewhere")
        assert await is_refused(router, wrong_name)
        # A tenant's certificate, of the clients' CA, opens no inner door.
        for address in (tokenizer, worker):
            assert await inner_codes(address, known) == {grpc.StatusCode.UNAVAILABLE}
        with Client(router, api_key=API_KEY, tls=known) as client:
            told = await asyncio.to_thread(client.chat, "a", max_tokens=4)
        assert told.usage.output_tokens > 0


async def inner_codes(address, tls: Tls):
    """What the services behind the router answer to a client, with and without TLS."""
    credentials = grpc.ssl_channel_credentials(
        *(file.read_bytes() for file in (tls.ca, tls.key, tls.cert))
    )
    codes = set()
    for channel in (
        grpc.aio.insecure_channel(address),
        grpc.aio.secure_channel(address, credentials),
    ):
        async with channel:
            for stub, request in (
                (
                    tokenizer_pb2_grpc.TokenizerServiceStub(channel).GetTokenizerInfo,
                    tokenizer_pb2.GetTokenizerInfoRequest(),
                ),
                (
                    worker_pb2_grpc.WorkerServiceStub(channel).GetWorkerInfo,
                    worker_pb2.GetWorkerInfoRequest(),
                ),
            ):
                try:
                    await stub(request, timeout=5)
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())
                else:
                    codes.add(grpc.StatusCode.OK)
    return codes


async def test_new_files_are_used_without_a_restart(certificates, golden_model, script_file):
    """All authorities change: new connections on every hop have the new ones, streams go on."""
    async with stack(certificates, golden_model, script_file) as running:
        router = running.addresses[0]
        config = running.router._config
        async with running.client.stream_chat("a", max_tokens=4) as stream:
            certificates.renew()
            new = certificates.client()
            await until_async(lambda: is_served(router, new))
            assert [event async for event in stream.events()]
        assert await is_refused(router, certificates.client("late", of=trustme.CA()))
        # A router that starts now reaches tokenizer and worker by the new files alone.
        async with running_router(dataclasses.replace(config, listen="127.0.0.1:0")) as second:
            await asyncio.wait_for(second.wait_ready(), 10)
            assert await answers(second.address, new) > 0


@pytest.mark.parametrize("renewals", [3, pytest.param(60, marks=pytest.mark.soak)])
async def test_certificates_renewed_under_load_refuse_nobody(
    certificates, golden_model, script_file, renewals
):
    """Streams go on, and whoever connects meanwhile gets in, whichever files are there."""
    async with stack(certificates, golden_model, script_file) as running:
        router, stop, served = running.addresses[0], asyncio.Event(), [0, 0]

        async def ask_on():
            while not stop.is_set():
                await running.client.chat("a", max_tokens=20)
                served[0] += 1

        async def connect_anew(tls):
            while not stop.is_set():
                assert await answers(router, tls) > 0
                served[1] += 1

        asking = [asyncio.create_task(ask_on()) for _ in range(3)]
        tls = certificates.client()
        asking += [asyncio.create_task(connect_anew(tls)) for _ in range(2)]
        for _ in range(renewals):
            certificates.renew_leaves()
            await asyncio.sleep(0.15)
        stop.set()
        await asyncio.gather(*asking)
        assert min(served) >= renewals
        await until(lambda: set(running.held().values()) == {0})


async def test_strangers_at_the_port_keep_nobody_out(certificates, golden_model, script_file):
    """Connections that say nothing, speak no TLS, or leave in the middle of a handshake."""
    async with stack(certificates, golden_model, script_file) as running:
        router = running.addresses[0]
        host, _, port = router.rpartition(":")
        strangers = [await asyncio.open_connection(host, int(port)) for _ in range(60)]
        for number, (_, writer) in enumerate(strangers):
            writer.write([b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"][number % 3])
        for _, writer in strangers[::2]:
            writer.close()
        assert await answers(router, certificates.client()) > 0
        for _, writer in strangers:
            writer.close()


async def is_served(address, tls):
    return not await is_refused(address, tls)


async def until_async(condition):
    for _ in range(500):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("still not true")


async def test_a_worker_of_another_name_is_not_used(certificates, golden_model, script_file):
    """The router asks for the address's host in the certificate, or for the name it is told."""
    certificates.renew(inner_hosts=("worker.internal",))
    peers = dataclasses.replace(certificates.peers, server_name="worker.internal")
    async with running_stack(
        golden_model,
        tls=certificates,
        router={"peer_tls": peers},
        script=script_file(mean_output_tokens=4, token_ids=[32, 127]),
    ) as running:
        assert await answers(running.addresses[0], certificates.client()) > 0
        config = dataclasses.replace(
            running.router._config, listen="127.0.0.1:0", peer_tls=certificates.peers
        )
        with structlog.testing.capture_logs() as lines:
            async with running_router(config) as strict:
                broken = {"worker_disconnected", "tokenizer_disconnected"}
                await until(lambda: broken <= {line["event"] for line in lines})
                assert not list(strict.registry)
                with pytest.raises(NoriaError, match="NO_WORKER"):
                    await answers(strict.address, certificates.client(), retry=False)
    causes = {line["cause"] for line in lines if line["event"] in broken}
    assert causes == {"UNAVAILABLE: its certificate has another name"}


async def test_the_command_speaks_tls(certificates, golden_model, script_file):
    async with stack(certificates, golden_model, script_file) as running:
        tls = certificates.client()
        flags = ["--ca", tls.ca, "--client-cert", tls.cert, "--client-key", tls.key]
        argv = [*map(str, flags), "chat", "--address", running.addresses[0], "q"]
        env = {"NORIA_API_KEY": API_KEY}
        told = await asyncio.to_thread(CliRunner().invoke, main, argv, env=env)
        wrong = {
            " closes the connection; if it speaks TLS, give its --ca": argv[6:],
            " closes the connection; it may ask for a --client-cert": [*argv[:2], *argv[6:]],
            ": its certificate is not of the CA given with --ca": [
                "--ca", str(certificates.file("inner-ca.pem")), *argv[2:],
            ],
            ": its certificate has another name; --server-name says which": [
                "--server-name", "other", *argv,
            ],
        }  # fmt: skip
        for why, command in wrong.items():
            failed = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
            assert failed.exit_code == 1
            assert f"{running.addresses[0]}{why}" in failed.stderr
    assert (told.exit_code, told.stderr) == (0, "")
    assert told.stdout.strip()


SERVICES = {
    "router": ("--tokenizer", "a:1", "--worker", "b:1", "--api-key-sha256", "0" * 64),
    "tokenizer_svc": ("--model", "MODEL"),
    "worker": ("--model", "MODEL"),
}


async def test_a_service_names_the_file_that_it_cannot_use_and_does_not_start(
    certificates, golden_model
):
    """Before anything is loaded; a missing, a foreign and a broken file of each."""
    certificates.file("broken.pem").write_text("-----BEGIN CERTIFICATE-----\nMARK")
    own = {"cert": "inner.pem", "key": "inner.key", "client-ca": "inner-ca.pem"}
    cases = {
        "router": {"key": "outer.key"},
        "tokenizer_svc": {"cert": "broken.pem"},
        "worker": {"client-ca": "none.pem"},
    }
    starts = [
        started(service, {**own, **case}, certificates, golden_model)
        for service, case in cases.items()
    ]
    for (service, case), (code, told) in zip(
        cases.items(), await asyncio.gather(*starts), strict=True
    ):
        ((flag, file),) = case.items()
        assert code != 0, service
        assert f"tls-{flag}: {certificates.file(file)}: " in told
        assert "MARK" not in told
        assert "Traceback" not in told


async def started(service, files, certificates, model):
    flags = [part.replace("MODEL", str(model)) for part in SERVICES[service]]
    for flag, file in files.items():
        flags += [f"--tls-{flag}", str(certificates.file(file))]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", service, "--listen", "127.0.0.1:0", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT,
    )  # fmt: skip
    told, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, told.decode()


KEYS = """
[[tenants]]
name = "a"
admin = true
[[tenants.keys]]
certificate = "team-a.internal"
[[tenants]]
name = "b"
models = []
[[tenants.keys]]
certificate = "spiffe://example.com/team-b"
[[tenants.keys]]
sha256 = "{digest}"
"""


async def test_a_tenant_is_known_by_its_certificate_unless_it_sends_a_key(
    certificates, golden_model, script_file, tmp_path, monkeypatch
):
    """The key decides where there is one; a certificate that no tenant has is a wrong key."""
    monkeypatch.delenv("NORIA_API_KEY", raising=False)
    monkeypatch.setenv("NORIA_CONFIG_DIR", str(tmp_path / "nothing"))
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS.format(digest=hashlib.sha256(API_KEY.encode()).hexdigest()))
    script = script_file(mean_output_tokens=4, token_ids=[32, 127])
    settings = {"keys_file": keys, "api_key_sha256": ""}
    async with running_stack(
        golden_model, tls=certificates, router=settings, script=script
    ) as running:

        async def ask(tls, key=None):
            client = AsyncClient(running.addresses[0], api_key=key, tls=tls, timeout=10)
            async with client:
                try:
                    return (await client.chat("a", max_tokens=4)).usage.output_tokens > 0
                except NoriaError as error:
                    return error.reason

        team_a = certificates.client()
        assert await ask(team_a) is True
        team_b = certificates.client_of_uri("spiffe://example.com/team-b")
        assert await ask(team_b) is Reason.MODEL_FORBIDDEN
        assert await ask(team_a, API_KEY) is Reason.MODEL_FORBIDDEN
        assert await ask(team_a, "wrong") is Reason.INVALID_KEY
        stranger = certificates.client("stranger.internal")
        assert await ask(stranger) is Reason.INVALID_KEY
        key_id = await granted(running.addresses[0], team_a)
        assert await ask(stranger) is True
        await keys_command(running.addresses[0], team_a, "revoke", key_id)
        assert await ask(stranger) is Reason.INVALID_KEY
        await until(lambda: set(running.held().values()) == {0})


async def keys_command(address, tls, *argv):
    """What `noria keys` writes, called by an administrator who is known by a certificate."""
    flags = ("--ca", tls.ca, "--client-cert", tls.cert, "--client-key", tls.key)
    command = [*map(str, flags), "keys", *argv, "--address", address]
    with structlog.testing.capture_logs():
        told = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert told.exit_code == 0, told.stderr
    return told


async def granted(address, tls):
    """The id under which a stranger's certificate is known from now on; no key is made."""
    await keys_command(address, tls, "tenant", "new")
    made = await keys_command(address, tls, "create", "new", "--certificate", "stranger.internal")
    assert made.stdout == ""
    listed = await keys_command(address, tls, "list", "--tenant", "new")
    assert "stranger.internal" in listed.stdout
    return made.stderr.split()[0]
