"""Prompts in one batch against one after the other: a step reads the weights once for all."""

from dataclasses import dataclass
from pathlib import Path

import click

from bench.compare.drive import Driven
from bench.compare.engine import BenchedEngine
from bench.compare.options import benched_engine, new_table, on_a_model, tell, with_outputs, words
from bench.compare.policies import Ask, Continuous


@dataclass(frozen=True, slots=True)
class Way:
    """One way of serving the prompts: seconds for all of it, and decode tokens per second."""

    name: str
    wall_s: float
    decode_tokens_per_s: float


def way_of(name: str, driven: Driven) -> Way:
    """Decode alone: the steps that computed no prompt."""
    decodes = [step for step in driven.steps if step.is_decode]
    tokens = sum(step.useful for step in decodes)
    return Way(name, driven.wall_s, tokens / sum(step.took_s for step in decodes))


def compared(engine: BenchedEngine, asks: list[Ask], rounds: int) -> tuple[Way, Way]:
    """The median round of each way, in turn."""
    ways: dict[int, list[Way]] = {1: [], len(asks): []}
    names = {1: "one by one", len(asks): f"{len(asks)} in one batch"}
    for _ in range(rounds):
        for places, told in ways.items():
            driven = engine.run(asks, Continuous(places), engine.scheduler(places))
            told.append(way_of(names[places], driven))
    middle = [sorted(told, key=lambda way: way.wall_s)[rounds // 2] for told in ways.values()]
    return middle[0], middle[1]


@click.command("one-by-one")
@on_a_model
@click.option("--prompts", default=4, show_default=True, type=click.IntRange(2, 64))
@click.option("--prompt-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--output-tokens", default=64, show_default=True, type=click.IntRange(2))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@with_outputs
def one_by_one(
    model: str, cpu_threads: int, prompts: int, prompt_tokens: int, output_tokens: int,
    rounds: int, json_path: Path | None, plot_path: Path | None,
) -> None:  # fmt: skip
    """Prompts in one batch against one after the other."""
    length = prompt_tokens + output_tokens
    engine = benched_engine(
        model, cpu_threads, tokens=2 * prompts * length, max_model_len=length + 1
    )
    asks = [Ask(words(prompt_tokens, seed), output_tokens) for seed in range(prompts)]
    single, batch = compared(engine, asks, rounds)
    table = new_table(
        f"{prompts} prompts of {prompt_tokens} tokens, {output_tokens} tokens out, greedy",
        "", "whole requests s", "decode tokens/s",
    )  # fmt: skip
    for way in (single, batch):
        table.add_row(way.name, f"{way.wall_s:.2f}", f"{way.decode_tokens_per_s:.1f}")
    whole, decode = ratios(single, batch)
    table.add_row("gain", f"{whole:.2f}x", f"{decode:.2f}x")
    figures = {
        way.name: {"wall_s": way.wall_s, "decode_tokens_per_s": way.decode_tokens_per_s}
        for way in (single, batch)
    }
    tell(table, figures | {"whole_gain": whole, "decode_gain": decode}, json_path)
    if plot_path is not None:
        from bench.compare.plots import plot_one_by_one

        plot_one_by_one(single, batch, plot_path)


def ratios(single: Way, batch: Way) -> tuple[float, float]:
    """How many times faster the batch is: for whole requests, and for decode alone."""
    return single.wall_s / batch.wall_s, batch.decode_tokens_per_s / single.decode_tokens_per_s
