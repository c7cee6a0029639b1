"""Static, dynamic and continuous batching on long-tailed outputs, at equal KV memory.

A batch that runs to its longest output has to set keys and values aside for the longest
there could be; continuous batching takes blocks as tokens come, and more sequences fit.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.compare.drive import Driven
from bench.compare.engine import BenchedEngine, measure_curve, predicted
from bench.compare.options import benched_engine, new_table, on_a_model, tell, with_outputs, words
from bench.compare.policies import Ask, Batches, Continuous, Policy
from bench.load.distributions import Lengths
from bench.load.summary import Percentiles
from bench.options import LENGTHS


@dataclass(frozen=True, slots=True)
class Contest:
    """A policy's name, what was measured, what was predicted."""

    name: str
    driven: Driven
    predicted: Driven

    def figures(self) -> dict[str, float]:
        ttft = Percentiles.of(served.ttft_s for served in self.driven.served)
        return {
            "tokens_per_s": self.driven.tokens_per_s,
            "predicted_tokens_per_s": self.predicted.tokens_per_s,
            "ttft_p50_ms": ttft.p50,
            "ttft_p99_ms": ttft.p99,
            "wall_s": self.driven.wall_s,
            "rows_computed": sum(step.sequences for step in self.driven.steps) / self._num_steps,
            "rows_useful": sum(step.useful for step in self.driven.steps) / self._num_steps,
        }

    @property
    def _num_steps(self) -> int:
        return len(self.driven.steps)


def policies(size: int, most: int, patience_s: float) -> dict[str, tuple[int, Policy]]:
    """By name: places of the scheduler, policy. `size` sequences of the longest fit in memory."""
    return {
        "static, rows kept": (size, Batches(size, keeps_rows=True)),
        "static, rows dropped": (size, Batches(size)),
        "dynamic": (size, Batches(size, patience_s)),
        "continuous": (most, Continuous(most)),
    }


def contests(
    engine: BenchedEngine, asks: list[Ask], size: int, most: int, patience_s: float
) -> list[Contest]:
    """Each policy for real, and by the step times measured before."""
    curve = measure_curve(engine, most)
    told = []
    for name, (places, policy) in policies(size, most, patience_s).items():
        click.echo(f"{name} ...", err=True)
        driven = engine.run(asks, policy, engine.scheduler(places))
        guess = predicted(asks, policy, engine.scheduler(places), curve)
        told.append(Contest(name, driven, guess))
    return told


def long_tailed(
    count: int, prompt_tokens: int, lengths: Lengths, rate: float, seed: int
) -> list[Ask]:
    """Requests that come at random, `rate` a second on average."""
    rng, now, asks = random.Random(seed), 0.0, []
    for number in range(count):
        asks.append(Ask(words(prompt_tokens, number), lengths.draw(rng), now))
        now += rng.expovariate(rate)
    return asks


@click.command()
@on_a_model
@click.option("--requests", "count", default=96, show_default=True, type=click.IntRange(2))
@click.option("--prompt-tokens", default=32, show_default=True, type=click.IntRange(1))
@click.option("--output-tokens", default="exponential:48:4:384", show_default=True, type=LENGTHS)
@click.option("--rate", default=20.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--static-size", default=8, show_default=True, help="Sequences set aside for.")
@click.option("--max-num-seqs", default=48, show_default=True, help="Of continuous batching.")
@click.option("--patience", default=1.0, show_default=True, help="Of dynamic batching, in s.")
@click.option("--seed", default=1, show_default=True)
@with_outputs
def batching(
    model: str, cpu_threads: int, count: int, prompt_tokens: int, output_tokens: Lengths,
    rate: float, static_size: int, max_num_seqs: int, patience: float, seed: int,
    json_path: Path | None, plot_path: Path | None,
) -> None:  # fmt: skip
    """Static, dynamic and continuous batching on long-tailed outputs, at equal KV memory."""
    asks = long_tailed(count, prompt_tokens, output_tokens, rate, seed)
    longest = prompt_tokens + max(ask.output_tokens for ask in asks)
    tokens = static_size * (longest + 16)
    engine = benched_engine(model, cpu_threads, tokens=tokens, max_model_len=longest + 16)
    told = contests(engine, asks, static_size, max_num_seqs, patience)
    table = new_table(
        f"{count} requests, prompts of {prompt_tokens} tokens, outputs {output_tokens.text},"
        f" {rate:g} a second, KV memory for {static_size} of the longest",
        "", "tokens/s", "predicted", "gain", "TTFT p50 ms", "p99 ms", "useful rows",
    )  # fmt: skip
    figures: dict[str, Any] = {contest.name: contest.figures() for contest in told}
    base = told[0].driven.tokens_per_s
    for name, of in figures.items():
        table.add_row(
            name, f"{of['tokens_per_s']:.1f}", f"{of['predicted_tokens_per_s']:.1f}",
            f"{of['tokens_per_s'] / base:.2f}x", f"{of['ttft_p50_ms']:,.0f}",
            f"{of['ttft_p99_ms']:,.0f}", f"{of['rows_useful']:.1f} of {of['rows_computed']:.1f}",
        )  # fmt: skip
    table.caption = (
        "useful rows: sequences in a step that still owe a token, on average, of all in it;"
        " predicted: by step times measured before"
    )
    tell(table, figures, json_path)
    if plot_path is not None:
        from bench.compare.plots import plot_batching

        plot_batching(told, plot_path)
