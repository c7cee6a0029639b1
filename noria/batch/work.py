"""Asks what a batch has not done yet, so many at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from noria.batch.journal import Journal
from noria.batch.lines import Line
from noria.client.errors import NoriaError, UnreachableError
from noria.client.result import ChatResult, Usage
from noria.reasons import RETRY_OF, Retry

# Pauses after failures that may pass by themselves: doubled each time, up to the last.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
Ask = Callable[[Line], Awaitable[ChatResult]]


class BatchStoppedError(Exception):
    """Nothing was answered for too long; the last failure is the cause."""


@dataclass(slots=True)
class Progress:
    """What this run has done since `begun`; `failed` of the `done` ended with an error."""

    begun: float = 0.0
    total: int = 0
    skipped: int = 0
    done: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, usage: Usage) -> None:
        self.input_tokens += usage.input_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.output_tokens


@dataclass(frozen=True, slots=True)
class Patience:
    """For how long failures that may pass are answered with pauses, in seconds."""

    give_up_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Batch:
    """Each line not in the journal is asked until it is answered or refused for good.

    An answer, and a refusal that the same request would meet again, is its result. Other
    failures (no worker, a lost connection, a full queue) are waited out.
    """

    def __init__(self, ask: Ask, journal: Journal, progress: Progress, patience: Patience) -> None:
        self._ask = ask
        self._journal = journal
        self._progress = progress
        self._patience = patience
        self._last_success = patience.clock()

    async def run(self, lines: Iterable[Line], concurrency: int) -> None:
        """Raises BatchStoppedError; what is done stays done."""
        left = iter(lines)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._one_after_another(left))
        except ExceptionGroup as failures:
            raise failures.exceptions[0]  # noqa: B904 - it has its own cause

    async def _one_after_another(self, lines: Iterator[Line]) -> None:
        for line in lines:
            if line.number in self._journal.done:
                self._progress.skipped += 1
                continue
            result = await self._result(line)
            self._journal.append(line.number, line.id, result)
            self._progress.done += 1

    async def _result(self, line: Line) -> dict[str, Any]:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                answer = await self._ask(line)
            except NoriaError as error:
                if not _may_pass(error):
                    self._progress.failed += 1
                    return _failure(error)
                await self._wait(error, pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            else:
                self._last_success = self._patience.clock()
                self._progress.add(answer.usage)
                return _answer(answer)

    async def _wait(self, error: NoriaError, pause_s: float) -> None:
        patience = self._patience
        if patience.clock() - self._last_success > patience.give_up_s:
            silent = f"nothing was answered for {patience.give_up_s:g} s"
            raise BatchStoppedError(f"{silent}; the last failure: {error}") from error
        await patience.sleep(pause_s if error.retry_after_s is None else error.retry_after_s)


def _may_pass(error: NoriaError) -> bool:
    """Whether the same request may be answered later."""
    if error.reason is None:
        return isinstance(error, UnreachableError)
    return RETRY_OF[error.reason] is not Retry.NO


def _answer(answer: ChatResult) -> dict[str, Any]:
    usage = answer.usage
    told: dict[str, Any] = {
        "text": answer.text,
        "stop_reason": answer.stop_reason,
        "model": answer.model,
        "request_id": answer.request_id,
        "usage": {
            "input_tokens": usage.input_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        },
    }
    if len(answer.choices) > 1:
        told["texts"] = [choice.text for choice in answer.choices]
    return told


def _failure(error: NoriaError) -> dict[str, Any]:
    reason = error.reason.value if error.reason else error.code.name
    return {"error": {"reason": reason, "message": error.message, "request_id": error.request_id}}
