"""Every submit of a session gets exactly one terminal entry, and nobody else's tokens."""

from dataclasses import replace

import pytest

from noria.v1 import common_pb2, worker_pb2
from tests.support.engines import BlockMemory, make_scheduler
from worker.engine import Engine
from worker.scores import StepResult
from worker.session import SessionProtocolError
from worker.session_hub import SessionHub
from worker.translate import ModelLimits, Origin


class InlineEngine:
    """The engine behind sessions, stepped by the test."""

    def __init__(self, **pool):
        self.scheduler = make_scheduler(**pool)
        self.engine = Engine(self.scheduler, BlockMemory(self.scheduler.pool), look_ahead=8)
        self.load = self.engine.load()

    def step_age_s(self):
        return 0.0

    def submit(self, sequence):
        self.engine.submit(sequence, arrived=0.0)

    def abort(self, sequence_id):
        self.engine.abort(sequence_id)

    def step(self, hub):
        output = self.engine.step()
        self.load = output.load
        if not output.is_empty:
            hub.deliver(output)


@pytest.fixture
def engine():
    return InlineEngine()


@pytest.fixture
def hub(engine):
    return SessionHub(engine, ModelLimits(1000, 128, frozenset({0})), origin=Origin(3584))


def submit(number, **fields):
    defaults = {
        "id": f"r{number}/1",
        "submit_number": number,
        "prompt_token_ids": [number, 5, 6],
        "max_tokens": 3,
        "sampling": common_pb2.SamplingParams(temperature=0.0, ignore_eos=True),
    }
    return worker_pb2.Submit(**{**defaults, **fields})


async def taken(session):
    return [message.to_proto() for message in await session.outbox.take()]


async def test_a_step_is_one_message_with_everything_of_it(engine, hub):
    with hub.session() as session:
        session.submit(submit(1))
        session.submit(submit(2, max_tokens=1))
        engine.step(hub)
        (message,) = await taken(session)
        assert [delta.submit_number for delta in message.step.deltas] == [1, 2]
        assert [terminal.submit_number for terminal in message.step.terminals] == [2]
        assert message.step.load.last_submit_number == 2
        assert message.step.load.running == 1


async def test_a_load_tells_what_each_priority_holds(hub, engine):
    with hub.session() as session:
        for number, priority in ((1, -100), (2, -100), (3, 7)):
            session.submit(submit(number, priority=priority))
        engine.step(hub)
        session.submit(submit(4, priority=7))
        engine.load = replace(engine.engine.load(), preparing=5)
        load = session.load()
        assert load.HasField("preparing")
        assert (load.running, load.waiting, load.preparing) == (3, 1, 5)
        low, high = load.priorities
        assert (low.priority, low.running, low.waiting, low.waiting_tokens) == (-100, 2, 0, 0)
        assert (high.priority, high.running, high.waiting, high.waiting_tokens) == (7, 1, 1, 3)
        assert (low.yielded_blocks, high.yielded_blocks) == (2, 3)


async def test_the_first_id_of_a_submit_and_no_other_comes_with_its_durations(engine, hub):
    with hub.session() as session:
        session.submit(submit(1))
        for is_first in (True, False):
            engine.step(hub)
            (message,) = await taken(session)
            (delta,) = message.step.deltas
            assert delta.HasField("waiting_us") is is_first
            assert delta.HasField("prefill_us") is is_first


async def test_steps_merge_for_a_slow_reader_and_lose_nothing(engine, hub):
    with hub.session() as session:
        session.submit(submit(1))
        for _ in range(3):
            engine.step(hub)
        (message,) = await taken(session)
        (delta,) = message.step.deltas
        assert len(delta.token_ids) == 3
        (terminal,) = message.step.terminals
        assert terminal.finished.output_tokens == [3]
        assert terminal.finished.finish_reasons == [worker_pb2.FINISH_REASON_LENGTH]
        assert terminal.finished.prompt_tokens == 3
        assert message.step.step_number == 3


async def test_two_sessions_never_see_each_others_tokens(engine, hub):
    with hub.session() as first, hub.session() as second:
        first.submit(submit(1, max_tokens=1))
        second.submit(submit(1, prompt_token_ids=[77], max_tokens=2))
        engine.step(hub)
        engine.step(hub)
        (for_first,), (for_second,) = await taken(first), await taken(second)
        assert [len(delta.token_ids) for delta in for_first.step.deltas] == [1]
        assert [len(delta.token_ids) for delta in for_second.step.deltas] == [2]


async def test_a_duplicate_id_is_refused_and_touches_nothing(engine, hub):
    with hub.session() as session:
        session.submit(submit(1))
        session.submit(submit(2, id="r1/1"))
        (message,) = await taken(session)
        (terminal,) = message.step.terminals
        assert (terminal.submit_number, terminal.refused.field) == (2, "id")
        engine.step(hub)
        assert session.num_live == 1


async def test_a_submit_number_that_does_not_rise_ends_the_session(hub):
    with hub.session() as session:
        session.submit(submit(2))
        with pytest.raises(SessionProtocolError, match="submit_number 2 does not follow 2"):
            session.submit(submit(2, id="other/1"))


async def test_a_continuation_with_nothing_left_to_do_ends_at_once(engine, hub):
    with hub.session() as session:
        ended = common_pb2.SamplingParams(temperature=0.0)
        session.submit(submit(1, outputs=[worker_pb2.OutputTokens(ids=[7, 0])], sampling=ended))
        session.submit(submit(2, outputs=[worker_pb2.OutputTokens(ids=[7, 8, 9])]))
        engine.step(hub)
        (message,) = await taken(session)
        reasons = {t.submit_number: t.finished.finish_reasons for t in message.step.terminals}
        eos, length = worker_pb2.FINISH_REASON_EOS, worker_pb2.FINISH_REASON_LENGTH
        assert reasons == {1: [eos], 2: [length]}
        assert not message.step.deltas


async def test_a_bad_submit_gets_its_one_terminal_entry(engine, hub):
    with hub.session() as session:
        session.submit(submit(1, prompt_token_ids=[]))
        (message,) = await taken(session)
        refused = message.step.terminals[0].refused
        assert refused.code == worker_pb2.REFUSAL_CODE_INVALID
        assert refused.field == "prompt_token_ids"
        assert hub.num_live == 0


async def test_what_a_router_orders_every_router_hears_and_no_stop_is_taken_back(hub):
    with hub.session() as one, hub.session() as other:
        one.set_draining(True)
        loads = [(await each.outbox.take())[-1].load.draining for each in (one, other)]
        assert loads == [True, True]
        hub.stopping = True
        other.set_draining(False)
        assert hub.draining
        hub.stopping = False
        assert not hub.draining


async def test_a_draining_worker_takes_nothing_new_and_finishes_the_rest(engine, hub):
    with hub.session() as session:
        session.submit(submit(1))
        hub.stopping = True
        session.submit(submit(2))
        for _ in range(3):
            engine.step(hub)
        (message,) = await taken(session)
        by_number = {terminal.submit_number: terminal for terminal in message.step.terminals}
        assert by_number[2].refused.code == worker_pb2.REFUSAL_CODE_DRAINING
        assert by_number[1].finished.output_tokens == [3]


async def test_an_abort_is_answered_and_an_unknown_or_repeated_one_ignored(engine, hub):
    with hub.session() as session:
        session.submit(submit(1, max_tokens=50))
        engine.step(hub)
        session.abort(1)
        session.abort(1)
        session.abort(99)
        engine.step(hub)
        (message,) = await taken(session)
        (terminal,) = message.step.terminals
        assert terminal.finished.finish_reasons == [worker_pb2.FINISH_REASON_ABORTED]
        assert engine.scheduler.pool.num_used == 0


async def test_the_end_of_a_session_ends_all_of_it_and_only_that(engine, hub):
    with hub.session() as other:
        with hub.session() as session:
            session.submit(submit(1, max_tokens=50))
            session.submit(submit(2, max_tokens=50))
            other.submit(submit(1, max_tokens=50))
            engine.step(hub)
        engine.step(hub)
        assert engine.scheduler.num_running == 1
        assert hub.num_live == 1
    engine.step(hub)
    assert (engine.scheduler.num_running, engine.scheduler.pool.num_used, hub.num_live) == (0, 0, 0)


async def test_a_new_session_starts_empty_and_old_names_are_free(engine, hub):
    with hub.session() as session:
        session.submit(submit(1))
    with hub.session() as session:
        session.submit(submit(1))
        engine.step(hub)
        (message,) = await taken(session)
        assert [delta.submit_number for delta in message.step.deltas] == [1]


async def test_traced_steps_carry_the_schedulers_own_figures(engine, hub):
    with hub.session() as session:
        session.submit(
            submit(1, prompt_token_ids=list(range(1, 21)), trace_steps=True, max_tokens=2)
        )
        for _ in range(3):
            engine.step(hub)
        (message,) = await taken(session)
        (delta,) = message.step.deltas
        figures = [(r.first_position, r.num_positions, r.kv_tokens) for r in delta.steps]
        assert figures == [(0, 16, 16), (16, 4, 20), (20, 1, 21)]
        assert [record.HasField("token_id") for record in delta.steps] == [False, True, True]
        assert {record.hidden_size for record in delta.steps} == {3584}


async def test_choices_have_deltas_of_their_own_and_one_terminal_entry(engine, hub):
    """Which also counts them all; only the first tells what the prompt found cached."""
    with hub.session() as session:
        session.submit(submit(1, n=3, prompt_token_ids=list(range(1, 8)), max_tokens=2))
        messages = []
        while hub.num_live:
            engine.step(hub)
            messages += await taken(session)
        assert all(not message.step.terminals for message in messages[:-1])
        (terminal,) = messages[-1].step.terminals
        deltas = [delta for message in messages for delta in message.step.deltas]
        ids = {i: [t for d in deltas if d.choice == i for t in d.token_ids] for i in range(3)}
        assert [len(ids[i]) for i in range(3)] == [2, 2, 2]
        assert [d.choice for d in deltas if d.HasField("cached_tokens")] == [0]
        assert [d.choice for d in deltas if d.finish_reason] == [0, 1]
        finished = terminal.finished
        assert list(finished.finish_reasons) == [worker_pb2.FINISH_REASON_LENGTH] * 3
        assert list(finished.output_tokens) == [2, 2, 2]
        # The prompt, its last three tokens twice more, and a decode each.
        assert (finished.prompt_tokens, finished.computed_tokens) == (7, 7 + 2 * 3 + 3)


async def test_an_abort_ends_all_choices_with_one_entry(engine, hub):
    with hub.session() as session:
        session.submit(submit(1, n=3, max_tokens=50))
        engine.step(hub)
        engine.step(hub)
        assert engine.scheduler.num_running == 3
        session.abort(1)
        engine.step(hub)
        (message,) = await taken(session)
        (terminal,) = message.step.terminals
        assert list(terminal.finished.finish_reasons) == [worker_pb2.FINISH_REASON_ABORTED] * 3
        assert (engine.scheduler.num_running, engine.scheduler.pool.num_used) == (0, 0)
        assert hub.num_live == 0


@pytest.mark.parametrize("choice", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_an_abort_of_one_choice_leaves_the_others(engine, hub, choice, steps):
    """Before the prompt is computed too: the next choice computes it then."""
    with hub.session() as session:
        session.submit(submit(1, n=3, max_tokens=5))
        for _ in range(steps):
            engine.step(hub)
        for _ in range(2):
            session.abort_choice(1, choice)
        engine.step(hub)
        assert engine.scheduler.num_running + engine.scheduler.num_waiting == 2
        while hub.num_live:
            engine.step(hub)
        *_, message = await taken(session)
        (terminal,) = message.step.terminals
        reasons = [worker_pb2.FINISH_REASON_LENGTH] * 3
        reasons[choice] = worker_pb2.FINISH_REASON_ABORTED
        assert list(terminal.finished.finish_reasons) == reasons
        output = list(terminal.finished.output_tokens)
        assert output.pop(choice) <= steps
        assert output == [5, 5]


async def test_an_abort_of_a_choice_that_is_not_there_is_ignored(engine, hub):
    with hub.session() as session:
        session.submit(submit(1, n=2, max_tokens=3))
        for number, choice in ((1, 2), (1, 2**32 - 1), (2, 0)):
            session.abort_choice(number, choice)
        while hub.num_live:
            engine.step(hub)
        *_, message = await taken(session)
        (terminal,) = message.step.terminals
        assert list(terminal.finished.output_tokens) == [3, 3]
        session.abort_choice(1, 0)


async def test_the_last_choice_aborted_ends_the_submit(engine, hub):
    with hub.session() as session:
        session.submit(submit(1, n=2, max_tokens=50))
        engine.step(hub)
        for choice in (1, 0):
            session.abort_choice(1, choice)
        engine.step(hub)
        *_, message = await taken(session)
        (terminal,) = message.step.terminals
        assert list(terminal.finished.finish_reasons) == [worker_pb2.FINISH_REASON_ABORTED] * 2
        assert (hub.num_live, engine.scheduler.pool.num_used) == (0, 0)


async def test_a_choice_that_fails_takes_its_request_with_it_and_no_other(engine, hub):
    drawn = engine.engine._flights._runner.execute
    engine.engine._flights._runner.execute = lambda output: StepResult(
        {key: token for key, token in drawn(output).tokens.items() if key != 2}
    )
    with hub.session() as session:
        session.submit(submit(1, n=3, max_tokens=50))
        session.submit(submit(2, max_tokens=50))
        for _ in range(4):
            engine.step(hub)
        (message,) = await taken(session)
        (terminal,) = message.step.terminals
        assert terminal.submit_number == 1
        assert terminal.refused.code == worker_pb2.REFUSAL_CODE_INTERNAL
        assert engine.scheduler.num_running == hub.num_live == 1


async def test_log_probabilities_come_one_for_each_id(engine, hub):
    asked = common_pb2.SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)
    with hub.session() as session:
        session.submit(submit(1, sampling=asked))
        for _ in range(3):
            engine.step(hub)
        (message,) = await taken(session)
        (delta,) = message.step.deltas
        assert len(delta.chosen) == len(delta.token_ids) == 3


async def test_load_alone_is_no_step(hub):
    with hub.session() as session:
        session.report_load()
        (message,) = await taken(session)
        assert message.WhichOneof("message") == "load"
        assert message.load.free_blocks == 64


async def test_load_names_only_submits_it_includes(engine, hub):
    with hub.session() as session:
        session.submit(submit(1))
        session.report_load()
        (message,) = await taken(session)
        assert message.load.last_submit_number == 0
        engine.step(hub)
        (message,) = await taken(session)
        assert message.step.load.last_submit_number == 1


async def test_a_router_hears_when_a_prompt_is_first_computed_whatever_becomes_of_it(engine, hub):
    with hub.session() as session:
        session.submit(submit(1))
        engine.engine.step(on_entered=hub.deliver)
        (message,) = await taken(session)
    (delta,) = message.step.deltas
    assert delta.submit_number == 1
    assert not delta.token_ids
    assert delta.HasField("waiting_us")
    assert not delta.HasField("prefill_us")


async def test_of_several_choices_the_first_one_says_when_the_prompt_is_computed(engine, hub):
    with hub.session() as session:
        session.submit(submit(1, n=3))
        entered = []
        while engine.engine.has_work:
            engine.engine.step(on_entered=entered.append)
        for output in entered:
            hub.deliver(output)
        (message,) = await taken(session)
    assert sum(len(output.entered) for output in entered) == 3
    assert [delta.choice for delta in message.step.deltas] == [0]
