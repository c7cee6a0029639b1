"""What is asked: drawn once from a seed, so that every server gets the very same requests."""

import random
from dataclasses import dataclass, field

from bench.load.distributions import Lengths, parse_lengths
from bench.load.words import WORDS


@dataclass(frozen=True, slots=True)
class Request:
    """One chat to ask, and how its client behaves.

    `cancel_after` messages with text the client closes the stream; with `pause_s` it waits so
    long after each. `deadline_s` is the call's. `tenant` chooses among the keys.
    """

    index: int
    system: str
    prompt: str
    output_tokens: int
    priority: int = 0
    tenant: int = 0
    deadline_s: float = 600.0
    cancel_after: int | None = None
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A population of requests. Shares are of all requests, from 0 to 1.

    Lengths of prompts are counted in words, of which a tokenizer makes a few more ids.
    `prefix_share` of the requests begin with the same `prefix_words`; all prompts differ,
    so that nothing else is found in a prefix cache.
    """

    prompt_words: Lengths = field(default_factory=lambda: parse_lengths("64"))
    output_tokens: Lengths = field(default_factory=lambda: parse_lengths("128"))
    prefix_words: int = 0
    prefix_share: float = 1.0
    num_tenants: int = 1
    priorities: Lengths | None = None
    cancel_share: float = 0.0
    slow_share: float = 0.0
    slow_pause_s: float = 0.1
    deadline_s: float = 600.0
    seed: int = 1

    def requests(self, count: int) -> list[Request]:
        """The first `count` requests; more of them begin with the same ones."""
        rng = random.Random(self.seed)
        prefix = _words(rng, self.prefix_words)
        return [self._request(index, prefix, random.Random(rng.random())) for index in range(count)]

    def _request(self, index: int, prefix: str, rng: random.Random) -> Request:
        output_tokens = self.output_tokens.draw(rng)
        # The number makes the prompt unlike every other from its first word on.
        prompt = f"{index + 1} {_words(rng, self.prompt_words.draw(rng))}"
        shares_prefix = prefix and rng.random() < self.prefix_share
        cancelled = rng.random() < self.cancel_share
        return Request(
            index=index,
            system=prefix if shares_prefix else "",
            prompt=prompt,
            output_tokens=output_tokens,
            priority=self.priorities.draw(rng) if self.priorities else 0,
            tenant=index % self.num_tenants,
            deadline_s=self.deadline_s,
            cancel_after=rng.randint(1, max(1, output_tokens // 2)) if cancelled else None,
            pause_s=self.slow_pause_s if rng.random() < self.slow_share else 0.0,
        )


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))
