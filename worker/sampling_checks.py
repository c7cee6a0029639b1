"""Sampling parameters from the wire; what is outside its range is refused by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from noria.service import limits as wire_limits
from noria.service.structured_output import StructuredOutputError
from noria.service.wire_structured_output import checked_structured_output
from noria.v1 import common_pb2
from worker.grammar.source import GrammarKind, GrammarSource
from worker.sequence import LogitBias, SamplingParams

_Ranged = Literal[
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
]


class InvalidSubmitError(ValueError):
    """A submit that can never run; `field` is the one at fault."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a submit is checked against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidSubmitError for ids that the model does not have; it names none of them."""
    if max(ids, default=0) >= vocab_size:
        raise InvalidSubmitError(field, f"an id is outside the vocabulary of {vocab_size} ids")


def sampling_from(sampling: common_pb2.SamplingParams, limits: ModelLimits) -> SamplingParams:
    """The engine's parameters. Raises InvalidSubmitError for the first fault."""
    _at_most("stop_token_ids", len(sampling.stop_token_ids), wire_limits.MAX_STOP_TOKEN_IDS, "ids")
    check_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    _at_most("logprobs", sampling.logprobs, wire_limits.MAX_LOGPROBS, "alternatives")
    _at_most("prompt_logprobs", sampling.prompt_logprobs, wire_limits.MAX_LOGPROBS, "alternatives")
    return SamplingParams(
        temperature=_within(sampling, "temperature", 0.0, 2.0, absent=1.0),
        top_p=_within(sampling, "top_p", 0.0, 1.0, absent=1.0, open_below=True),
        top_k=sampling.top_k,
        min_p=_within(sampling, "min_p", 0.0, 1.0),
        seed=sampling.seed % (1 << 64),
        min_tokens=sampling.min_tokens,
        presence_penalty=_within(sampling, "presence_penalty", -2.0, 2.0),
        frequency_penalty=_within(sampling, "frequency_penalty", -2.0, 2.0),
        repetition_penalty=_within(
            sampling, "repetition_penalty", 0.0, 2.0, absent=1.0, open_below=True
        ),
        logit_bias=_logit_bias(sampling.logit_bias, limits.vocab_size),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=(
            sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None
        ),
        eos_token_ids=frozenset() if sampling.ignore_eos else limits.eos_token_ids,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        grammar=_grammar(sampling),
    )


def _grammar(sampling: common_pb2.SamplingParams) -> GrammarSource | None:
    if not sampling.HasField("structured_output"):
        return None
    if sampling.ignore_eos:
        problem = "not with structured_output: nothing follows the end of a grammar"
        raise InvalidSubmitError("sampling.ignore_eos", problem)
    try:
        kind, texts = checked_structured_output(sampling.structured_output)
    except StructuredOutputError as error:
        field = f"sampling.structured_output.{error.part}"
        raise InvalidSubmitError(field, error.problem) from None
    return GrammarSource(GrammarKind(kind), texts)


def _logit_bias(biases: Mapping[int, float], vocab_size: int) -> LogitBias | None:
    if not biases:
        return None
    _at_most("logit_bias", len(biases), wire_limits.MAX_LOGIT_BIAS, "entries")
    check_ids("sampling.logit_bias", biases, vocab_size)
    for value in biases.values():
        _check("logit_bias", value, -100.0, 100.0)
    return LogitBias(biases)


def _at_most(name: str, count: int, limit: int, unit: str) -> None:
    if count > limit:
        raise InvalidSubmitError(
            f"sampling.{name}", f"{count} {unit} given, at most {limit} allowed"
        )


def _within(
    sampling: common_pb2.SamplingParams,
    name: _Ranged,
    low: float,
    high: float,
    *,
    absent: float = 0.0,
    open_below: bool = False,
) -> float:
    """The field's value, or `absent`, within [low, high], or (low, high] with `open_below`."""
    value = float(getattr(sampling, name)) if sampling.HasField(name) else absent
    _check(name, value, low, high, open_below=open_below)
    return value


def _check(name: str, value: float, low: float, high: float, *, open_below: bool = False) -> None:
    if isfinite(value) and low <= value <= high and not (open_below and value == low):
        return
    opening = "(" if open_below else "["
    raise InvalidSubmitError(
        f"sampling.{name}", f"{value:g} is outside {opening}{low:g}, {high:g}]"
    )
