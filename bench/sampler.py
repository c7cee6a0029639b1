"""What choosing tokens costs: medians of one step by kind of request, batch and vocabulary.

    python -m bench.sampler [--threads N] [--seconds S]

Logits are random: sharp ones, whose likeliest few dozen of 49,152 ids hold 90 %, peaked ones,
where it takes hundreds, and flat ones, where it takes thousands. Times are milliseconds of
CPU for the whole batch, so that a busy machine distorts them less.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from worker.sampler import sample
from worker.sequence import Draw, SamplingParams
from worker.token_counts import TokenCounts

VOCABULARIES = (49_152, 262_144)
BATCHES = (1, 32, 64)
HISTORY = (range(0, 2000, 2), range(0, 300, 3))
SHARP, PEAKED, FLAT = 6.0, 4.0, 1.5

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
KINDS: dict[str, tuple[float, list[dict[str, float]]]] = {
    "greedy": (PEAKED, [{"temperature": 0.0}]),
    "temperature": (PEAKED, [{"temperature": 0.8}]),
    "top-k 50": (PEAKED, [{"top_k": 50}]),
    "top-p 0.9, sharp": (SHARP, [{"top_p": 0.9}]),
    "top-p 0.9": (PEAKED, [{"top_p": 0.9}]),
    "top-p 0.9, flat": (FLAT, [{"top_p": 0.9}]),
    "top-k 50, top-p 0.9": (PEAKED, [{"top_k": 50, "top_p": 0.9}]),
    "min-p 0.05": (PEAKED, [{"min_p": 0.05}]),
    "greedy, penalties": (PEAKED, [{"temperature": 0.0, **PENALTIES}]),
    "greedy, logprobs 5": (PEAKED, [{"temperature": 0.0, "logprobs": 5}]),
    # A quarter of each, so that greedy rows are in company.
    "mixed": (
        PEAKED,
        [{"temperature": 0.0}, {"top_k": 50}, {"top_p": 0.9}, {"temperature": 0.8, **PENALTIES}],
    ),
}


def draws_of(params: list[dict[str, float]], batch: int) -> list[Draw]:
    """`batch` draws, the kinds in turn."""
    made = []
    for row in range(batch):
        sampling = SamplingParams(seed=row, **params[row % len(params)])  # type: ignore[arg-type]
        counts = TokenCounts(*HISTORY) if sampling.counts_output else None
        made.append(Draw(sampling, 100 + row, token_counts=counts))
    return made


def milliseconds(
    step: Callable[[], object], prepare: Callable[[], object], seconds: float
) -> float:
    """The median CPU time of `step`, `prepare` not counted."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < 3 or time.monotonic() < end:
        prepare()
        started = time.process_time()
        step()
        times.append(time.process_time() - started)
    return 1e3 * median(times)


def measure(kind: str, batch: int, vocab_size: int, seconds: float) -> float:
    """One step of `batch` rows of a kind, in milliseconds."""
    spread, params = KINDS[kind]
    source = torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    logits, draws = source.clone(), draws_of(params, batch)
    with torch.inference_mode():
        return milliseconds(lambda: sample(logits, draws), lambda: logits.copy_(source), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for vocab_size in VOCABULARIES:
        print(f"\nms of CPU per step, {vocab_size:,} ids, {options.threads} thread(s)")
        print(f"{'batch':22}" + "".join(f"{batch:>9}" for batch in BATCHES))
        for kind in KINDS:
            figures = [measure(kind, batch, vocab_size, options.seconds) for batch in BATCHES]
            print(f"{kind:22}" + "".join(f"{figure:9.2f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
