"""`python -m router` as an operator sees it: events on stderr, signals, exit codes."""

import asyncio
import json
import os
import signal
import sys

from tests.router.fakes import KEY_SHA256, FakeTokenizer, FakeWorker

HEAVY = ("torch", "numpy", "tokenizers", "transformers", "redis")


async def start(*flags: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *flags,
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )


async def wait_for_event(process: asyncio.subprocess.Process, event: str) -> dict:
    async with asyncio.timeout(20):
        while line := await process.stderr.readline():
            told = json.loads(line)
            if told["event"] == event:
                return told
    raise AssertionError(f"the router ended without {event}")


async def test_it_listens_gets_ready_drains_and_exits_with_zero():
    """Configured by flags and environment; SIGTERM ends it cleanly."""
    tokenizer, worker = FakeTokenizer(), FakeWorker()
    await tokenizer.start()
    await worker.start()
    process = await start(
        *("-m", "router", "--listen", "127.0.0.1:0", "--worker", worker.address),
        NORIA_ROUTER_TOKENIZER=tokenizer.address,
        NORIA_ROUTER_API_KEY_SHA256=KEY_SHA256,
    )
    try:
        address = (await wait_for_event(process, "listening"))["address"]
        assert not address.endswith(":0")
        await wait_for_event(process, "ready")
        process.send_signal(signal.SIGTERM)
        await wait_for_event(process, "draining")
        await wait_for_event(process, "stopped")
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await tokenizer.stop()
        await worker.stop()


async def test_a_wrong_flag_is_one_plain_line():
    process = await start(
        *("-m", "router", "--tokenizer", "t:1", "--worker", "w:1", "--api-key-sha256", "beef")
    )
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert "api-key-sha256: 4 characters; 64 hex digits are needed" in errors.decode()
    assert "Traceback" not in errors.decode()


async def test_the_router_needs_neither_torch_nor_tokenizers():
    code = f"import sys, router.__main__; print([m for m in {HEAVY!r} if m in sys.modules])"
    process = await start("-c", code)
    out, _ = await asyncio.wait_for(process.communicate(), 20)
    assert out.decode().strip() == "[]"
