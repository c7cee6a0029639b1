"""What grammars cost the streams beside them: `python -m bench.structured_output --model FILE`.

Two engines of one model take steps in turn, in one process. Both have the same free streams.
Beside them one has streams that are kept inside a JSON schema, the other as many free ones.
"""

import threading
import time
from collections.abc import Sequence as Ids
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import click

from worker.build import build_engine
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.source import GrammarKind, GrammarSource
from worker.sequence import SamplingParams, Sequence

# Never whole within a benchmark; strings, numbers, words and nesting, as in common use.
SCHEMA = """{"type": "array", "minItems": 10000, "items": {"type": "object",
  "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer",
  "minimum": 0, "maximum": 120}, "role": {"enum": ["admin", "user", "guest"]},
  "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4}},
  "required": ["name", "age", "role", "tags"], "additionalProperties": false}}"""
PROMPT = tuple(range(100, 132))
WARM_UP_STEPS = 10


def streams(
    count: int, first: int, max_tokens: int, grammar: GrammarSource | None
) -> list[Sequence]:
    """Seeded streams that do not end before `max_tokens`; ids from `first` on."""
    return [
        Sequence(
            number,
            [*PROMPT[number % 7 :], number],
            SamplingParams(temperature=0.8, seed=number, grammar=grammar),
            max_tokens,
            order=number,
        )
        for number in range(first, first + count)
    ]


def ready(engine: Engine, sequences: Ids[Sequence], done: threading.Event) -> Engine:
    """All of them are in the batch, with their prompts computed."""
    for sequence in sequences:
        engine.submit(sequence, 0.0)
    while any(not sequence.output_token_ids for sequence in sequences):
        if not engine.has_work:
            done.wait()
        done.clear()
        output = engine.step()
        if output.refused:
            raise SystemExit(output.refused[0].message)
    return engine


def timed_step(engine: Engine) -> float:
    """Seconds that one step took."""
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--free", default=16, help="Streams without a grammar.")
@click.option("--structured", default=1, help="Streams with one.")
@click.option("--steps", default=200, help="Measured steps of each engine.")
@click.option("--cpu-threads", default=1)
def main(model: Path, free: int, structured: int, steps: int, cpu_threads: int) -> None:
    """Compare steps beside grammars with steps beside as many free streams."""
    config = WorkerConfig(
        model,
        max_num_seqs=free + structured,
        max_model_len=len(PROMPT) + steps + WARM_UP_STEPS + 64,
        kv_cache_memory_bytes=1024**3,
        cpu_threads=cpu_threads,
    )
    done, tokens = threading.Event(), steps + WARM_UP_STEPS + 32
    schema = GrammarSource(GrammarKind.JSON_SCHEMA, (SCHEMA,))
    with ExitStack() as compilers:

        def engine_beside(grammar: GrammarSource | None) -> tuple[Engine, list[Sequence]]:
            engine, _ = build_engine(
                config,
                lambda stage, at, total: None,
                lambda table: compilers.enter_context(GrammarCompiler(table, done.set)),
            )
            others = streams(free, 1, tokens, None)
            company = streams(structured, 1 + free, tokens, grammar)
            return ready(engine, [*company, *others], done), others

        plain, alone = engine_beside(None)
        masked, beside = engine_beside(schema)
        for _ in range(WARM_UP_STEPS):
            timed_step(plain)
            timed_step(masked)
        pairs = [(timed_step(plain), timed_step(masked)) for _ in range(steps)]
    report(pairs, alone, beside, structured)


def report(
    pairs: Ids[tuple[float, float]], alone: Ids[Sequence], beside: Ids[Sequence], structured: int
) -> None:
    """Medians in milliseconds, and whether the free streams are the same."""
    without, with_grammar = (median(times) * 1e3 for times in zip(*pairs, strict=True))
    ratio = median(masked / plain for plain, masked in pairs)
    length = min(len(s.output_token_ids) for s in [*alone, *beside])
    same = [s.output_token_ids[:length] for s in alone] == [
        s.output_token_ids[:length] for s in beside
    ]
    click.echo(f"{len(alone)} free streams beside {structured} others, {len(pairs)} steps in turn")
    click.echo(f"median step beside free streams        {without:8.2f} ms")
    click.echo(f"median step beside structured streams  {with_grammar:8.2f} ms")
    click.echo(f"ratio of medians {with_grammar / without:.3f}, median of ratios {ratio:.3f}")
    click.echo(f"the {len(alone)} streams are {'the same' if same else 'NOT the same'} ids")


if __name__ == "__main__":
    main()
