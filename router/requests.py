"""What the router knows of a request, free of the wire's types."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from noria.reasons import invalid_field
from noria.service.limits import MAX_PROMPT_LOGPROBS


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation. `role` is system, user or assistant."""

    role: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat, oldest turn first."""

    system: str | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class RawText:
    """Text that becomes ids as it is, with or without the tokenizer's own BOS and EOS."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class RawIds:
    """A prompt that is ids already."""

    token_ids: Sequence[int]


Prompt = Conversation | RawText | RawIds


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must be, opaque here. `texts` are treated like a prompt."""

    kind: str
    texts: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each token is chosen; every value is in its range.

    `logprobs` is how many alternatives are told of; None: not even the chosen id's own.
    `prompt_logprobs` is the same for the prompt's ids.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """A checked prompt and how to go on from it. `max_tokens` None: the model's default."""

    model: str
    prompt: Prompt
    max_tokens: int | None
    sampling: Sampling
    seed: int | None
    stop_sequences: tuple[str, ...]
    priority: int
    trace_steps: bool
    skip_special_tokens: bool
    num_choices: int = 1


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in ids. `duration_us` is what the tokenizer took for it."""

    token_ids: Sequence[int]
    starts_in_thinking: bool = False
    duration_us: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """What a worker is asked for.

    `deadline` is in seconds on the router's clock, `traceparent` the caller's trace context.
    Cached prefixes of another `cache_salt` are never used.
    """

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    seed: int
    max_tokens: int
    priority: int
    deadline: float
    trace_steps: bool
    traceparent: str = ""
    cache_salt: bytes = b""
    num_choices: int = 1

    @property
    def trace_id(self) -> str:
        """The trace id in `traceparent`, for log lines; empty if there is none."""
        return self.traceparent[3:35]

    @property
    def price(self) -> int:
        """Tokens that the request may come to hold: its prompt and the outputs of all choices."""
        return len(self.prompt_token_ids) + self.num_choices * self.max_tokens


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises INVALID_FIELD if more output is required than is allowed."""
    if min_tokens > max_tokens:
        problem = f"{min_tokens}; at most max_tokens, which is {max_tokens}"
        raise invalid_field("sampling.min_tokens", problem)


def check_prompt_logprobs(alternatives: int | None, prompt_tokens: int) -> None:
    """Raises INVALID_FIELD if more would be told of a prompt than a request may ask for."""
    told = 0 if alternatives is None else prompt_tokens * (1 + alternatives)
    if told > MAX_PROMPT_LOGPROBS:
        problem = (
            f"{prompt_tokens} prompt tokens and {alternatives} alternatives for each are "
            f"{told}; at most {MAX_PROMPT_LOGPROBS}"
        )
        raise invalid_field("sampling.prompt_logprobs", problem)


def check_ids(token_ids: Sequence[int], vocab_size: int) -> Sequence[int]:
    """The ids, all of the vocabulary. Raises INVALID_FIELD, which names no id but its place."""
    if max(token_ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise invalid_field(f"token_ids.ids[{index}]", f"not below {vocab_size}")
    return token_ids
