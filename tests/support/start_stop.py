"""Starts and stops all services under load, each time with an event loop of its own.

`python -m tests.support.start_stop MODEL SCRIPT CYCLES` writes "stopped SECONDS" for each.
"""

import asyncio
import sys
import time
from pathlib import Path

from tests.support.stack import running_stack

STREAMS = 8


async def cycle(model: Path, script: Path) -> float:
    """Leave while all streams run; how long that takes, in seconds. Nothing may be left."""
    async with running_stack(model, script=script) as stack:
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(consume(stack.client, begun)) for _ in range(STREAMS)]
        for _ in range(STREAMS):
            await begun.acquire()
        stopping = time.monotonic()
    ends = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(end, BaseException) for end in ends), ends
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left
    return time.monotonic() - stopping


async def consume(client, begun):
    async with client.stream_chat("hi", max_tokens=4000) as stream:
        async for _ in stream:
            begun.release()


def main() -> None:
    model, script, cycles = sys.argv[1:]
    for _ in range(int(cycles)):
        print("stopped", asyncio.run(cycle(Path(model), Path(script))), flush=True)


if __name__ == "__main__":
    main()
