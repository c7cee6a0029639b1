"""What was computed for submits, and who has been told of it.

All that steps computed is, in the end, either told to a router in a terminal entry or lost:
its session ended first. At rest the time of both together is the engine's busy time.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Self

from worker.engine_output import Ended


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens, positions computed, and a share of the steps' time in microseconds.

    The prompt counts once something was computed for it, and once for all choices.
    `generated_tokens` are those chosen here, whoever received them.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    device_us: int = 0

    def __add__(self, other: Self) -> "Work":
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Self) -> "Work":
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


NOTHING = Work()


def work_of(choices: Iterable[Ended]) -> Work:
    """What was computed for these choices of one submit."""
    ended = list(choices)
    computed = sum(each.account.computed_tokens for each in ended)
    if not computed:
        return NOTHING
    first = min((each.sequence for each in ended), key=lambda sequence: sequence.choice)
    return Work(
        prompt_tokens=len(first.prompt_token_ids),
        cached_tokens=first.num_cached_tokens,
        generated_tokens=sum(
            len(each.sequence.output_token_ids) - each.sequence.num_given_tokens for each in ended
        ),
        computed_tokens=computed,
        device_us=sum(each.account.device_us for each in ended),
    )


@dataclass(slots=True)
class Accounts:
    """All work that has ended: `told` in terminal entries that were sent, or `lost`."""

    told: Work = NOTHING
    lost: Work = NOTHING
