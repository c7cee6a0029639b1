"""Grammars are compiled off the engine's thread, bounded in every way; each output has its own."""

import contextlib
import json
import signal
import threading
import time

import pytest

from tests.support.grammars import TABLE, allowed, choice, json_schema, regex
from worker.grammar import compiler as compiler_module
from worker.grammar import matcher as matcher_module
from worker.grammar import problems
from worker.grammar import trial as trial_module
from worker.grammar.compiler import GrammarCompiler, TooManyGrammarsError, Verdicts, max_live
from worker.grammar.matcher import CompiledGrammar
from worker.grammar.source import CompilerFailedError, GrammarError, GrammarKind, GrammarSource
from worker.grammar.tokens import TokenTable
from worker.grammar.trial import Trial

SECRET = "Xanadu"


class NoTrial(contextlib.nullcontext):
    """Passes everything; `check` may be replaced."""

    def __init__(self, table):
        super().__init__(self)

    def check(self, source):
        pass

    def stop(self):
        pass


@pytest.fixture
def done():
    return threading.Semaphore(0)


def finished(compiler, done, source):
    """The one matcher that was asked for."""
    ticket = compiler.request(source)
    while not ticket.is_done:
        assert done.acquire(timeout=60)
    (matcher,) = ticket.result()
    return matcher


def problem(compiler, done, source):
    with pytest.raises(GrammarError) as caught:
        finished(compiler, done, source)
    return str(caught.value)


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return json.dumps(schema)


EXPONENTIAL = "(?s).*" + "".join(f"(?:.*{letter}.*)?" for letter in "abcdefghijklmnop")
BAD = [
    (regex(f"({SECRET}"), "a group is not closed"),
    (regex(f"(?={SECRET})"), "look-around"),
    (regex(rf"({SECRET})\1"), "backreferences"),
    (regex("(" * 300 + SECRET + ")" * 300), "nested too deeply"),
    (json_schema(f'{{"{SECRET}": 1, "not": {{}}}}'), 'not supported: "not"'),
    (json_schema(f'{{"$ref": "http://{SECRET}.example/x"}}'), "another document is never fetched"),
    (json_schema(f'{{"$ref": "file:///{SECRET}"}}'), "another document is never fetched"),
    (json_schema(f'{{"$ref": "#/$defs/{SECRET}"}}'), "names nothing"),
    (json_schema('{"$ref": "#"}'), "satisfies it"),
    (json_schema(f'{{"type": "string", "format": "{SECRET}"}}'), '"format"'),
    (json_schema(f'{{"type": "{SECRET}"}}'), "cannot be compiled"),
    (json_schema(f'{{"const": "{SECRET}\\ud800"}}'), "cannot be compiled"),
    (json_schema('{"type": "integer", "minimum": 5, "maximum": 3}'), "nothing satisfies it"),
    (json_schema(f'{{"type": "string", "minLength": 1e30, "title": "{SECRET}"}}'), "compiled"),
    (json_schema(f'{{"type": "string", "pattern": "(?!{SECRET})"}}'), "look-around"),
    (json_schema(nested(65)), "nested more than 64 levels"),
]  # fmt: skip


def test_what_does_not_compile_is_named_without_its_text(done):
    with GrammarCompiler(TABLE, done.release) as compiler:
        for source, expected in BAD:
            told = problem(compiler, done, source)
            assert expected in told
            assert SECRET not in told
            assert SECRET not in repr(source)


LARGE = [
    json_schema(nested(60)),
    json_schema(json.dumps({"enum": [f"value {i}" for i in range(2_000)]})),
    json_schema('{"$defs":{"n":{"properties":{"n":{"$ref":"#/$defs/n"}}}},"$ref":"#/$defs/n"}'),
    json_schema('{"type":"array","minItems":1000000,"items":{"type":"string","minLength":9999}}'),
    regex(EXPONENTIAL),
    regex("a{1000}{1000}"),
    regex("(a|a)*b(x+x+)+y"),
    choice(*(f"{i:060}" for i in range(1_024))),
]


def test_what_is_large_but_bounded_compiles(done):
    with GrammarCompiler(TABLE, done.release) as compiler:
        for source in LARGE:
            assert allowed(finished(compiler, done, source))


def test_names_of_the_callers_own_are_never_told():
    assert problems.told(f'Unimplemented keys: ["{SECRET}", "not"]') == 'not supported: "not"'
    assert problems.told(f'Unimplemented keys: ["{SECRET}"]') == "a keyword that is not supported"
    assert problems.told(f"at 2(8): {SECRET}\n   1 | Unsatisfiable") == "cannot be compiled"


ENDLESS = f'{{"type": "integer", "multipleOf": 9999991, "title": "{SECRET}"}}'


def test_a_child_ends_by_the_time_it_has_computed_however_busy_the_machine_is(monkeypatch):
    monkeypatch.setattr(trial_module, "_PATIENCE", 600.0)
    with Trial(TABLE, 0.1) as trial:
        trial.check(regex("a"))
        child = trial._child
        with pytest.raises(GrammarError, match="too complex to compile in"):
            trial.check(json_schema(ENDLESS))
        assert child.returncode == -signal.SIGPROF
        trial.check(regex("a"))


def test_a_child_that_says_nothing_is_ended_and_that_is_no_verdict(monkeypatch):
    monkeypatch.setattr(trial_module, "_PATIENCE", 0.0)
    with Trial(TABLE) as trial:
        with pytest.raises(CompilerFailedError):
            trial.check(json_schema(ENDLESS))
        assert trial._child is None


def test_what_would_be_compiled_for_ever_ends_its_trial_and_nothing_else(done):
    endless = json_schema(ENDLESS)
    with GrammarCompiler(TABLE, done.release, trial=lambda t: Trial(t, 0.3)) as compiler:
        assert problem(compiler, done, endless) == "too complex to compile in 0.3 s"
        assert problem(compiler, done, endless) == "too complex to compile in 0.3 s"
        assert allowed(finished(compiler, done, regex("a"))) == {ord("a")}


class Counting(NoTrial):
    """Says at each trial what is next in `outcomes`."""

    outcomes, seen = [], 0

    def check(self, source):
        type(self).seen += 1
        if self.outcomes:
            raise self.outcomes.pop(0)


def counting(*outcomes):
    return type("Counted", (Counting,), {"outcomes": list(outcomes), "seen": 0})


def test_a_grammar_is_tried_once_and_each_output_gets_a_matcher_of_its_own(done):
    trial = counting()
    with GrammarCompiler(TABLE, done.release, trial=trial, num_threads=1) as compiler:
        first, second = (finished(compiler, done, regex("ab")) for _ in range(2))
        assert first is not second
        ticket = compiler.request(regex("ab"), count=3)
        while not ticket.is_done:
            assert done.acquire(timeout=60)
        assert len({*ticket.result(), first, second}) == 5
        assert trial.seen == 1


def test_a_verdict_is_kept_and_an_accident_is_not(done):
    trial = counting(CompilerFailedError("killed"), OSError(24, "files"), GrammarError("bad"))
    with GrammarCompiler(TABLE, done.release, trial=trial, num_threads=1) as compiler:
        for _ in range(2):
            with pytest.raises(CompilerFailedError):
                finished(compiler, done, regex("a"))
        for _ in range(2):
            assert problem(compiler, done, regex("a")) == "bad"
        assert trial.seen == 3


def test_only_the_last_verdicts_are_kept():
    verdicts = Verdicts(most=2)
    for name in (b"a", b"b"):
        verdicts.put(name, "")
    assert verdicts.get(b"a") == ""
    verdicts.put(b"c", "bad")
    assert (verdicts.get(b"a"), verdicts.get(b"b"), verdicts.get(b"c")) == ("", None, "bad")


HUNGRY = regex("^.*a[a-z0-9 ]{8,40}b.*$")


def test_what_other_outputs_of_a_grammar_have_written_changes_nothing(done):
    """Alone and after many others: the same ids may follow at every place."""

    def places(matcher, text):
        for token_id in text.encode():
            yield allowed(matcher)
            matcher.accept(token_id)

    text = "za" + "qwertyuiop asdfgh" + "bzz"
    with GrammarCompiler(TABLE, done.release, trial=NoTrial, num_threads=1) as compiler:
        alone = list(places(finished(compiler, done, HUNGRY), text))
        assert all(alone)
        for number in range(12):
            other = finished(compiler, done, HUNGRY)
            for _ in places(other, f"a{number}" * 30):
                pass
        assert list(places(finished(compiler, done, HUNGRY), text)) == alone


def test_one_tenants_grammars_leave_room_for_the_others(done):
    gate, begun = threading.Event(), threading.Event()
    options = {"num_threads": 1, "max_pending": 5, "max_pending_of_one": 2}
    with GrammarCompiler(TABLE, done.release, trial=gated(gate, begun, []), **options) as compiler:
        one = [compiler.request(regex(text), salt=b"one") for text in "ab"]
        with pytest.raises(TooManyGrammarsError):
            compiler.request(regex("c"), salt=b"one")
        other = compiler.request(regex("c"), salt=b"other")
        one[1].cancel()
        compiler.request(regex("d"), salt=b"one")
        gate.set()
        while not other.is_done:
            assert done.acquire(timeout=60)


def gated(gate, begun, seen):
    class Gated(NoTrial):
        def check(self, source):
            seen.append(source)
            begun.set()
            assert gate.wait(60)

    return Gated


def test_what_nobody_waits_for_any_more_is_not_compiled(done):
    gate, begun, seen = threading.Event(), threading.Event(), []
    with GrammarCompiler(
        TABLE, done.release, trial=gated(gate, begun, seen), num_threads=1, max_pending=3
    ) as compiler:
        running = compiler.request(regex("a"))
        assert begun.wait(60)
        left, kept = (compiler.request(regex(text)) for text in "bc")
        with pytest.raises(TooManyGrammarsError):
            compiler.request(regex("d"))
        left.cancel()
        left.cancel()
        last = compiler.request(regex("d"))
        gate.set()
        while not (running.is_done and kept.is_done and last.is_done):
            assert done.acquire(timeout=60)
    assert [source.texts[0] for source in seen] == ["a", "c", "d"]


@pytest.mark.parametrize("busy", [False, True])
def test_leaving_ends_children_and_threads_at_once(done, busy):
    """Also one that is in the middle of a grammar."""
    trials, claims = [], []

    def recorded(table):
        trials.append(Trial(table, 30.0))
        return trials[-1]

    with GrammarCompiler(TABLE, done.release, trial=recorded, num_threads=1) as compiler:
        finished(compiler, done, regex("a"))
        child = trials[0]._child
        assert child.poll() is None
        if busy:
            claims.append(compiler.request(json_schema(ENDLESS)))
            while not claims[0].future.running():
                pass
        (thread,) = compiler._pool._threads
    assert child.poll() is not None
    thread.join(timeout=20)
    assert not thread.is_alive()
    for claim in claims:
        with pytest.raises(CompilerFailedError):
            claim.result()


def test_without_the_library_structured_output_is_refused_by_name(done, monkeypatch):
    monkeypatch.setattr(compiler_module, "find_spec", lambda name: None)
    not_there = pytest.raises(GrammarError, match="llguidance is not installed")
    with GrammarCompiler(TABLE, done.release) as compiler, not_there:
        compiler.request(regex("a"))


def test_a_vocabulary_that_cannot_be_indexed_is_told(done):
    no_eos, no_end = TokenTable((b"a",), [], [], 1), pytest.raises(GrammarError, match="no EOS id")
    with GrammarCompiler(no_eos, done.release) as compiler, no_end:
        compiler.request(GrammarSource(GrammarKind.JSON_OBJECT))


def all_done(done, *tickets):
    while not all(ticket.is_done for ticket in tickets):
        assert done.acquire(timeout=60)


def test_a_request_is_compiled_once_whatever_its_choices(done, monkeypatch):
    notations = []

    class Counted(CompiledGrammar):
        def __init__(self, tokenizer, notation):
            notations.append(notation)
            super().__init__(tokenizer, notation)

    monkeypatch.setattr(matcher_module, "CompiledGrammar", Counted)
    with GrammarCompiler(TABLE, done.release, trial=NoTrial) as compiler:
        ticket = compiler.request(regex("ab|cd"), count=16)
        all_done(done, ticket)
        first, second, *others = ticket.result()
        assert (len(others), len(notations)) == (14, 1)
        first.accept(ord("a"))
        assert (allowed(first), second.problem) == ({ord("b")}, "")
        assert allowed(second) >= {ord("a"), ord("c")}
        assert allowed(others[-1]) >= {ord("a"), ord("c")}


def test_tenants_take_turns(done):
    """Whoever has many grammars before the compiler has one of them done before another's first."""
    gate, begun, seen = threading.Event(), threading.Event(), []
    trial = gated(gate, begun, seen)
    with GrammarCompiler(TABLE, done.release, trial=trial, num_threads=1) as compiler:
        tickets = [compiler.request(regex("x"), salt=b"one")]
        assert begun.wait(60)
        tickets += [compiler.request(regex(text), salt=b"one") for text in "abc"]
        tickets += [compiler.request(regex(text), salt=b"two") for text in "de"]
        tickets += [compiler.request(regex("f"), salt=b"three")]
        given_up = compiler.request(regex("g"), salt=b"three")
        given_up.cancel()
        gate.set()
        all_done(done, *tickets)
    assert [source.texts[0] for source in seen] == list("xadfbec")


def test_leaving_tells_those_whose_turn_has_not_come(done):
    gate, begun = threading.Event(), threading.Event()
    trial = gated(gate, begun, [])
    with GrammarCompiler(TABLE, done.release, trial=trial, num_threads=1) as compiler:
        compiler.request(regex("a"))
        assert begun.wait(60)
        later = compiler.request(regex("b"))
    gate.set()
    assert later.is_done
    with pytest.raises(CompilerFailedError):
        later.result()


def test_where_no_thread_can_be_started_the_request_fails_and_nothing_else(done, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with GrammarCompiler(TABLE, done.release, trial=NoTrial, num_threads=1) as compiler:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            ticket = compiler.request(regex("a"))
        with pytest.raises(CompilerFailedError):
            ticket.result()
        assert finished(compiler, done, regex("b"))


def test_only_so_many_requests_have_a_grammar_at_a_time(done):
    """Until nobody has a matcher of it any more; those of one request count once."""
    with GrammarCompiler(TABLE, done.release, trial=NoTrial, max_live=2) as compiler:
        tickets = [compiler.request(regex("a"), count=3), compiler.request(regex("b"))]
        full = pytest.raises(TooManyGrammarsError, match="2 requests have a grammar, at most 2")
        with full:
            compiler.request(regex("c"))
        all_done(done, *tickets)
        held = [ticket.result() for ticket in tickets]
        tickets.clear()
        del held[0][1:]
        with full:
            compiler.request(regex("c"))
        held.pop(0)
        # A thread lets go of what it made a moment after that is there.
        while len(compiler._live) > 1:
            time.sleep(0.001)
        all_done(done, ticket := compiler.request(regex("c")))
        assert ticket.result()
    assert [max_live(places) for places in (1, 32, 64, 1000)] == [64, 64, 128, 256]
