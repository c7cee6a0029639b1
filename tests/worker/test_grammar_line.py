"""A sequence waits for its own grammar, holds nothing meanwhile, and keeps nobody else waiting."""

import threading

import pytest

from tests.support.engines import BlockMemory, expected_output, make_scheduler, make_sequence
from tests.support.grammars import HeldCompiler, regex
from worker.engine import Engine
from worker.engine_thread import EngineThread
from worker.grammar.compiler import TooManyGrammarsError
from worker.grammar.source import CompilerFailedError, GrammarError
from worker.scores import StepResult
from worker.sequence import FinishReason, SampledToken, SamplingParams, Sequence, SequenceStatus


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def compiler():
    return HeldCompiler()


@pytest.fixture
def clock():
    return Clock()


def constrained(number, pattern="[^x]*", *, max_tokens=4, **fields):
    sampling = SamplingParams(temperature=0.0, grammar=regex(pattern))
    return Sequence(number, [1, 2, 3, 4, 5], sampling, max_tokens, order=number, **fields)


def engine_with(compiler, *, look_ahead=8, clock=None, runner=BlockMemory, **scheduler):
    made = make_scheduler(**scheduler)
    options = {} if clock is None else {"clock": clock}
    return Engine(made, runner(made.pool), look_ahead=look_ahead, compiler=compiler, **options)


def run(engine):
    """Step until nothing can be computed; what ended, by sequence id."""
    ended = {}
    while engine.has_work:
        for entry in engine.step().ended:
            ended[entry.sequence.sequence_id] = entry
    return ended


def test_the_batch_and_those_behind_go_on_without_it(compiler):
    engine = engine_with(compiler, max_num_seqs=1)
    waiting, other = constrained(1), make_sequence(2)
    for sequence in (waiting, other):
        engine.submit(sequence, 0.0)
    assert run(engine).keys() == {2}
    assert other.output_token_ids == expected_output(other.prompt_token_ids, 4)
    assert waiting.status is SequenceStatus.WAITING_FOR_GRAMMAR
    assert not waiting.block_ids
    assert engine.scheduler.pool.num_used == 0
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.preparing) == (0, 0, 0, 1)
    compiler.finish()
    engine.step()
    assert run(engine)[1].sequence.finish_reason is FinishReason.LENGTH
    assert engine.load().preparing == 0
    assert len(waiting.output_token_ids) == 4


def test_each_waits_for_its_own(compiler):
    engine = engine_with(compiler)
    for number in (1, 2, 3):
        engine.submit(constrained(number), 0.0)
    compiler.finish(1)
    engine.step()
    assert run(engine).keys() == {2}


def test_an_abort_ends_it_at_once_and_takes_its_claim_back(compiler):
    engine = engine_with(compiler)
    engine.submit(constrained(1, siblings=[constrained(2, choice=1)]), 0.0)
    engine.abort(1)
    assert not compiler.tickets[0].cancelled
    engine.abort(2)
    engine.abort(2)
    assert compiler.tickets[0].cancelled
    reasons = [entry.sequence.finish_reason for entry in engine.step().ended]
    assert reasons == [FinishReason.ABORTED] * 2
    assert not engine.has_work
    assert engine.load().preparing == 0


def test_its_deadline_ends_it(compiler, clock):
    engine = engine_with(compiler, clock=clock)
    engine.submit(constrained(1, deadline=103.0), clock.now)
    engine.submit(constrained(2), clock.now)
    assert engine.patience_s() == 3.0
    clock.now = 104.0
    assert engine.patience_s() == 0.0
    (entry,) = engine.step().ended
    assert (entry.sequence.sequence_id, entry.sequence.finish_reason) == (1, FinishReason.EXPIRED)
    assert [ticket.cancelled for ticket in compiler.tickets] == [True, False]
    assert engine.patience_s() is None


def test_what_does_not_compile_refuses_its_request_alone_and_names_the_field(compiler):
    engine = engine_with(compiler)
    engine.submit(constrained(1, siblings=[constrained(2, choice=1)]), 0.0)
    engine.submit(make_sequence(3), 0.0)
    compiler.finish(outcome=GrammarError("nested too deeply"))
    output = engine.step()
    (refusal,) = output.refused
    field = "sampling.structured_output.regex"
    assert (refusal.sequence_id, refusal.full, refusal.field) == (1, False, field)
    assert refusal.message == f"{field}: nested too deeply"
    assert run(engine).keys() == {3}


def test_a_worker_that_compiles_none_refuses_by_name():
    scheduler = make_scheduler()
    engine = Engine(scheduler, BlockMemory(scheduler.pool), look_ahead=8)
    engine.submit(constrained(1), 0.0)
    (refusal,) = engine.step().refused
    assert refusal.message == "sampling.structured_output: not supported by this worker"
    assert not engine.has_work


def test_too_many_at_once_are_no_fault_of_the_request(compiler):
    def refuse(source, count, salt):
        raise TooManyGrammarsError("64 grammars are being compiled")

    compiler.request = refuse
    engine = engine_with(compiler)
    engine.submit(constrained(1), 0.0)
    (refusal,) = engine.step().refused
    assert (refusal.full, refusal.field) == (True, "sampling.structured_output")


def test_those_that_wait_for_grammars_keep_no_place_from_anybody(compiler):
    engine = engine_with(compiler, look_ahead=1, max_num_seqs=2)
    for number in range(1, 9):
        engine.submit(constrained(number), 0.0)
    plain = make_sequence(9)
    engine.submit(plain, 0.0)
    assert not engine.step().refused
    assert run(engine).keys() == {9}
    assert engine.load().preparing == 8


def test_those_whose_grammars_are_there_at_once_keep_to_the_room_that_was_promised(compiler):
    engine = engine_with(compiler, look_ahead=2, max_num_seqs=2)
    for number in range(1, 9):
        engine.submit(constrained(number, max_tokens=3), 0.0)
    for index in range(8):
        compiler.finish(index)
    ended, num_refused = [], 0
    for plain in range(100, 110):
        output = engine.step()
        ended += [entry.sequence.sequence_id for entry in output.ended]
        load = output.load
        assert load.waiting == engine.scheduler.num_waiting <= 2
        assert load.waiting == 2 or not load.preparing
        engine.submit(make_sequence(plain, max_tokens=1), 0.0)
        refused = len(engine._pending.refused)
        assert refused == (load.waiting == 2)
        num_refused += refused
    assert 0 < num_refused < 10
    ended += run(engine)
    assert [number for number in ended if number < 9] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert engine.load().preparing == 0


def test_of_those_that_have_their_grammars_the_most_urgent_takes_the_first_room(compiler):
    engine = engine_with(compiler, look_ahead=1, max_num_seqs=1)
    for number, priority in ((1, 0), (2, 0), (3, 5)):
        engine.submit(constrained(number, priority=priority), 0.0)
    for index in range(3):
        compiler.finish(index)
    engine.step()
    assert list(run(engine)) == [3, 1, 2]
    assert engine.load().preemptions == 0


def test_one_that_waits_for_room_with_its_grammar_can_still_end(compiler, clock):
    engine = engine_with(compiler, look_ahead=1, max_num_seqs=1, clock=clock)
    for number, deadline in ((1, None), (2, None), (3, None), (4, 103.0)):
        engine.submit(constrained(number, deadline=deadline), 0.0)
    for index in range(4):
        compiler.finish(index)
    engine.step()
    assert engine.load().preparing == 2
    engine.abort(3)
    clock.now = 104.0
    ended = {e.sequence.sequence_id: e.sequence.finish_reason for e in engine.step().ended}
    assert ended == {3: FinishReason.ABORTED, 4: FinishReason.EXPIRED}
    assert engine.load().preparing == 0
    assert run(engine).keys() == {1, 2}


def test_a_compiler_that_fails_fails_its_request_and_nothing_else(compiler):
    engine = engine_with(compiler)
    first, second = constrained(1), constrained(2)
    for sequence in (first, second):
        engine.submit(sequence, 0.0)
    compiler.finish(0, CompilerFailedError("killed"))
    compiler.finish(1)
    (failed,) = engine.step().ended
    assert (failed.sequence, failed.failure) == (first, "the grammar's compiler failed")
    assert run(engine)[2].failure == ""
    assert second.finish_reason is FinishReason.LENGTH


def test_what_can_never_fit_is_refused_before_anything_is_compiled(compiler):
    engine = engine_with(compiler, max_model_len=8)
    engine.submit(constrained(1), 0.0)
    assert "exceed the context" in engine.step().refused[0].message
    assert not compiler.tickets


def test_given_output_that_does_not_follow_the_grammar_is_refused(compiler):
    engine = engine_with(compiler)
    engine.submit(constrained(1, "abc", output_token_ids=[ord("b")], num_given_tokens=1), 0.0)
    compiler.finish()
    (refusal,) = engine.step().refused
    assert (refusal.field, refusal.full) == ("outputs", False)
    assert not engine.has_work


def test_one_whose_grammar_comes_to_a_limit_fails_alone_with_its_field(compiler):
    class NothingDrawn(BlockMemory):
        def execute(self, output):
            result = super().execute(output)
            for entry in output.scheduled:
                if entry.draw and entry.draw.matcher:
                    entry.draw.matcher.problem = "too complex"
                    del result.tokens[entry.sequence_id]
            return result

    engine = engine_with(compiler, runner=NothingDrawn)
    for sequence in (constrained(1), make_sequence(2)):
        engine.submit(sequence, 0.0)
    compiler.finish()
    ended = run(engine)
    field = "sampling.structured_output.regex"
    assert (ended[1].failure, ended[1].field) == (f"{field}: too complex", field)
    assert (ended[2].failure, ended[2].field) == ("", "")


class CountedEngine(Engine):
    """Says how often it was called."""

    steps = 0

    def step(self, *args):
        self.steps += 1
        return super().step(*args)


@pytest.fixture
def threaded(compiler):
    """An engine's thread, its engine, and an output at a time."""
    outputs, news = [], threading.Semaphore(0)
    scheduler = make_scheduler()
    engine = CountedEngine(scheduler, BlockMemory(scheduler.pool), look_ahead=8, compiler=compiler)

    def on_output(output):
        if output.ended or output.refused:
            outputs.append(output)
            news.release()

    def next_output():
        assert news.acquire(timeout=10)
        return outputs.pop(0)

    with EngineThread(lambda: (engine, None), on_output) as thread:
        yield thread, engine, next_output
    assert thread.join(10)


def test_the_thread_rests_while_there_are_only_grammars_to_wait_for(compiler, threaded):
    thread, engine, next_output = threaded
    thread.submit(constrained(1))
    thread.submit(make_sequence(2))
    assert next_output().ended[0].sequence.sequence_id == 2
    before = engine.steps
    thread.submit(make_sequence(3, max_tokens=1, prompt=1))
    assert next_output().ended[0].sequence.sequence_id == 3
    assert engine.steps <= before + 2
    compiler.finish()
    thread.wake()
    assert next_output().ended[0].sequence.sequence_id == 1


def test_the_thread_wakes_for_a_deadline(compiler, threaded):
    thread, engine, next_output = threaded
    thread.submit(constrained(1, deadline=engine._clock() + 0.05))
    (entry,) = next_output().ended
    assert entry.sequence.finish_reason is FinishReason.EXPIRED


def test_what_the_engine_books_moves_the_matcher_on(compiler):

    sequence = constrained(1, "ab")
    engine = engine_with(compiler, runner=Spelling)
    engine.submit(sequence, 0.0)
    compiler.finish()
    engine.step()
    run(engine)
    assert sequence.output_token_ids == [ord("a"), ord("b"), ord("?"), ord("?")]
    assert sequence.matcher.problem == "the output does not follow it"


class Spelling:
    """Draws "ab", then something else, whatever is allowed."""

    def __init__(self, pool):
        pass

    def launch(self, output):
        return StepResult(
            {
                entry.sequence_id: SampledToken(ord("ab??"[entry.draw.output_index]))
                for entry in output.scheduled
                if entry.draw
            }
        )


def test_an_output_that_is_over_holds_no_grammar_whoever_still_knows_of_it(compiler):
    engine = engine_with(compiler)
    known = [constrained(number, siblings=[constrained(number + 1, choice=1)]) for number in (1, 3)]
    for first in known:
        engine.submit(first, 0.0)
    for index in range(2):
        compiler.finish(index)
    engine.step()
    engine.abort(3)
    engine.abort(4)
    run(engine)
    for first in known:
        for sequence in (first, *first.siblings):
            assert sequence.finish_reason is not None
            assert sequence.matcher._grammar is None
