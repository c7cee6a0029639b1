"""Keys, tenants and their scopes at a running router."""

import contextlib
import hashlib
import json
from contextlib import asynccontextmanager

import grpc
import pytest
import structlog

from noria.reasons import Reason
from noria.v1 import chat_pb2
from router.keys_format import KeysFormatError
from tests.router.fakes import (
    EOS,
    FakeWorker,
    bearer,
    events,
    failure,
    next_event,
    routed,
    spec,
    until,
)

DIGEST = {key: hashlib.sha256(key.encode()).hexdigest() for key in ("all", "small", "none", "off")}
KEYS = f"""
[[tenants]]
name = "everything"
[[tenants.keys]]
sha256 = "{DIGEST["all"]}"
[[tenants.keys]]
sha256 = "{DIGEST["off"]}"
disabled = true

[[tenants]]
name = "little"
models = ["small"]
methods = ["StreamChat", "GetRequest"]
priority_ceiling = -1
[[tenants.keys]]
sha256 = "{DIGEST["small"]}"

[[tenants]]
name = "nothing"
models = []
[[tenants.keys]]
sha256 = "{DIGEST["none"]}"
"""


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


@asynccontextmanager
async def with_keys(path, *workers):
    """A router that reads its keys from a file, looked at all the time."""
    async with routed(*workers, api_key_sha256="", keys_file=path, keys_poll_s=0.01) as setup:
        yield setup


@asynccontextmanager
async def with_two_models(path):
    small, large = FakeWorker(model="small"), FakeWorker(model="large")
    small.auto = large.auto = [10]
    async with with_keys(path, small, large) as setup:
        yield setup


def replace(path, text):
    fresh = path.with_name("fresh")
    fresh.write_text(text)
    fresh.replace(path)


async def test_a_key_of_the_file_is_served_and_a_disabled_one_is_not(keys_file):
    async with with_keys(keys_file) as setup:
        setup.worker.auto = [10]
        await events(setup.stream(key="all"))
        code, error = await failure(setup.stream(key="off"))
        assert (code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, Reason.INVALID_KEY)


@pytest.mark.parametrize(
    ("key", "model", "reason"),
    [
        ("small", "small", None),
        ("small", "", None),
        ("small", "large", Reason.MODEL_FORBIDDEN),
        ("small", "huge", Reason.MODEL_NOT_FOUND),
        ("all", "large", None),
        ("all", "huge", Reason.MODEL_NOT_FOUND),
        ("all", "", Reason.INVALID_FIELD),
        ("none", "small", Reason.MODEL_FORBIDDEN),
        ("none", "", Reason.MODEL_FORBIDDEN),
        ("none", "huge", Reason.MODEL_NOT_FOUND),
    ],
)
async def test_a_key_reaches_its_models_and_no_other_before_any_work(keys_file, key, model, reason):
    """An empty name is the only model of the key; other keys' models are not told."""
    async with with_two_models(keys_file) as setup:
        call = setup.stream(key=key, model=model)
        if reason is None:
            assert (await events(call))[0].message_start.model == (model or "small")
            return
        _, error = await failure(call)
        assert error.reason is reason
        assert not setup.tokenizer.encoded
        assert key == "all" or "large" not in error.message
        assert reason is not Reason.INVALID_FIELD or "large, small" in error.message


async def test_priority_and_methods_are_bounded_by_the_tenant(keys_file):
    async with with_two_models(keys_file) as setup:
        for priority in (50, -7):
            await events(setup.stream(key="small", priority=priority))
        assert [submit.priority for submit in setup.worker.submits] == [-1, -7]
        call = setup.stub.Chat(chat_pb2.ChatRequest(spec=spec()), metadata=bearer("small"))
        code, error = await failure(call)
        assert (code, error.reason) == (
            grpc.StatusCode.PERMISSION_DENIED,
            Reason.METHOD_FORBIDDEN,
        )


async def test_streams_of_a_removed_key_finish_and_new_ones_are_refused(keys_file):
    async with with_keys(keys_file) as setup:
        running = setup.stream(key="all")
        await setup.submitted(1)
        await next_event(running)
        replace(keys_file, KEYS.replace(DIGEST["all"], DIGEST["all"][::-1]))
        await until(lambda: not is_known(setup, "all"))
        code, error = await failure(setup.stream(key="all"))
        assert (code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, Reason.INVALID_KEY)
        setup.worker.emit(1, 10)
        setup.worker.finish(1, "eos", EOS)
        assert (await events(running))[-1].HasField("message_stop")


async def test_a_key_that_is_added_is_served_without_a_restart(keys_file):
    async with with_keys(keys_file) as setup:
        setup.worker.auto = [10]
        assert (await failure(setup.stream(key="new")))[1].reason is Reason.INVALID_KEY
        digest = hashlib.sha256(b"new").hexdigest()
        replace(
            keys_file, f'{KEYS}[[tenants]]\nname = "late"\n[[tenants.keys]]\nsha256 = "{digest}"'
        )
        await until(lambda: is_known(setup, "new"))
        await events(setup.stream(key="new"))
        assert is_known(setup, "all")


async def test_a_broken_file_keeps_the_last_keys_and_is_told_by_its_line(keys_file):
    with structlog.testing.capture_logs() as lines:
        async with with_keys(keys_file) as setup:
            setup.worker.auto = [10]
            replace(keys_file, KEYS + "\n[[tenants]]\nname = CANARY\n")
            await until(lambda: any(line["event"] == "keys_file_refused" for line in lines))
            await events(setup.stream(key="all"))
            replace(keys_file, KEYS)
            await until(lambda: any(line["event"] == "keys_file_read" for line in lines))
    (refused,) = [line for line in lines if line["event"] == "keys_file_refused"]
    assert refused["reason"] == "not TOML"
    assert refused["line"] == KEYS.count("\n") + 3
    assert not [name for name in ("CANARY", *DIGEST.values()) if name in json.dumps(lines)]


async def test_a_router_does_not_start_with_a_file_that_it_cannot_use(keys_file):
    keys_file.write_text("nonsense")
    with pytest.raises(KeysFormatError, match="line 1: not TOML"):
        async with with_keys(keys_file):
            pass


def is_known(setup, key):
    """Whether the router takes this key now."""
    with contextlib.suppress(Exception):
        setup.router._keys.ring.authenticate(bearer(key))
        return True
    return False


async def test_a_running_request_of_another_tenant_answers_like_one_that_never_was(keys_file):
    """Neither its record can be read nor can it be cancelled, and the answers are alike."""
    async with with_keys(keys_file) as setup:
        call = setup.stream(key="all")
        await setup.submitted(1)
        request_id = dict(await call.initial_metadata())["noria-request-id"]
        answers = set()
        for asked in (request_id, "req-never-was"):
            for lookup, request in (
                (setup.stub.GetRequest, chat_pb2.GetRequestRequest(request_id=asked)),
                (setup.stub.CancelRequest, chat_pb2.CancelRequestRequest(request_id=asked)),
            ):
                code, error = await failure(lookup(request, metadata=bearer("none")))
                answers.add((code, error.reason, error.message))
        assert len(answers) == 1
        assert answers.pop()[:2] == (grpc.StatusCode.NOT_FOUND, Reason.REQUEST_NOT_FOUND)
        setup.worker.emit(1, 10)
        setup.worker.finish(1, "eos", EOS)
        assert (await events(call))[-1].HasField("message_stop")


async def test_a_call_that_a_key_may_not_make_leaves_no_record(keys_file):
    async with with_two_models(keys_file) as setup:
        call = setup.stub.Chat(chat_pb2.ChatRequest(spec=spec()), metadata=bearer("small"))
        request_id = dict(await call.initial_metadata())["noria-request-id"]
        _, error = await failure(call)
        assert error.reason is Reason.METHOD_FORBIDDEN
        lookup = chat_pb2.GetRequestRequest(request_id=request_id)
        _, error = await failure(setup.stub.GetRequest(lookup, metadata=bearer("small")))
        assert error.reason is Reason.REQUEST_NOT_FOUND


async def test_what_workers_cache_is_kept_apart_by_tenant_and_by_deployment(keys_file):
    """Two keys of one tenant share a salt; another tenant's differs, as does another secret's."""
    salts = {}
    for secret in ("one", "another"):
        settings = {"api_key_sha256": "", "keys_file": keys_file, "cache_secret": secret}
        async with routed(FakeWorker(model="small"), **settings) as setup:
            setup.worker.auto = [10]
            for key in ("all", "all", "small"):
                await events(setup.stream(key=key, priority=-1))
            salts[secret] = [submit.cache_salt for submit in setup.worker.submits]
    for first, second, other in salts.values():
        assert first == second != other
    assert salts["one"][0] != salts["another"][0]
