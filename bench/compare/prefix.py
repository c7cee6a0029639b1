"""A prefix that requests share: computed once, or by each."""

from pathlib import Path

import click

from bench.compare.drive import Driven
from bench.compare.engine import BenchedEngine
from bench.compare.options import benched_engine, new_table, on_a_model, tell, with_outputs, words
from bench.compare.policies import Ask, Continuous
from bench.load.summary import Percentiles


def prefixed(count: int, prefix: int, own: int, output_tokens: int) -> list[Ask]:
    """Prompts that begin alike."""
    shared = words(prefix, 1)
    return [Ask(shared + words(own, 2 + number), output_tokens) for number in range(count)]


def compared(engine: BenchedEngine, asks: list[Ask], at_once: int) -> dict[str, Driven]:
    """Without the cache, then with it, empty at first."""
    return {
        name: engine.run(asks, Continuous(at_once), engine.scheduler(at_once, caches=caches))
        for name, caches in (("cache off", False), ("cache on", True))
    }


def figures_of(driven: Driven) -> dict[str, float]:
    ttft = Percentiles.of(served.ttft_s for served in driven.served)
    return {
        "prompt_positions": sum(s.positions - s.sequences for s in driven.steps if not s.is_decode),
        "wall_s": driven.wall_s,
        "ttft_p50_ms": ttft.p50,
        "ttft_p99_ms": ttft.p99,
        "decode_step_ms": _decode_ms(driven),
    }


def _decode_ms(driven: Driven) -> float:
    """A step of the full batch: what the cache does not change."""
    most = max(step.sequences for step in driven.steps)
    full = [s.took_s for s in driven.steps if s.is_decode and s.sequences == most]
    return Percentiles.of(full).p50


@click.command("prefix-cache")
@on_a_model
@click.option("--requests", "count", default=24, show_default=True, type=click.IntRange(2))
@click.option("--prefix-tokens", default=512, show_default=True, type=click.IntRange(1))
@click.option("--own-tokens", default=32, show_default=True, type=click.IntRange(1))
@click.option("--output-tokens", default=32, show_default=True, type=click.IntRange(2))
@click.option("--concurrency", default=4, show_default=True, type=click.IntRange(1))
@with_outputs
def prefix_cache(
    model: str, cpu_threads: int, count: int, prefix_tokens: int, own_tokens: int,
    output_tokens: int, concurrency: int, json_path: Path | None, plot_path: Path | None,
) -> None:  # fmt: skip
    """A shared prefix, with the prefix cache and without."""
    length = prefix_tokens + own_tokens + output_tokens + 16
    engine = benched_engine(model, cpu_threads, tokens=(count + 1) * length, max_model_len=length)
    asks = prefixed(count, prefix_tokens, own_tokens, output_tokens)
    told = compared(engine, asks, concurrency)
    table = new_table(
        f"{count} requests, {concurrency} at once: {prefix_tokens} tokens that all share,"
        f" {own_tokens} of their own, {output_tokens} out",
        "", "prompt positions", "until all is done, s", "TTFT p50 ms", "p99 ms", "decode step ms",
    )  # fmt: skip
    figures = {name: figures_of(driven) for name, driven in told.items()}
    for name, of in figures.items():
        table.add_row(
            name, f"{of['prompt_positions']:,.0f}", f"{of['wall_s']:.2f}",
            f"{of['ttft_p50_ms']:,.0f}", f"{of['ttft_p99_ms']:,.0f}", f"{of['decode_step_ms']:.1f}",
        )  # fmt: skip
    tell(table, figures, json_path)
    if plot_path is not None:
        from bench.compare.plots import plot_prefix

        plot_prefix(told, plot_path)
