"""The examples do what they say, against all three services."""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from google.protobuf import json_format

from examples import app_server, structured
from noria import Client
from noria.reasons import Reason, RequestError
from noria.service.limits import MAX_PRIORITY
from noria.v1 import chat_pb2
from router.validation import checked_chat
from tests.support.stack import API_KEY, running_stack
from tests.support.waiting import until
from tests.support.worker_client import StepGate
from worker.engine_thread import EngineThread

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
QUESTION = "토마토는 과일이야?"
# Printable ASCII in the fixture tokenizer.
LETTERS = [32, 127]


@pytest.fixture
async def stack(golden_model, script_file):
    script = script_file(mean_output_tokens=0, token_ids=LETTERS)
    seeds = itertools.repeat(5)
    async with running_stack(golden_model, script=script, max_num_seqs=1, seeds=seeds) as running:
        yield running


@pytest.fixture
async def app(stack):
    """The port of an app server whose Noria is the stack."""
    server = await asyncio.start_server(
        lambda reader, writer: app_server.serve(stack.client, reader, writer), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def connected(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


def post(question):
    body = question.encode()
    return b"POST / HTTP/1.1\r\nHost: app\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def read_head(reader):
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).decode()


async def read_chunk(reader):
    size = int(await asyncio.wait_for(reader.readline(), 20), 16)
    return (await reader.readexactly(size + 2))[:-2].decode()


def is_at_rest(stack):
    return set(stack.held().values()) == {0}


def test_the_app_server_is_short():
    assert len((EXAMPLES / "app_server.py").read_text().splitlines()) < 60


async def test_the_answer_is_noria_s_with_the_system_text_added(stack, app):
    async with connected(app) as (reader, writer):
        writer.write(post(QUESTION))
        assert (await read_head(reader)).startswith("HTTP/1.1 200 ")
        chunks = [await read_chunk(reader)]
        while chunks[-1]:
            chunks.append(await read_chunk(reader))
        assert await reader.read() == b""
    expected = await stack.client.chat(QUESTION, system=app_server.SYSTEM, max_tokens=200)
    without = await stack.client.chat(QUESTION, max_tokens=200)
    assert "".join(chunks) == expected.text != without.text
    assert is_at_rest(stack)


async def test_a_delta_is_passed_on_before_the_next_one_is_made(stack, app):
    gate = StepGate(stack.workers[0].runner)
    async with connected(app) as (reader, writer):
        writer.write(post(QUESTION))
        gate.let_through(3)
        await read_head(reader)
        assert await read_chunk(reader)
        await until(lambda: gate.holds_one)
        gate.let_through(1000)
        while await read_chunk(reader):
            pass


async def test_answers_for_programs_are_what_they_were_asked_to_be(stack):
    def ask():
        with Client(stack.router.address, api_key=API_KEY) as client:
            return structured.describe(client, "tomato"), structured.is_fruit(client, "tomato")

    described, verdict = await asyncio.to_thread(ask)
    if described is not None:
        jsonschema.validate(described, structured.FRUIT)
    assert verdict in (True, False)
    assert is_at_rest(stack)


def record_aborts(monkeypatch):
    """A list that gets the ids of sequences whose aborts arrive at the worker."""
    arrived, abort = [], EngineThread.abort

    def recording(thread, sequence_id):
        arrived.append(sequence_id)
        abort(thread, sequence_id)

    monkeypatch.setattr(EngineThread, "abort", recording)
    return arrived


@pytest.mark.parametrize("computed", [0, 5])
async def test_when_its_client_goes_nothing_is_held_and_nothing_more_is_computed(
    stack, app, monkeypatch, computed
):
    """Before the first delta, and amid them."""
    aborts = record_aborts(monkeypatch)
    gate, (steps,) = StepGate(stack.workers[0].runner), stack.steps
    async with connected(app) as (reader, writer):
        writer.write(post(QUESTION))
        if computed:
            gate.let_through(computed)
            await read_head(reader)
        await until(lambda: len(steps) == computed and gate.holds_one)
    await until(lambda: aborts)
    gate.let_through(1)
    await until(lambda: is_at_rest(stack))
    assert len(steps) <= computed + 1
    gate.let_through(1000)
    assert (await stack.client.chat(QUESTION, max_tokens=3)).usage.output_tokens == 3


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\xff\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n\xff\xff",
        b"x" * 100_000,
    ],
)
async def test_what_is_no_question_gets_no_answer(stack, app, request_bytes):
    async with connected(app) as (reader, writer):
        writer.write(request_bytes)
        reply = await asyncio.wait_for(reader.read(), 20)
    assert not reply.startswith(b"HTTP/1.1 200")
    assert is_at_rest(stack)


async def test_a_refusal_is_a_status_of_its_own(stack, app, monkeypatch):
    monkeypatch.setattr(app_server, "SYSTEM", "a" * 10_000)  # beyond the model's context
    async with connected(app) as (reader, writer):
        writer.write(post(QUESTION))
        assert (await read_head(reader)).startswith("HTTP/1.1 503 ")
        assert (await reader.read()).startswith(b"CONTEXT_LENGTH_EXCEEDED: ")


@pytest.fixture
def grpcurl(tmp_path):
    """A stand-in for grpcurl that says what it was given."""
    stand_in = tmp_path / "grpcurl"
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "print(json.dumps({'arguments': sys.argv[1:], 'body': sys.stdin.read()}))\n"
    )
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.defpath}", "NORIA_API_KEY": "secret"}

    def run(*arguments, **changes):
        return subprocess.run(
            ["sh", EXAMPLES / "grpcurl.sh", *arguments],
            env={**environment, **changes}, capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip

    return run


def test_grpcurl_sends_the_app_server_s_call(grpcurl):
    seen = json.loads(grpcurl("host:1").stdout)
    request = json_format.Parse(seen["body"], chat_pb2.StreamChatRequest())
    assert request.spec.system == app_server.SYSTEM
    assert request.spec.max_tokens == 200
    checked_chat(request.spec, MAX_PRIORITY)
    *flags, address, method = seen["arguments"]
    service, _, name = method.partition("/")
    assert chat_pb2.DESCRIPTOR.services_by_name["ChatService"].full_name == service
    assert name in chat_pb2.DESCRIPTOR.services_by_name["ChatService"].methods_by_name
    assert address == "host:1"
    assert flags[flags.index("-H") + 1] == "authorization: Bearer secret"
    assert flags[flags.index("-d") + 1] == "@"


def test_grpcurl_without_a_key_is_not_called(grpcurl):
    done = grpcurl(NORIA_API_KEY="")
    assert done.returncode != 0
    assert not done.stdout
    assert "NORIA_API_KEY" in done.stderr


def test_a_field_that_does_not_exist_would_be_noticed():
    with pytest.raises(json_format.ParseError):
        json_format.Parse('{"spec": {"top_p": 1}}', chat_pb2.StreamChatRequest())
    with pytest.raises(RequestError) as caught:
        checked_chat(chat_pb2.ChatSpec(), MAX_PRIORITY)
    assert caught.value.reason is Reason.INVALID_FIELD
