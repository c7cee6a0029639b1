"""What a known prefix saves: time to the first token, not the pace after it.

    python -m bench.prefix_cache MODEL [--prompt 600] [--reply 32] [--rounds 5]

One request at a time, in process: a cold prompt, the same one again, again under another
salt, and the conversation's second turn. Rounds use prompts of their own, so that nothing
is known to begin with.
"""

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import click

from bench.table import print_table
from worker.attention.torch_backend import TorchBackend
from worker.block_pool import BlockPool
from worker.kv_cache import allocate_kv_cache
from worker.model_runner import ModelRunner
from worker.models.loader import open_checkpoint
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams, Sequence

BLOCK_SIZE, BUDGET, NEW_TOKENS = 16, 512, 24
COLD, AGAIN, OTHER_SALT, SECOND_TURN = "cold", "again", "another salt", "second turn"


@dataclass(frozen=True)
class Answer:
    """One request: what it found, what it computed before its first token, and how fast."""

    sequence: Sequence
    cached: int
    computed: int
    first_token_s: float
    first_token_cpu_s: float
    inter_token_s: float


class OneWorker:
    """Scheduler, model and cache; answers one request at a time."""

    def __init__(self, model: Path, num_blocks: int, max_model_len: int) -> None:
        checkpoint, backend = open_checkpoint(model), TorchBackend()
        loaded = checkpoint.load()
        allocate_kv_cache(backend, loaded.kv_spec, num_blocks + 1, BLOCK_SIZE)
        self.vocab_size = checkpoint.config.vocab_size
        self._runner = ModelRunner(loaded, backend, BLOCK_SIZE)
        self._scheduler = Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE),
            max_num_seqs=1,
            max_num_batched_tokens=BUDGET,
            max_model_len=max_model_len,
        )
        self._asked = 0

    def ask(self, prompt: list[int], reply: int, salt: bytes = b"one") -> Answer:
        self._asked += 1
        greedy = SamplingParams(temperature=0.0)
        sequence = Sequence(self._asked, prompt, greedy, reply, self._asked, cache_salt=salt)
        self._scheduler.add(sequence)
        times: list[float] = []
        started, cpu_started, cpu_s = time.perf_counter(), time.process_time(), 0.0
        computed = 0
        while (output := self._scheduler.schedule()) is not None:
            self._scheduler.update(output, self._runner.execute(output))
            if not times:
                computed += output.num_tokens
                cpu_s = time.process_time() - cpu_started
            if sequence.output_token_ids:
                times.append(time.perf_counter())
        gaps = [after - before for before, after in pairwise(times)]
        found = sequence.num_cached_tokens
        return Answer(sequence, found, computed, times[0] - started, cpu_s, median(gaps))


def one_round(worker: OneWorker, number: int, prompt: int, reply: int) -> dict[str, Answer]:
    words = worker.vocab_size // 2
    ids = [100 + (number * 7919 + at * 31) % (words - 100) for at in range(prompt)]
    new = [200 + at for at in range(NEW_TOKENS)]
    cold = worker.ask(ids, reply)
    return {
        COLD: cold,
        AGAIN: worker.ask(ids, reply),
        OTHER_SALT: worker.ask(ids, reply, salt=b"two"),
        SECOND_TURN: worker.ask(ids + cold.sequence.output_token_ids + new, reply),
    }


def row(name: str, answers: list[Answer]) -> list[str]:
    return [
        name,
        str(len(answers[0].sequence.prompt_token_ids)),
        str(answers[-1].cached),
        str(answers[-1].computed),
        f"{1000 * median(answer.first_token_s for answer in answers):.1f}",
        f"{1000 * median(answer.first_token_cpu_s for answer in answers):.1f}",
        f"{1000 * median(answer.inter_token_s for answer in answers):.1f}",
    ]


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--prompt", default=600, show_default=True, help="Tokens of the first turn.")
@click.option("--reply", default=32, show_default=True, help="Tokens of every answer.")
@click.option("--rounds", default=5, show_default=True, help="Medians are over so many.")
def main(model: Path, prompt: int, reply: int, rounds: int) -> None:
    """Print tokens found and computed, time to the first token, inter-token latency."""
    longest = prompt + 2 * reply + NEW_TOKENS
    blocks = (rounds + 1) * 4 * (-(-longest // BLOCK_SIZE))
    worker = OneWorker(model, blocks, longest)
    # One round for nothing: first times are not the usual ones.
    _, *told = [one_round(worker, number, prompt, reply) for number in range(rounds + 1)]
    heads = ["prompt", "cached", "computed", "TTFT ms", "TTFT CPU ms", "ITL ms"]
    rows = [row(name, [answers[name] for answers in told]) for name in told[0]]
    print_table(f"{rounds} rounds", heads, rows)


if __name__ == "__main__":
    main()
