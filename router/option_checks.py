"""Checks of what chats and completions have in common: counts, sampling, stop strings.

What this version does not honour is refused by name rather than ignored, but only
where it would matter: a penalty of 0 or one choice asks for nothing.
"""

import math
from collections.abc import Iterator

from noria.reasons import Reason, RequestError, invalid_field
from noria.service import limits
from noria.v1 import chat_pb2, common_pb2
from router.requests import GenerationInput, Prompt, Sampling, check_min_tokens

Spec = chat_pb2.ChatSpec | chat_pb2.CompletionSpec


def check_counts(spec: Spec) -> None:
    """Lengths of lists, and the message's size, before anything is done with either."""
    at_most("stop_sequences", len(spec.stop_sequences), limits.MAX_STOP_SEQUENCES, "strings")
    stop_ids = len(spec.sampling.stop_token_ids)
    at_most("sampling.stop_token_ids", stop_ids, limits.MAX_STOP_TOKEN_IDS, "ids")
    at_most("sampling.logit_bias", len(spec.sampling.logit_bias), limits.MAX_LOGIT_BIAS, "entries")
    if spec.HasField("n") and not 1 <= spec.n <= limits.MAX_CHOICES:
        raise invalid_field("n", f"{spec.n}; at least 1, at most {limits.MAX_CHOICES}")
    size = spec.ByteSize()
    if size > limits.MAX_CHAT_BYTES:
        problem = f"{size} bytes; at most {limits.MAX_CHAT_BYTES}"
        raise RequestError(
            Reason.MESSAGE_TOO_LARGE, f"spec: {problem}", fields=(("spec", problem),)
        )


def refuse_unsupported(spec: Spec) -> None:
    """Raises UNSUPPORTED, or INVALID_FIELD for a value that no version would take."""
    sampling = spec.sampling
    _check_ranges_of_unsupported(sampling)
    asked = {
        "n": spec.n > 1,
        "sampling.min_p": sampling.min_p != 0,
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "sampling.repetition_penalty": sampling.HasField("repetition_penalty")
        and sampling.repetition_penalty != 1,
        "sampling.logit_bias": bool(sampling.logit_bias),
        "sampling.logprobs": sampling.HasField("logprobs"),
        "sampling.prompt_logprobs": sampling.HasField("prompt_logprobs"),
        "sampling.structured_output": sampling.structured_output.WhichOneof("grammar") is not None,
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise unsupported(field)


def generation_input(spec: Spec, priority_ceiling: int, prompt: Prompt) -> GenerationInput:
    """The request with all its options checked. Raises INVALID_FIELD."""
    sampling = _sampling(spec.sampling)
    max_tokens = spec.max_tokens if spec.HasField("max_tokens") else None
    if max_tokens == 0:
        raise invalid_field("max_tokens", "0; at least 1")
    if max_tokens is not None:
        check_min_tokens(sampling.min_tokens, max_tokens)
    return GenerationInput(
        model=_model(spec.model),
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=spec.sampling.seed if spec.sampling.HasField("seed") else None,
        stop_sequences=tuple(_stop_sequences(spec)),
        priority=min(_priority(spec.priority), priority_ceiling),
        trace_steps=spec.trace_steps,
        skip_special_tokens=(
            spec.skip_special_tokens if spec.HasField("skip_special_tokens") else True
        ),
    )


def at_most(field: str, count: int, limit: int, unit: str) -> None:
    """Raises INVALID_FIELD naming the count and the limit."""
    if count > limit:
        raise invalid_field(field, f"{count} {unit}; at most {limit}")


def unsupported(field: str) -> RequestError:
    """The error for a field that this version does not honour."""
    problem = "not supported"
    return RequestError(Reason.UNSUPPORTED, f"{field}: {problem}", fields=((field, problem),))


def _check_ranges_of_unsupported(sampling: common_pb2.SamplingParams) -> None:
    _in_range("sampling.min_p", sampling.min_p, 0, 1)
    _in_range("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    _in_range("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)
    if sampling.HasField("repetition_penalty"):
        _in_range("sampling.repetition_penalty", sampling.repetition_penalty, 0, 2, above=True)
    for name in ("logprobs", "prompt_logprobs"):
        at_most(f"sampling.{name}", getattr(sampling, name), limits.MAX_LOGPROBS, "alternatives")


def _sampling(params: common_pb2.SamplingParams) -> Sampling:
    temperature = params.temperature if params.HasField("temperature") else 1.0
    top_p = params.top_p if params.HasField("top_p") else 1.0
    _in_range("sampling.temperature", temperature, 0, 2)
    _in_range("sampling.top_p", top_p, 0, 1, above=True)
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=params.top_k,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )


def _in_range(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Refuse NaN, infinities and what lies outside [low, high], or (low, high] with `above`."""
    if math.isfinite(value) and low <= value <= high and not (above and value == low):
        return
    bound = f"above {low}" if above else f"at least {low}"
    raise invalid_field(field, f"{value:g}; {bound} and at most {high}")


def _model(name: str) -> str:
    at_most("model", len(name.encode()), limits.MAX_MODEL_NAME_BYTES, "bytes")
    return name


def _priority(priority: int) -> int:
    if not limits.MIN_PRIORITY <= priority <= limits.MAX_PRIORITY:
        problem = f"{priority}; at least {limits.MIN_PRIORITY}, at most {limits.MAX_PRIORITY}"
        raise invalid_field("priority", problem)
    return priority


def _stop_sequences(spec: Spec) -> Iterator[str]:
    total = sum(len(text.encode()) for text in spec.stop_sequences)
    at_most("stop_sequences", total, limits.MAX_STOP_SEQUENCES_BYTES, "bytes together")
    for index, text in enumerate(spec.stop_sequences):
        field = f"stop_sequences[{index}]"
        if not text:
            raise invalid_field(field, "0 bytes; at least 1")
        at_most(field, len(text.encode()), limits.MAX_STOP_SEQUENCE_BYTES, "bytes")
        yield text
