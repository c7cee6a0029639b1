"""A request as the engine sees it: ids, how far they are computed, where their K/V lie."""

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worker.grammar.matcher import Matcher
from worker.grammar.source import GrammarSource
from worker.token_counts import TokenCounts

# 1e-5 as it crosses the wire, in fp32.
GREEDY_BELOW = 9.999999747378752e-06
# Stands for a token that a step in flight is drawing.
PENDING_TOKEN = -1


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING_FOR_GRAMMAR = auto()
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class FinishReason(Enum):
    """Why a sequence produces no more tokens."""

    EOS = auto()
    STOP_ID = auto()
    LENGTH = auto()
    ABORTED = auto()
    EXPIRED = auto()


class LogitBias:
    """What is added to which ids' logits: `ids` int64 [B], each once, `values` fp32 [B]."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self.ids: npt.NDArray[np.int64] = np.array(list(biases), np.int64)
        self.values: npt.NDArray[np.float32] = np.array(list(biases.values()), np.float32)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How each next token is chosen; validated where it enters the worker.

    `seed` is the 64-bit key of the addressed draw, as an unsigned integer.
    `end_token_ids` are EOS (unless ignored) and the request's stop ids. Presence and
    frequency penalty count the output's ids, the repetition penalty the prompt's too.
    `logprobs` alternatives are told with each token; None: not even the token's own.
    `prompt_logprobs` is the same for the prompt's tokens.
    `grammar` is what the output has to be as a whole.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: LogitBias | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    grammar: GrammarSource | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self.eos_token_ids | self.stop_token_ids

    @property
    def counts_prompt(self) -> bool:
        """Whether a draw depends on which ids the prompt has."""
        return self.repetition_penalty != 1.0

    @property
    def counts_output(self) -> bool:
        """Whether a draw depends on which ids came before."""
        return self.counts_prompt or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request.

    `num_computed_tokens` counts the leading tokens (prompt, then output) whose K/V are in
    the cache, or will be once the steps in flight have run; it catches up with the tokens it
    has and the `num_pending_tokens` that these steps draw for it. `last_step` is the last one
    that it was scheduled in. `order` is the order of arrival
    and never changes, also not by preemption. `num_cached_tokens` are the prompt tokens
    that were found in the prefix cache when it first ran; only entries of the same
    `cache_salt` are. `block_digests` name its first full blocks. `num_given_tokens` output
    ids came with it from elsewhere. `token_counts` are kept where a penalty needs them.
    `matcher` knows where the output stands in its grammar, once that is compiled.
    `siblings` are the request's further choices, known to the first of them alone.
    `trace_id` is for log lines.
    `scores_prompt`: it tells how likely its prompt's tokens are; `num_scored_tokens` leading
    positions have done so for the tokens after them, once and for all.
    """

    sequence_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    order: int
    priority: int = 0
    choice: int = 0
    deadline: float | None = None
    trace_steps: bool = False
    trace_id: str = ""
    cache_salt: bytes = b""
    num_given_tokens: int = 0
    siblings: Ids["Sequence"] = ()
    scores_prompt: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    last_step: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_scored_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    token_counts: TokenCounts | None = field(init=False, default=None)
    matcher: Matcher | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.sampling.counts_output:
            counted = self.prompt_token_ids if self.sampling.counts_prompt else ()
            self.token_counts = TokenCounts(counted, self.output_token_ids)

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.output_token_ids.append(token_id)
        if self.token_counts is not None:
            self.token_counts.add(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)

    @property
    def draws_by_history(self) -> bool:
        """Whether a draw cannot begin before all earlier tokens are known."""
        return self.sampling.counts_output or self.sampling.grammar is not None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return known + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """How many leading tokens need not be computed if their K/V are there already.

        Only what is computed gives logits: the last token, and what has yet to be scored.
        """
        needed = self.num_tokens - 1
        if not self.scores_prompt:
            return needed
        unscored = self.num_scored_tokens < len(self.prompt_token_ids) - 1
        return self.num_scored_tokens if unscored else needed

    def token_ids(self, start: int, end: int) -> list[int]:
        """Ids at positions [start, end) of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]


class Draw(NamedTuple):
    """How to choose the token after a sequence's last scheduled position.

    `output_index` 0 is the first token after the prompt; with the seed and the choice it
    is the draw's whole address. `num_runners_up` other ids are reported when traced.
    `token_counts` are those of everything before, where a penalty needs them; `matcher`
    knows what may follow, where the output has a grammar.
    """

    sampling: SamplingParams
    output_index: int
    choice: int = 0
    num_runners_up: int = 0
    token_counts: TokenCounts | None = None
    matcher: Matcher | None = None

    @property
    def may_end(self) -> bool:
        """Whether the draw may choose an id that ends the sequence."""
        return self.output_index >= self.sampling.min_tokens


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scheduled positions whose logits tell how likely the prompt's next token was.

    From `first_row` on, counted within the sequence's part of the step: one for each of
    `next_token_ids`, of which as many alternatives are told.
    """

    first_row: int
    next_token_ids: Ids[int]
    num_alternatives: int


class ScheduledSequence(NamedTuple):
    """What one sequence computes in one step: positions [first_position, first_position + n).

    `block_ids` is its block table and covers every position up to the last scheduled one.
    The last of `token_ids` is PENDING_TOKEN where the step before draws it.
    `draw` is None for a chunk that ends before the sequence's last token, `scoring` where
    no log-probabilities of the prompt are asked for.
    """

    sequence_id: int
    token_ids: Ids[int]
    first_position: int
    block_ids: Ids[int]
    draw: Draw | None
    scoring: Scoring | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """How many tokens have K/V in the cache once it is computed."""
        return self.first_position + len(self.token_ids)

    @property
    def is_pending(self) -> bool:
        """Whether its last token is known to nobody but the step before."""
        return self.token_ids[-1] == PENDING_TOKEN


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's batch, sequences that compute a single position first. Ids and counts only."""

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen for one sequence.

    `probability` and `runners_up` (likeliest first) are at the request's temperature and
    before filters; they are filled only where the draw asked for runners-up. `logprob` and
    those of `alternatives` (likeliest first) are natural logarithms, before temperature and
    filters; they are filled only where log-probabilities were asked for.
    """

    token_id: int
    probability: float = 0.0
    runners_up: tuple[tuple[int, float], ...] = ()
    logprob: float = 0.0
    alternatives: tuple[tuple[int, float], ...] = ()
