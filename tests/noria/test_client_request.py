"""What a caller writes becomes a ChatSpec, or an error that names the field."""

import pytest

from noria.client.request import ChatOptions, chat_spec, checked_timeout
from noria.v1 import chat_pb2


def turns(spec):
    return [(chat_pb2.Role.Name(m.role), m.content[0].text.text) for m in spec.messages]


def test_a_string_is_one_question_of_the_user():
    assert turns(chat_spec("hi", {})) == [("ROLE_USER", "hi")]


def test_pairs_mappings_and_messages_mean_the_same():
    ready = chat_pb2.Message(role=chat_pb2.ROLE_USER)
    ready.content.add().text.text = "c"
    spec = chat_spec([("user", "a"), {"role": "assistant", "content": "b"}, ready], {})
    assert turns(spec) == [("ROLE_USER", "a"), ("ROLE_ASSISTANT", "b"), ("ROLE_USER", "c")]


def test_what_is_left_out_stays_absent_and_zero_is_sent():
    bare = chat_spec("hi", {})
    assert not bare.HasField("max_tokens")
    assert not bare.sampling.HasField("temperature")
    spec = chat_spec("hi", {"temperature": 0, "top_k": 0, "seed": 0, "system": ""})
    assert all(spec.sampling.HasField(name) for name in ("temperature", "top_k", "seed"))
    assert spec.HasField("system")


def test_every_option_arrives_on_the_wire():
    options: ChatOptions = {
        "system": "s", "model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.25,
        "top_k": 4, "seed": -1, "stop_sequences": ["x"], "stop_token_ids": [7],
        "min_tokens": 2, "ignore_eos": True, "skip_special_tokens": False, "priority": -1,
        "trace_steps": True, "min_p": 0.125, "presence_penalty": -2, "frequency_penalty": 0.5,
        "repetition_penalty": 1.5, "logit_bias": {7: -100, 0: 0.5}, "logprobs": 0, "n": 3,
        "prompt_logprobs": 0,
    }  # fmt: skip
    grammars = {"json_schema", "json_object", "regex", "choice"}
    assert options.keys() == ChatOptions.__annotations__.keys() - {
        "timeout",
        "traceparent",
        *grammars,
    }
    spec = chat_spec("hi", options)
    for name, value in options.items():
        owner = spec if name in spec.DESCRIPTOR.fields_by_name else spec.sampling
        got = getattr(owner, name)
        assert (type(value)(got) if isinstance(value, (list, dict)) else got) == value


@pytest.mark.parametrize(
    ("options", "kind", "value"),
    [
        ({"json_schema": {"b": 1, "a": 2}}, "json_schema", '{"b": 1, "a": 2}'),
        ({"json_schema": '{"b":1}'}, "json_schema", '{"b":1}'),
        ({"json_object": True, "regex": None}, "json_object", True),
        ({"regex": "", "json_object": False}, "regex", ""),
    ],
)
def test_what_the_output_must_be_arrives_as_it_is(options, kind, value):
    output = chat_spec("hi", options).sampling.structured_output
    assert output.WhichOneof("grammar") == kind
    assert getattr(output, kind) == value


def test_choices_arrive_in_their_order_and_none_are_none():
    sampling = chat_spec("hi", {"choice": ["no", "yes"]}).sampling
    assert list(sampling.structured_output.choice.choices) == ["no", "yes"]
    empty = chat_spec("hi", {"choice": []}).sampling
    assert empty.structured_output.WhichOneof("grammar") == "choice"
    assert not chat_spec("hi", {"choice": None}).sampling.HasField("structured_output")


@pytest.mark.parametrize(
    ("messages", "options", "named"),
    [
        ("hi", {"max_tokens": -1}, "max_tokens"),
        ("hi", {"max_tokens": 2**32}, "max_tokens"),
        ("hi", {"seed": 2**63}, "seed: the value is out of range"),
        ("hi", {"temperature": 10**400}, "temperature: the value is out of range"),
        ("hi", {"logit_bias": {3: 10**400}}, "logit_bias: the value is out of range"),
        ("hi", {"temperature": "warm"}, "temperature"),
        ("hi", {"stop_token_ids": [-1]}, "stop_token_ids"),
        ("hi", {"logit_bias": {-1: 2.0}}, "logit_bias"),
        ("hi", {"logit_bias": {3: "much"}}, "logit_bias"),
        ("hi", {"logit_bias": [5]}, "logit_bias"),
        ("hi", {"n": -1}, "n"),
        ("hi", {"regex": "a", "choice": ["b"]}, "choice: not together with regex"),
        ("hi", {"json_schema": {"const": float("nan")}}, "json_schema"),
        ("hi", {"json_schema": {"const": object()}}, "json_schema"),
        ("hi", {"json_schema": 5}, "json_schema"),
        ("hi", {"regex": "\ud800"}, "regex"),
        ("hi", {"choice": "yes"}, "choice"),
        ("hi", {"choice": [5]}, "choice"),
        ("hi", {"stop_sequences": "END"}, "stop_sequences"),
        ("hi", {"max_token": 5}, "max_token"),
        ("a\ud800b", {}, r"messages\[0\].content"),
        ([("user", "a"), ("tool", "b")], {}, r"messages\[1\].role"),
        ([{"role": "user"}], {}, r"messages\[0\]"),
        ([{"role": "user", "content": "a", "name": "b"}], {}, r"messages\[0\]"),
        ([("user", 5)], {}, r"messages\[0\].content"),
        (["hello"], {}, r"messages\[0\]"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(messages, options, named):
    with pytest.raises((ValueError, TypeError), match=named):
        chat_spec(messages, options)


def test_a_refusal_never_repeats_the_text():
    with pytest.raises(ValueError, match="content") as caught:
        chat_spec("MARKER\ud800", {})
    assert "MARKER" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "error"),
    [("00-1-2-3", ValueError), ("", ValueError), (b"x", TypeError), (7, TypeError)],
)
def test_a_trace_context_has_its_form(value, error):
    with pytest.raises(error, match="traceparent"):
        chat_spec("hi", {"traceparent": value})


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_deadline_is_positive_and_finite(timeout):
    with pytest.raises(ValueError, match="timeout"):
        checked_timeout(timeout)
