"""Checks of what chats and completions have in common: counts, sampling, stop strings.

What this version does not honour is refused by name rather than ignored, but only
where it would matter: a penalty of 0 or one choice asks for nothing.
"""

import math
from collections.abc import Iterator, Mapping

from noria.reasons import Reason, RequestError, invalid_field
from noria.service import limits
from noria.service.structured_output import StructuredOutputError
from noria.service.wire_structured_output import checked_structured_output
from noria.v1 import chat_pb2, common_pb2
from router.requests import GenerationInput, Grammar, Prompt, Sampling, check_min_tokens

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
        num_choices=spec.n if spec.HasField("n") else 1,
    )


def at_most(field: str, count: int, limit: int, unit: str) -> None:
    """Raises INVALID_FIELD naming the count and the limit."""
    if count > limit:
        raise invalid_field(field, f"{count} {unit}; at most {limit}")


def unsupported(field: str) -> RequestError:
    """The error for a field that this version does not honour."""
    problem = "not supported"
    return RequestError(Reason.UNSUPPORTED, f"{field}: {problem}", fields=((field, problem),))


def _sampling(params: common_pb2.SamplingParams) -> Sampling:
    temperature = params.temperature if params.HasField("temperature") else 1.0
    top_p = params.top_p if params.HasField("top_p") else 1.0
    repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
    _in_range("sampling.temperature", temperature, 0, 2)
    _in_range("sampling.top_p", top_p, 0, 1, above=True)
    _in_range("sampling.min_p", params.min_p, 0, 1)
    _in_range("sampling.presence_penalty", params.presence_penalty, -2, 2)
    _in_range("sampling.frequency_penalty", params.frequency_penalty, -2, 2)
    _in_range("sampling.repetition_penalty", repetition, 0, 2, above=True)
    at_most("sampling.logprobs", params.logprobs, limits.MAX_LOGPROBS, "alternatives")
    of_prompt = params.prompt_logprobs
    at_most("sampling.prompt_logprobs", of_prompt, limits.MAX_LOGPROBS, "alternatives")
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=repetition,
        logit_bias=_logit_bias(params.logit_bias),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=of_prompt if params.HasField("prompt_logprobs") else None,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        grammar=_grammar(params) if params.HasField("structured_output") else None,
    )


def _grammar(params: common_pb2.SamplingParams) -> Grammar:
    """What only a compiler can judge is the worker's to say."""
    if params.ignore_eos:
        problem = "not with structured_output: nothing follows the end of a grammar"
        raise invalid_field("sampling.ignore_eos", problem)
    try:
        kind, texts = checked_structured_output(params.structured_output)
    except StructuredOutputError as error:
        field = f"sampling.structured_output.{error.part}"
        raise invalid_field(field, error.problem) from None
    return Grammar(kind, texts)


def _logit_bias(biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """Whether the model has these ids is the worker's to say."""
    for value in biases.values():
        _in_range("sampling.logit_bias", value, -100, 100)
    return tuple(biases.items())


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
