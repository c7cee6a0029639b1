"""Grammars are compiled off the engine's thread, bounded in every way, and kept by their hash."""

import contextlib
import json
import signal
import threading

import pytest

from tests.support.grammars import TABLE, allowed, choice, json_schema, regex
from worker.grammar import compiler as compiler_module
from worker.grammar import problems
from worker.grammar import trial as trial_module
from worker.grammar.compiler import GrammarCompiler, TooManyGrammarsError
from worker.grammar.source import GrammarError, GrammarKind, GrammarSource
from worker.grammar.tokens import TokenTable
from worker.grammar.trial import Trial

SECRET = "Xanadu"


class NoTrial(contextlib.nullcontext):
    """Passes everything; `check` may be replaced."""

    def __init__(self, table):
        super().__init__(self)

    def check(self, source):
        pass


@pytest.fixture
def done():
    return threading.Semaphore(0)


def finished(compiler, done, source):
    ticket = compiler.request(source)
    while not ticket.is_done:
        assert done.acquire(timeout=60)
    return ticket.result()


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
            assert allowed(finished(compiler, done, source).matcher())


def test_names_of_the_callers_own_are_never_told():
    assert problems.told(f'Unimplemented keys: ["{SECRET}", "not"]') == 'not supported: "not"'
    assert problems.told(f'Unimplemented keys: ["{SECRET}"]') == "a keyword that is not supported"
    assert problems.told(f"at 2(8): {SECRET}\n   1 | Unsatisfiable") == "cannot be compiled"


ENDLESS = f'{{"type": "integer", "multipleOf": 9999991, "title": "{SECRET}"}}'


def test_a_child_ends_by_the_time_it_has_computed_however_busy_the_machine_is():
    with Trial(TABLE, 0.1) as trial:
        trial.check(regex("a"))
        child = trial._child
        with pytest.raises(GrammarError, match="too complex to compile in"):
            trial.check(json_schema(ENDLESS))
        assert child.returncode == -signal.SIGPROF
        trial.check(regex("a"))


def test_a_child_that_says_nothing_is_ended(monkeypatch):
    monkeypatch.setattr(trial_module, "_PATIENCE", 0.0)
    with Trial(TABLE) as trial:
        with pytest.raises(GrammarError, match="too complex"):
            trial.check(json_schema(ENDLESS))
        assert trial._child is None


def test_what_would_be_compiled_for_ever_ends_its_trial_and_nothing_else(done):
    endless = json_schema(ENDLESS)
    with GrammarCompiler(TABLE, done.release, trial=lambda t: Trial(t, 0.3)) as compiler:
        assert problem(compiler, done, endless) == "too complex to compile in 0.3 s"
        assert problem(compiler, done, endless) == "too complex to compile in 0.3 s"
        assert allowed(finished(compiler, done, regex("a")).matcher()) == {ord("a")}


def test_a_grammar_is_compiled_once_for_all_that_ask_for_it(done):
    with GrammarCompiler(TABLE, done.release, trial=NoTrial) as compiler:
        first, second = (finished(compiler, done, regex("ab")) for _ in range(2))
        assert first is second
        assert finished(compiler, done, choice("ab")) is not first


def test_the_last_ones_are_kept(done):
    with GrammarCompiler(TABLE, done.release, trial=NoTrial, max_kept=2) as compiler:
        a, b = (finished(compiler, done, regex(text)) for text in "ab")
        assert finished(compiler, done, regex("a")) is a
        finished(compiler, done, regex("c"))
        assert finished(compiler, done, regex("a")) is a
        assert finished(compiler, done, regex("b")) is not b


def test_one_that_its_outputs_brought_to_a_limit_is_compiled_anew(done):
    with GrammarCompiler(TABLE, done.release, trial=NoTrial) as compiler:
        first = finished(compiler, done, regex("a"))
        first.is_spent = True
        assert finished(compiler, done, regex("a")) is not first


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
        left, kept, shared = (compiler.request(regex(text)) for text in "bcc")
        with pytest.raises(TooManyGrammarsError):
            compiler.request(regex("d"))
        left.cancel()
        left.cancel()
        shared.cancel()
        last = compiler.request(regex("d"))
        gate.set()
        while not (running.is_done and kept.is_done and last.is_done):
            assert done.acquire(timeout=60)
    assert [source.texts[0] for source in seen] == ["a", "c", "d"]


def test_leaving_ends_the_children_and_what_waits(done):
    trials = []

    def recorded(table):
        trials.append(Trial(table))
        return trials[-1]

    with GrammarCompiler(TABLE, done.release, trial=recorded) as compiler:
        finished(compiler, done, regex("a"))
        child = trials[0]._child
        assert child.poll() is None
    assert child.poll() is not None


def test_without_the_library_structured_output_is_refused_by_name(done, monkeypatch):
    monkeypatch.setattr(compiler_module, "find_spec", lambda name: None)
    not_there = pytest.raises(GrammarError, match="llguidance is not installed")
    with GrammarCompiler(TABLE, done.release) as compiler, not_there:
        compiler.request(regex("a"))


def test_a_vocabulary_that_cannot_be_indexed_is_told(done):
    no_eos, no_end = TokenTable((b"a",), [], [], 1), pytest.raises(GrammarError, match="no EOS id")
    with GrammarCompiler(no_eos, done.release) as compiler, no_end:
        compiler.request(GrammarSource(GrammarKind.JSON_OBJECT))
