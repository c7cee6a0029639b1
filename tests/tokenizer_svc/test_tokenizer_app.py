"""The whole service: readiness, draining, and the process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.tokenizer_client import decode_client, encode_chat, tokenizer_stub
from tokenizer_svc.app import running_tokenizer
from tokenizer_svc.chat_encoder import ChatEncoder
from tokenizer_svc.config import TokenizerConfig


async def health(address, name=""):
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def config(path):
    return TokenizerConfig(path, listen="127.0.0.1:0")


def test_the_name_is_the_paths_unless_given(tmp_path):
    """As at the worker, so that both go by one name."""
    assert TokenizerConfig(tmp_path / "Some-Model.Q4_1.gguf").name == "some-model.q4_1"
    assert TokenizerConfig(tmp_path / "Qwen2.5-7B").name == "qwen2.5-7b"
    assert TokenizerConfig(tmp_path / "x", "given").name == "given"
    with pytest.raises(ValueError, match="encode_threads is 0"):
        TokenizerConfig(tmp_path, encode_threads=0)


async def test_it_is_live_at_once_and_ready_when_loaded(golden_model):
    """Calls made earlier wait and are answered."""
    async with running_tokenizer(config(golden_model)) as tokenizer:
        assert await health(tokenizer.address, "live") == "SERVING"
        assert await health(tokenizer.address) == "NOT_SERVING"
        async with tokenizer_stub(tokenizer.address) as stub:
            early = asyncio.create_task(encode_chat(stub, "네"))
            await tokenizer.ready()
            assert await early == [7, 4512, 8, 9]
        assert await health(tokenizer.address) == "SERVING"
        assert await health(tokenizer.address, "noria.v1.TokenizerService") == "SERVING"


async def test_a_model_that_cannot_be_served_says_why(tmp_path):
    """`ready` raises what loading raised."""
    async with running_tokenizer(config(tmp_path)) as tokenizer:
        with pytest.raises(ValueError, match=r"no tokenizer\.json"):
            await tokenizer.ready()


async def test_draining_waits_for_open_outputs(golden_model):
    """Not ready, routers are told, and what is open is decoded to its end."""
    async with running_tokenizer(config(golden_model)) as tokenizer:
        await tokenizer.ready()
        async with tokenizer_stub(tokenizer.address) as stub, decode_client(stub) as session:
            await session.open(1)
            await session.feed(1, 4512)
            await session.until(lambda: session.text(1) == "네")
            draining = asyncio.create_task(tokenizer.drain(grace_s=30))
            await session.until(lambda: session.draining)
            assert await health(tokenizer.address) == "NOT_SERVING"
            assert not draining.done()
            await session.feed(1, 11)
            await session.close(1)
            await session.closed(1)
            assert session.text(1) == "네,"
            assert await draining == 0


async def test_draining_waits_for_calls_under_way(golden_model, monkeypatch):
    """An encode that has begun is answered."""
    begun, goes_on = threading.Event(), threading.Event()
    encode = ChatEncoder.encode

    def slow(self, messages):
        begun.set()
        goes_on.wait(60)
        return encode(self, messages)

    monkeypatch.setattr(ChatEncoder, "encode", slow)
    async with running_tokenizer(config(golden_model)) as tokenizer:
        await tokenizer.ready()
        async with tokenizer_stub(tokenizer.address) as stub:
            call = asyncio.create_task(encode_chat(stub, "네"))
            await asyncio.to_thread(begun.wait, 60)
            assert await tokenizer.drain(grace_s=0) == 1
            draining = asyncio.create_task(tokenizer.drain(grace_s=30))
            goes_on.set()
            assert await call == [7, 4512, 8, 9]
            assert await draining == 0


async def test_a_session_that_comes_while_draining_is_told_at_once(golden_model):
    """Its router opens new outputs elsewhere; what it has opened here is decoded."""
    async with running_tokenizer(config(golden_model)) as tokenizer:
        await tokenizer.ready()
        await tokenizer.drain(grace_s=0)
        async with tokenizer_stub(tokenizer.address) as stub, decode_client(stub) as session:
            await session.until(lambda: session.draining)
            await session.open(1, output_token_ids=[4512])
            await session.until(lambda: session.text(1) == "네")


async def test_slots_go_with_their_session(golden_model):
    """However a session ends, nothing of it is left."""
    async with running_tokenizer(config(golden_model)) as tokenizer:
        await tokenizer.ready()
        async with tokenizer_stub(tokenizer.address) as stub:
            for _ in range(3):
                async with decode_client(stub) as session:
                    await session.open(1, output_token_ids=[4512])
                    await session.until(lambda session=session: session.text(1) == "네")
            assert await tokenizer.drain(grace_s=10) == 0


def test_it_starts_without_torch_and_transformers(golden_model):
    """Their import alone takes longer than all the rest."""
    code = (
        "import sys; from pathlib import Path; import tokenizer_svc.app;"
        "from tokenizer_svc.text_service import load_text_service;"
        f"load_text_service(Path({str(golden_model)!r}), 'm');"
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_process_reports_its_life_and_stops_on_sigterm(golden_model):
    """Events as JSON lines on stderr, in order; then status 0."""
    command = [sys.executable, "-m", "tokenizer_svc", "--model", str(golden_model)]
    command += ["--listen", "127.0.0.1:0", "--parent-pid", str(os.getpid())]
    events = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            events.append(json.loads(line))
            if events[-1]["event"] == "ready":
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    names = [event["event"] for event in events]
    assert sorted(set(names), key=names.index)[-3:] == ["ready", "draining", "stopped"]
    listening = next(event for event in events if event["event"] == "listening")
    assert listening["address"].startswith("127.0.0.1:")
    progress = [(e["stage"], e["done"], e["total"]) for e in events if e["event"] == "progress"]
    assert progress == [("loading the vocabulary", done, 1) for done in (0, 1)]


@pytest.mark.parametrize("more", [(), ("--metrics-listen", "127.0.0.1:0")])
def test_the_process_stops_at_once_while_it_loads(golden_model, more):
    """Status 0, though loading cannot be interrupted."""
    code = (
        "import threading, tokenizer_svc.app as app, tokenizer_svc.__main__ as command;"
        "app.load_text_service = lambda path, name: threading.Event().wait(60);"
        "command.main()"
    )
    command = [sys.executable, "-c", code, "--model", str(golden_model)]
    command += ["--listen", "127.0.0.1:0", *more]
    events = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            events.append(json.loads(line)["event"])
            if events[-1] == "listening":
                process.send_signal(signal.SIGTERM)
                told = time.monotonic()
    assert time.monotonic() - told < 30
    assert process.returncode == 0
    assert [event for event in events if event != "progress"] == [
        "listening",
        "draining",
        "stopped",
    ]


def test_the_process_ends_with_the_reason_when_it_cannot_serve(tmp_path):
    """Status 1 and one line that says why."""
    command = [sys.executable, "-m", "tokenizer_svc", "--model", str(tmp_path)]
    command += ["--listen", "127.0.0.1:0"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    last = json.loads(run.stderr.splitlines()[-1])
    assert (run.returncode, last["event"]) == (1, "cannot serve")
    assert "no tokenizer.json" in last["reason"]
