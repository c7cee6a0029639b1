"""Each line is asked until it is answered or refused for good; other failures are waited out."""

import asyncio

import pytest

from noria.batch.journal import open_journal
from noria.batch.lines import Line
from noria.batch.work import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    Batch,
    BatchStoppedError,
    Patience,
    Progress,
)
from noria.client.errors import (
    InvalidFieldError,
    NoWorkerError,
    QueueFullError,
    UnreachableError,
    WorkerLostError,
)
from noria.client.result import ChatResult, Usage
from noria.v1 import common_pb2


def answer(text="yes"):
    return ChatResult(text, "end_turn", None, Usage(5, 2, 3), "req", "m", common_pb2.Timeline())


def line(number):
    return Line(number, str(number), None, "x", {})


class House:
    """Answers by a list of outcomes for each line; time passes in pauses alone."""

    def __init__(self, path, outcomes=None, give_up_s=600.0):
        self.path, self.outcomes, self.give_up_s = path, outcomes or {}, give_up_s
        self.asked, self.pauses, self.now, self.progress = [], [], 0.0, Progress()
        self.at_once = self.most_at_once = 0

    async def ask(self, line):
        self.asked.append(line.number)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        outcome = self.outcomes.get(line.number, [])
        result = outcome.pop(0) if outcome else answer()
        if isinstance(result, Exception):
            raise result
        return result

    async def pause(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    async def run(self, count, concurrency=4):
        patience = Patience(self.give_up_s, lambda: self.now, self.pause)
        with open_journal(self.path) as journal:
            batch = Batch(self.ask, journal, self.progress, patience)
            await batch.run(map(line, range(1, count + 1)), concurrency)
            return journal.done


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out"


async def test_all_are_asked_once_and_no_more_than_so_many_at_a_time(path):
    house = House(path)
    assert len(await house.run(50, concurrency=7)) == 50
    assert sorted(house.asked) == list(range(1, 51))
    assert house.most_at_once == 7
    assert (house.progress.done, house.progress.output_tokens) == (50, 150)


async def test_what_is_done_is_not_asked_again(path):
    await House(path).run(10)
    house = House(path)
    await house.run(12)
    assert sorted(house.asked) == [11, 12]
    assert (house.progress.skipped, house.progress.done) == (10, 2)


async def test_a_refusal_for_good_is_the_lines_result(path):
    house = House(path, {2: [InvalidFieldError("top_p: 7; at most 1")]})
    await house.run(3)
    assert house.progress.failed == 1
    (failed,) = [row for row in path.read_text().splitlines() if "error" in row]
    assert '"INVALID_FIELD"' in failed
    assert house.pauses == []


async def test_failures_that_pass_are_waited_out_as_the_server_says_or_ever_longer(path):
    told = QueueFullError("full", retry_after_s=3.5)
    lost = [NoWorkerError("none"), UnreachableError("gone"), WorkerLostError("lost")]
    house = House(path, {1: [told, *lost, *(UnreachableError("x") for _ in range(6))]})
    await house.run(1)
    doubled = [min(FIRST_PAUSE_S * 2**n, LAST_PAUSE_S) for n in range(1, 10)]
    assert house.pauses == [3.5, *doubled]
    assert house.progress.done == 1


async def test_a_batch_that_nobody_answers_stops_and_keeps_what_is_done(path):
    house = House(path, {2: [UnreachableError("gone") for _ in range(99)]}, give_up_s=100)
    with pytest.raises(BatchStoppedError, match="the last failure: UNKNOWN: gone") as caught:
        await house.run(5, concurrency=1)
    assert isinstance(caught.value.__cause__, UnreachableError)
    assert 100 < house.now < 200
    assert path.read_text().count("\n") == 1
