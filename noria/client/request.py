"""From what a caller writes to the `ChatSpec` that goes out."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypedDict

from noria.service.trace import TRACEPARENT, parse_traceparent
from noria.v1 import chat_pb2, common_pb2

Turn: TypeAlias = tuple[str, str] | Mapping[str, str] | chat_pb2.Message
# A question, or a conversation of turns, oldest first.
Messages: TypeAlias = str | Sequence[Turn]
# What no template is applied to: text, or token ids.
RawPrompt: TypeAlias = str | Sequence[int]

_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
}


class ChatOptions(TypedDict, total=False):
    """What may be said about an answer, each by its keyword.

    `system` stands before the messages. `model` may be left out where one is
    served. `max_tokens` >= 1; left out, the model's default. `temperature` [0, 2],
    0 is greedy, 1.0 if left out; `top_p` (0, 1]; `top_k`, 0 is off; `min_p` [0, 1];
    `seed` makes the draws repeatable. `presence_penalty` and `frequency_penalty`
    [-2, 2] count the output's ids, `repetition_penalty` (0, 2] the prompt's too;
    `logit_bias` adds [-100, 100] to the logit of an id. The output ends before any of
    `stop_sequences`, and at any of `stop_token_ids`, both once there are `min_tokens`;
    `ignore_eos` goes on after the model's own end. Control tokens are left out of the
    text unless `skip_special_tokens` is False. `n` asks for as many answers. `logprobs`
    asks for each token's log-probability and that of as many alternatives, at most 20;
    `prompt_logprobs` asks the same of the prompt's tokens. The output is kept inside one
    of these: `json_schema`, a mapping or JSON text; `json_object`, any object; `regex`,
    which all of it matches; `choice`, one of the strings. A higher `priority` is more
    urgent. `trace_steps` asks for the engine's record of
    each step. `timeout` in seconds replaces the client's. `traceparent` is the W3C trace
    context that the request belongs to.
    """

    system: str | None
    model: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    logprobs: int | None
    prompt_logprobs: int | None
    n: int | None
    json_schema: Mapping[str, Any] | str | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    seed: int | None
    stop_sequences: Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    priority: int | None
    trace_steps: bool | None
    timeout: float | None
    traceparent: str | None


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
    "seed",
    "min_tokens",
    "ignore_eos",
)
_GRAMMARS = ("json_schema", "json_object", "regex", "choice")
_SPEC = ("model", "max_tokens", "n", "skip_special_tokens", "priority", "trace_steps")


def _checked(field: str, assign: Callable[[], object]) -> None:
    """Run `assign`; what protobuf refuses is said with the field's name, never its text."""
    try:
        assign()
    except UnicodeEncodeError as error:
        problem = f"{field}: not valid Unicode at character {error.start}"
        raise ValueError(problem) from None
    except (ValueError, OverflowError):
        raise ValueError(f"{field}: the value is out of range") from None
    except TypeError:
        raise TypeError(f"{field}: the value has the wrong type") from None


def _parts(turn: Any, field: str) -> tuple[str, str]:
    if isinstance(turn, Mapping):
        surplus = sorted(turn.keys() - {"role", "content"})
        if surplus or len(turn) != 2:
            raise ValueError(f"{field}: needs role and content alone, got {sorted(turn)}")
        return turn["role"], turn["content"]
    if isinstance(turn, (tuple, list)) and len(turn) == 2:
        return turn[0], turn[1]
    raise TypeError(f"{field}: needs (role, text), a role/content mapping or a Message")


def _message(turn: Turn, field: str) -> chat_pb2.Message:
    if isinstance(turn, chat_pb2.Message):
        return turn
    role, content = _parts(turn, field)
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"{field}.role: one of {', '.join(_ROLES)} is needed")
    message = chat_pb2.Message(role=_ROLES[role])
    block = message.content.add()
    _checked(f"{field}.content", lambda: setattr(block.text, "text", content))
    return message


def _set(target: Any, options: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        value = options.get(name)
        if value is not None:
            _checked(name, lambda name=name, value=value: setattr(target, name, value))  # type: ignore[misc]


def _extend(target: Any, options: Mapping[str, Any], name: str) -> None:
    values = options.get(name) or ()
    _extend_list(getattr(target, name), values, name)


def _extend_list(target: Any, values: Any, name: str) -> None:
    if isinstance(values, str):
        raise TypeError(f"{name}: a list is needed, not one string")
    _checked(name, lambda: target.extend(values))


def _set_grammar(sampling: common_pb2.SamplingParams, options: Mapping[str, Any]) -> None:
    asked = [name for name in _GRAMMARS if options.get(name) not in (None, False)]
    if len(asked) > 1:
        raise ValueError(f"{asked[1]}: not together with {asked[0]}; the output has one form")
    if asked == ["choice"]:
        sampling.structured_output.choice.SetInParent()
        _extend_list(sampling.structured_output.choice.choices, options["choice"], "choice")
    elif asked:
        _set(sampling.structured_output, {**options, "json_schema": _schema(options)}, asked)


def _schema(options: Mapping[str, Any]) -> Any:
    """A schema as JSON text, its members in their order."""
    schema = options.get("json_schema")
    if not isinstance(schema, Mapping):
        return schema
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"json_schema: {error}") from None


def chat_spec(messages: Messages, options: Mapping[str, Any]) -> chat_pb2.ChatSpec:
    """The spec of a chat. Raises ValueError or TypeError naming the field.

    Ranges are the server's to judge; here only what the wire cannot carry fails.
    """
    turns = [("user", messages)] if isinstance(messages, str) else messages
    spec = chat_pb2.ChatSpec()
    spec.messages.extend(_message(turn, f"messages[{i}]") for i, turn in enumerate(turns))
    _set_options(spec, options, ("system", *_SPEC))
    return spec


def completion_spec(prompt: RawPrompt, options: Mapping[str, Any]) -> chat_pb2.CompletionSpec:
    """The spec of a raw prompt, text or token ids. Raises like `chat_spec`."""
    if not isinstance(prompt, Sequence):
        raise TypeError("prompt: a text or a list of token ids is needed")
    spec = chat_pb2.CompletionSpec()
    if isinstance(prompt, str):
        _checked("prompt", lambda: setattr(spec, "text", prompt))
    else:
        spec.token_ids.SetInParent()
        _checked("prompt", partial(spec.token_ids.ids.extend, prompt))
    if options.get("system") is not None:
        raise TypeError("system: a raw prompt has none")
    _set_options(spec, options, _SPEC)
    return spec


def _set_options(
    spec: chat_pb2.ChatSpec | chat_pb2.CompletionSpec,
    options: Mapping[str, Any],
    own: Sequence[str],
) -> None:
    unknown = sorted(options.keys() - ChatOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}")
    trace_metadata(options)
    _set(spec, options, own)
    sampling = common_pb2.SamplingParams()
    _set(sampling, options, _SAMPLING)
    _extend(sampling, options, "stop_token_ids")
    _extend(spec, options, "stop_sequences")
    _set_grammar(sampling, options)
    biases = options.get("logit_bias") or {}
    _checked("logit_bias", lambda: sampling.logit_bias.update(biases))
    spec.sampling.CopyFrom(sampling)


def trace_metadata(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The caller's trace as metadata, if it is given. Raises TypeError, or ValueError for what
    is no `traceparent`.
    """
    value = options.get("traceparent")
    if value is None:
        return ()
    if not isinstance(value, str):
        raise TypeError("traceparent: the value has the wrong type")
    if parse_traceparent(value) is None:
        raise ValueError("traceparent: VERSION-TRACEID-PARENTID-FLAGS in lower-case hex is needed")
    return ((TRACEPARENT, value),)


def checked_timeout(timeout: float) -> float:
    """A deadline in seconds. Raises TypeError, or ValueError unless positive and finite."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError("timeout: a number of seconds is needed")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout: must be a positive number of seconds, got {timeout}")
    return timeout
