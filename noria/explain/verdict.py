"""What made a request slow, in one sentence that names the cause and its remedy.

When each of these is the verdict is decided in `cause`; here is what is said then.
"""

from dataclasses import dataclass
from enum import Enum, auto

from noria.explain.words import counted, duration, percent
from noria.v1 import common_pb2

_REPLICAS = "start more workers (`noria up --workers N`)"


class Cause(Enum):
    """What made a request slow."""

    TOO_FEW_REPLICAS = auto()
    LONG_PROMPT = auto()
    PREFIX_AGAIN = auto()
    CROWDED_BATCH = auto()
    LARGE_KV_CACHE = auto()
    PREEMPTION = auto()
    OTHER = auto()
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause and its sentence; `lost_us` is what it cost, in microseconds."""

    cause: Cause
    sentence: str
    lost_us: float = 0.0


def queue_full() -> Verdict:
    sentence = f"All workers are busy and the queue is full: {_REPLICAS}, or ask again later."
    return Verdict(Cause.TOO_FEW_REPLICAS, sentence)


def waited(waiting_us: int, start_us: int, lost_us: float) -> Verdict:
    sentence = (
        f"It waited {duration(waiting_us)} of {duration(start_us)} for a place in a batch: too "
        f"few replicas for what came at once; {_REPLICAS}, or let each take more at a time "
        "(`--max-num-seqs`) while its KV memory allows."
    )
    return Verdict(Cause.TOO_FEW_REPLICAS, sentence, lost_us)


def long_prompt(usage: common_pb2.Usage, took: str, lost_us: float) -> Verdict:
    sentence = (
        "The start was late because the prompt is long: "
        f"{counted(usage.input_tokens - usage.cached_tokens, 'token')} had to be computed before "
        f"the first one was chosen ({took}); send less context, or let a step compute more of a "
        "prompt (`--max-num-batched-tokens`)."
    )
    return Verdict(Cause.LONG_PROMPT, sentence, lost_us)


def prefix_again(
    usage: common_pb2.Usage, earlier_share: float, took: str, lost_us: float
) -> Verdict:
    sentence = (
        f"About {percent(earlier_share)} of the prompt's {usage.input_tokens:,} tokens are "
        "earlier turns of the conversation, a prefix that was computed again "
        f"({usage.cached_tokens:,} tokens came from the prefix cache): prefill took {took}; send "
        "fewer earlier turns, or a summary of them, or give workers more KV blocks to keep them "
        "in (`--num-blocks`)."
    )
    return Verdict(Cause.PREFIX_AGAIN, sentence, lost_us)


def crowded(what: str, lost_us: float) -> Verdict:
    sentence = (
        f"{what}, a crowded batch; {_REPLICAS}, or let fewer requests (`--max-num-seqs`) or "
        "smaller chunks of prompts (`--max-num-batched-tokens`) into one step."
    )
    return Verdict(Cause.CROWDED_BATCH, sentence, lost_us)


def large_kv(apart: str, kv_tokens: int, lost_us: float) -> Verdict:
    sentence = (
        f"{apart}: each step read the keys and values of about {kv_tokens:,} tokens, a large KV "
        "cache; send less context, or use a model with fewer KV heads or faster memory."
    )
    return Verdict(Cause.LARGE_KV_CACHE, sentence, lost_us)


def preemption(times: int, pause_us: float, lost_us: float) -> Verdict:
    sentence = (
        f"It lost its place in the batch {counted(times, 'time')}, since KV memory ran out, and "
        f"its tokens were computed again ({duration(pause_us)}); give workers more KV blocks "
        f"(`--num-blocks`), let in fewer at a time (`--max-num-seqs`), or {_REPLICAS}."
    )
    return Verdict(Cause.PREEMPTION, sentence, lost_us)


def slow_model(what: str, lost_us: float) -> Verdict:
    sentence = f"{what}: this model is slow here; a smaller one or faster hardware would help."
    return Verdict(Cause.OTHER, sentence, lost_us)


def elsewhere(what: str, stretch: str, stretch_us: int, lost_us: float) -> Verdict:
    sentence = (
        f"{what}: the time went outside the model, most of it as {stretch} "
        f"({duration(stretch_us)})."
    )
    return Verdict(Cause.OTHER, sentence, lost_us)


def nothing(stretch: str, share: float) -> Verdict:
    sentence = f"Nothing unusual: a prompt start and a good pace; {percent(share)} was {stretch}."
    return Verdict(Cause.NOTHING, sentence)
