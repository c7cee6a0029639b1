"""Runners that compute a step only when it is collected, as a device does at the latest."""

from dataclasses import replace

from tests.support.engines import BlockMemory
from worker.scores import StepResult
from worker.sequence import PENDING_TOKEN, SampledToken, ScheduledSequence, SchedulerOutput


def known(output: SchedulerOutput, drawn: dict[int, SampledToken]) -> SchedulerOutput:
    """The step with what the one before has drawn in the place of pending tokens."""
    entries = tuple(_known(entry, drawn) for entry in output.scheduled)
    return replace(output, scheduled=entries)


def _known(entry: ScheduledSequence, drawn: dict[int, SampledToken]) -> ScheduledSequence:
    assert PENDING_TOKEN not in entry.token_ids[:-1]
    if not entry.is_pending:
        return entry
    token = drawn.get(entry.sequence_id, SampledToken(0))
    return entry._replace(token_ids=[*entry.token_ids[:-1], token.token_id])


class LateMemory:
    """A `BlockMemory` whose steps run when they are collected, in order.

    Until then nobody else may hold what they write to: it fails if a block has been given
    back, or given to somebody else, before the step that writes to it has run.
    """

    def __init__(self, pool):
        self.pool = pool
        self.memory = BlockMemory(pool)
        self.drawn = {}
        self.in_flight = []
        self.overlapped = 0
        self.failures = {}

    def launch(self, output):
        self.overlapped += bool(self.in_flight)
        computing = _Late(self, output, [list(entry.block_ids) for entry in output.scheduled])
        self.in_flight.append(computing)
        return computing


class _Late:
    def __init__(self, runner, output, tables):
        self.runner, self.output, self.tables = runner, output, tables

    def collect(self) -> StepResult:
        runner = self.runner
        assert runner.in_flight.pop(0) is self
        if self.output.step in runner.failures:
            runner.drawn = {}
            raise runner.failures.pop(self.output.step)
        for entry, table in zip(self.output.scheduled, self.tables, strict=True):
            assert runner.pool.num_unheld(table) == 0, "a block was given back too early"
            assert list(entry.block_ids[: len(table)]) == table
        result = runner.memory.execute(known(self.output, runner.drawn))
        runner.drawn = dict(result.tokens)
        return result
