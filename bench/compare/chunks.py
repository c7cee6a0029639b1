"""A long prompt beside running streams: computed at once it makes them all wait."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click

from bench.compare.drive import Driven, Served
from bench.compare.engine import BenchedEngine
from bench.compare.options import benched_engine, new_table, on_a_model, tell, with_outputs, words
from bench.compare.policies import Ask, Continuous
from bench.load.summary import Percentiles


@dataclass(frozen=True, slots=True)
class Budgeted:
    """A run with so many positions a step. The long prompt is the last request to come."""

    budget: int
    driven: Driven

    @property
    def long(self) -> Served:
        return max(self.driven.served, key=lambda served: served.ask.arrival_s)

    def gaps_s(self) -> list[float]:
        """Between the others' tokens while the long prompt was computed."""
        begin, end = self.long.ask.arrival_s, self.long.token_times[0]
        return [
            after - before
            for served in self.driven.served
            if served is not self.long
            for before, after in pairwise(served.token_times)
            if after > begin and before < end
        ]

    def figures(self) -> dict[str, float]:
        gaps = Percentiles.of(self.gaps_s())
        return {
            "gap_p50_ms": gaps.p50,
            "gap_max_ms": gaps.max,
            "long_ttft_s": self.long.ttft_s,
        }


def beside_a_long_prompt(streams: int, prompt: int, output_tokens: int, at_s: float) -> list[Ask]:
    """Short prompts from the beginning, and a long one that comes later."""
    short = [Ask(words(16, number), output_tokens) for number in range(streams)]
    return [*short, Ask(words(prompt, streams), 2, at_s)]


def run_with(engine: BenchedEngine, asks: list[Ask], budget: int) -> Budgeted:
    places = len(asks)
    scheduler = engine.scheduler(places, budget=budget)
    return Budgeted(budget, engine.run(asks, Continuous(places), scheduler))


@click.command("chunked-prefill")
@on_a_model
@click.option("--streams", default=8, show_default=True, type=click.IntRange(1, 64))
@click.option("--prompt-tokens", default=1024, show_default=True, type=click.IntRange(2))
@click.option("--output-tokens", default=160, show_default=True, type=click.IntRange(2))
@click.option("--at", "at_s", default=0.5, show_default=True, help="When the prompt comes, in s.")
@click.option("--budget", "budgets", multiple=True, default=(64, 128, 256, 512, 2048))
@with_outputs
def chunked_prefill(
    model: str, cpu_threads: int, streams: int, prompt_tokens: int, output_tokens: int,
    at_s: float, budgets: tuple[int, ...], json_path: Path | None, plot_path: Path | None,
) -> None:  # fmt: skip
    """What a long prompt does to the streams beside it, by --max-num-batched-tokens."""
    length = max(prompt_tokens, output_tokens) + 32
    engine = benched_engine(model, cpu_threads, tokens=(streams + 1) * length, max_model_len=length)
    asks = beside_a_long_prompt(streams, prompt_tokens, output_tokens, at_s)
    told = [run_with(engine, asks, budget) for budget in sorted(set(budgets))]
    table = new_table(
        f"{streams} streams, and a prompt of {prompt_tokens} tokens after {at_s:g} s",
        "positions a step", "others' gap p50 ms", "longest gap ms", "the prompt's TTFT s",
    )  # fmt: skip
    figures = {str(run.budget): run.figures() for run in told}
    for budget, of in figures.items():
        table.add_row(
            budget, f"{of['gap_p50_ms']:.1f}", f"{of['gap_max_ms']:.1f}", f"{of['long_ttft_s']:.2f}"
        )
    tell(table, figures, json_path)
    if plot_path is not None:
        from bench.compare.plots import plot_chunks

        plot_chunks(told, plot_path)
