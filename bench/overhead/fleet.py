"""A worker that computes nothing: every `interval` each of its requests gets one more id.

    python -m bench.overhead.fleet --model FILE --interval-ms 16 --emitted TIMES.json

It notes when each submit arrived and when each id left, on the computer's monotonic clock,
and writes this to a file when it is told to stop.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import grpc

from noria.service.log import configure_logging
from noria.service.parent import die_with_parent
from noria.service.protocol import PROTOCOL_VERSION
from noria.service.server import running_server, stop_event
from noria.service.vocabulary import Vocabulary, load_vocabulary
from noria.v1 import worker_pb2, worker_pb2_grpc

_PLACES, _CONTEXT, _BLOCK_SIZE = 1024, 4096, 16


@dataclass(slots=True)
class Live:
    """A submit: how many ids it still gets, and the times that are noted of it."""

    number: int
    left: int
    times: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Lives:
    """What runs in one session, the last submit's number, and the steps so far."""

    entries: dict[int, Live] = field(default_factory=dict)
    last: int = 0
    steps: int = 0


class Fleet(worker_pb2_grpc.WorkerServiceServicer):
    """`emitted` has, for each request, when its submit arrived and when each id left."""

    def __init__(self, hello: worker_pb2.WorkerHello, token_id: int, interval_s: float) -> None:
        self.emitted: dict[str, list[float]] = {}
        self._hello = hello
        self._token_id = token_id
        self._interval_s = interval_s

    async def GetWorkerInfo(  # noqa: N802
        self, request: worker_pb2.GetWorkerInfoRequest, context: Any
    ) -> worker_pb2.GetWorkerInfoResponse:
        return worker_pb2.GetWorkerInfoResponse(hello=self._hello)

    async def Session(  # type: ignore[override]  # noqa: N802 - the wire's name
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: Any
    ) -> None:
        lives = Lives()
        await context.write(worker_pb2.SessionResponse(hello=self._hello))
        reading = asyncio.create_task(self._read(requests, lives))
        try:
            due = time.monotonic()
            while not context.done():
                await context.write(worker_pb2.SessionResponse(step=self._step(lives)))
                due = max(due + self._interval_s, time.monotonic() - self._interval_s)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[worker_pb2.SessionRequest], lives: Lives) -> None:
        async for request in requests:
            if request.HasField("submit"):
                submit = request.submit
                entry = Live(submit.submit_number, submit.max_tokens, [time.monotonic()])
                self.emitted[submit.id.rpartition("/")[0]] = entry.times
                lives.entries[entry.number] = entry
                lives.last = entry.number
            elif request.HasField("abort"):
                lives.entries.pop(request.abort.submit_number, None)

    def _step(self, lives: Lives) -> worker_pb2.Step:
        lives.steps += 1
        step, now = worker_pb2.Step(step_number=lives.steps), time.monotonic()
        for entry in list(lives.entries.values()):
            entry.times.append(now)
            entry.left -= 1
            step.deltas.add(submit_number=entry.number, token_ids=[self._token_id])
            if not entry.left:
                del lives.entries[entry.number]
                finished = worker_pb2.Finished(
                    finish_reasons=[worker_pb2.FINISH_REASON_LENGTH],
                    output_tokens=[len(entry.times) - 1],
                )
                step.terminals.add(submit_number=entry.number, finished=finished)
        load = worker_pb2.Load(
            last_submit_number=lives.last,
            running=len(lives.entries),
            free_blocks=1 << 20,
            step_count=lives.steps,
        )
        step.load.CopyFrom(load)
        return step


def plain_id(vocabulary: Vocabulary) -> int:
    """An id whose text is a space and a letter, whatever stands before it."""
    return vocabulary.pieces.index(b" a")


def _hello(name: str, vocabulary: Vocabulary) -> worker_pb2.WorkerHello:
    return worker_pb2.WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        instance_id="computes-nothing",
        model=name,
        vocab_fingerprint=vocabulary.fingerprint,
        max_model_len=_CONTEXT,
        max_num_seqs=_PLACES,
        max_num_batched_tokens=_PLACES,
        block_size=_BLOCK_SIZE,
        num_blocks=1 << 20,
    )


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--served-model-name", "name", required=True)
@click.option("--interval-ms", default=16.0, type=click.FloatRange(0.1))
@click.option("--emitted", type=click.Path(path_type=Path), required=True)
@click.option("--parent-pid", type=int)
def main(model: Path, name: str, interval_ms: float, emitted: Path, parent_pid: int | None) -> None:
    """Serve until told to stop."""
    if parent_pid is not None:
        die_with_parent(parent_pid)
    vocabulary = load_vocabulary(model)
    fleet = Fleet(_hello(name, vocabulary), plain_id(vocabulary), interval_ms / 1e3)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(fleet))
    emitted.write_text(json.dumps(fleet.emitted))


async def _serve(fleet: Fleet) -> None:
    log, stop = configure_logging("fleet"), stop_event()

    def add(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(fleet, server)

    async with running_server(
        add, ("noria.v1.WorkerService",), "127.0.0.1:0", stop_grace_s=0.1
    ) as server:
        await server.set_ready(True)
        log.info("listening", address=server.address)
        log.info("ready")
        await stop.wait()


if __name__ == "__main__":
    main()
