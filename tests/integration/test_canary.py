"""What callers send and get stays between them and the model: nothing else ever tells it."""

import asyncio
import json
import urllib.request

import grpc
import pytest

from noria import AsyncClient, NoriaError
from noria.client.connection import key_metadata
from noria.service.api_key import key_sha256
from noria.v1 import chat_pb2, chat_pb2_grpc, common_pb2
from tests.support.processes import address, fleet
from tokenizer_svc.chat_encoder import ChatMessage
from tokenizer_svc.text_service import load_text_service

MARK = "CANARY7f3a91c2"
# What each marked thing becomes in a log that quotes it in one way or another.
DISGUISES = (MARK, MARK.lower(), MARK[::-1], MARK.encode().hex())
KEY = f"sk-{MARK}-0123456789abcdef0123456789"
WRONG_KEY = f"sk-{MARK}-wrong"
SYSTEM, PROMPT, STOP = f"system {MARK}", f"prompt {MARK}", f"stop {MARK}"
FAULTY = f"faulty {MARK}"
# Refused by the router, or by the worker's compiler.
GRAMMARS = [
    {"json_schema": f'{{"{MARK}": 1'},
    {"json_schema": f'{{"{MARK}": 1, "{MARK}": 2}}'},
    {"json_schema": {"type": "object", "properties": {MARK: {"type": MARK}}}},
    {"json_schema": {"$ref": f"http://{MARK}.example/{MARK}"}},
    {"json_schema": {"const": MARK, "not": {"const": MARK}}},
    {"regex": f"({MARK}"},
    {"regex": f"(?={MARK})"},
]
# Each was met, so that there was something to be told.
OUTCOMES = {
    "SERVED",
    "CANCELLED",
    "INTERNAL",
    "DEADLINE_EXCEEDED",
    "MODEL_NOT_FOUND",
    "CONTEXT_LENGTH_EXCEEDED",
    "INVALID_FIELD",
    "MESSAGE_TOO_LARGE",
    "UNSUPPORTED",
    "INVALID_KEY",
}
TALKATIVE = {
    "NORIA_ROUTER_LOG_LEVEL": "debug",
    "NORIA_TOKENIZER_LOG_LEVEL": "debug",
    "NORIA_WORKER_LOG_LEVEL": "debug",
    "GRPC_VERBOSITY": "debug",
    "PYTHONASYNCIODEBUG": "1",
    "PYTHONDEVMODE": "1",
}


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[tenants]]\nname = "t"\n[[tenants.keys]]\nsha256 = "{key_sha256(KEY)}"\n')
    return path


@pytest.fixture
def script(script_file, golden_model):
    """Answers PROMPT with the mark, at 20 ms a token; the batch of FAULTY raises."""
    answer = [*golden_ids(golden_model, f"reply {MARK} {MARK}"), 2]
    raising = {
        "prompt_token_ids": chat_ids(golden_model, FAULTY),
        "output_token_ids": [40, 41],
        "faults": {"1": {"kind": "raise"}},
    }
    asked = {
        "prompt_token_ids": chat_ids(golden_model, PROMPT, SYSTEM),
        "output_token_ids": answer,
    }
    return script_file([asked, raising], step_seconds=0.005, mean_output_tokens=0)


def golden_ids(model, text):
    service = load_text_service(model, "demo")
    return service.codec.encode_raw(text, add_special_tokens=False)


def chat_ids(model, text, system=None):
    messages = [] if system is None else [ChatMessage("system", system)]
    messages.append(ChatMessage("user", text))
    return load_text_service(model, "demo").chat.encode(messages)


async def test_the_mark_is_in_the_stream_alone(golden_model, script, keys_file):
    """SEC-07: served, refused, cancelled, failed, expired, with a wrong key, all as talkative as
    can be.
    """
    told = []
    async with fleet(golden_model, script, keys_file, num_workers=1, **TALKATIVE) as running:
        router = await address(running.children["router"])
        async with AsyncClient(router, api_key=KEY) as client:
            await everything(client, told)
        async with AsyncClient(router, api_key=WRONG_KEY) as stranger:
            await failing(stranger.chat(PROMPT), told)
        await raw_refusals(router, told)
        for metrics in await running.metrics_addresses():
            told.append(await asyncio.to_thread(read, f"http://{metrics}/metrics"))
            told.append(await asyncio.to_thread(read, f"http://{metrics}/metrics?name[]={MARK}"))
    assert {line.get("outcome") for line in running.events["router"]} >= OUTCOMES
    assert "batch failed" in {line["event"] for line in running.events["worker 0"]}
    events = [json.dumps(lines, ensure_ascii=False) for lines in running.events.values()]
    for text in [*told, *events]:
        assert not [mark for mark in DISGUISES if mark in text], text
        assert key_sha256(KEY) not in text


async def everything(client, told):
    served = await client.chat(PROMPT, system=SYSTEM, stop_sequences=[STOP], max_tokens=60)
    assert MARK in served.text
    async with client.stream_chat(PROMPT, system=SYSTEM, max_tokens=60) as stream:
        async for _ in stream:
            break
    await cancelled(client, told)
    await failing(client.chat(FAULTY, max_tokens=5), told)
    await failing(client.chat(PROMPT, max_tokens=60, timeout=0.02), told)
    await failing(client.chat(PROMPT, model=MARK), told)
    await failing(client.chat(PROMPT, max_tokens=10**6), told)
    await failing(client.chat(PROMPT, temperature=9.0), told)
    await failing(client.chat(PROMPT * 400_000), told)
    await failing(client.chat(PROMPT, stop_sequences=[STOP * 50]), told)
    await failing(client.cancel("req-unknown"), told)
    for unusable in GRAMMARS:
        await failing(client.chat(PROMPT, max_tokens=5, **unusable), told)
    answer = await client.chat(PROMPT, max_tokens=60, choice=[MARK])
    assert answer.text == MARK


async def cancelled(client, told):
    async with client.stream_chat(PROMPT, system=SYSTEM, max_tokens=60) as stream:
        async for _ in stream:
            await failing(end(client, stream), told)
            return


async def end(client, stream):
    await client.cancel(stream.request_id)
    async for _ in stream:
        pass


async def failing(call, told):
    """Keep all that the error says."""
    with pytest.raises(NoriaError) as caught:
        await call
    error = caught.value
    told.append(f"{error} {error!r} {error.fields} {error.timeline}")


async def raw_refusals(router, told):
    """Errors with their details as they stand on the wire."""
    fields = [
        {"messages": [chat_pb2.Message(role=99, content=[block(PROMPT)])]},
        {"messages": [chat_pb2.Message(role=chat_pb2.ROLE_USER)]},
        {"messages": [user()], "tools": [chat_pb2.Tool(name=MARK)]},
        {"messages": [user()], "sampling": common_pb2.SamplingParams(temperature=float("nan"))},
        {"messages": [user()], "model": MARK * 30},
        {"messages": [user()], "stop_sequences": [STOP] * 100},
    ]
    async with grpc.aio.insecure_channel(router) as channel:
        stub = chat_pb2_grpc.ChatServiceStub(channel)
        for each in fields:
            request = chat_pb2.ChatRequest(spec=chat_pb2.ChatSpec(**each))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Chat(request, metadata=key_metadata(KEY))
            error = caught.value
            told.append(f"{error.details()} {error.trailing_metadata()} {error.initial_metadata()}")


def block(text):
    return chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=text))


def user():
    return chat_pb2.Message(role=chat_pb2.ROLE_USER, content=[block(PROMPT)])


def read(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()
