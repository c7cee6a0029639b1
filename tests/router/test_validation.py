"""Every bad field is refused by name, with both numbers, and nothing else is."""

import math
import time

import pytest

from noria.reasons import Reason, RequestError
from noria.service import limits
from noria.service.wire_structured_output import structured_output
from noria.v1 import chat_pb2, common_pb2
from router.validation import checked_chat
from tests.router.fakes import spec, user

NAN, INF = float("nan"), float("inf")
MANY = limits.MAX_MESSAGES + 1


def with_message(role=chat_pb2.ROLE_USER, blocks=(), **fields) -> chat_pb2.ChatSpec:
    return chat_pb2.ChatSpec(messages=[chat_pb2.Message(role=role, content=blocks)], **fields)


def text(value: str) -> chat_pb2.ContentBlock:
    return chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=value))


BAD = [
    (chat_pb2.ChatSpec(), "messages", ["0", "1"]),
    (chat_pb2.ChatSpec(messages=[user("x")] * MANY), "messages", [str(MANY), "4096"]),
    (
        chat_pb2.ChatSpec(messages=[chat_pb2.Message(content=[text("x")] * 5)] * 4000),
        "messages",
        ["20000", "16384"],
    ),
    (with_message(role=chat_pb2.ROLE_UNSPECIFIED, blocks=[text("x")]), "messages[0].role", []),
    (with_message(role=77, blocks=[text("x")]), "messages[0].role", []),
    (with_message(), "messages[0].content", ["0", "1"]),
    (with_message(blocks=[text(""), text("")]), "messages[0].content", ["0", "1"]),
    (with_message(blocks=[text("x")] * 65), "messages[0].content", ["65", "64"]),
    (with_message(blocks=[chat_pb2.ContentBlock()]), "messages[0].content[0]", []),
    (spec(max_tokens=0), "max_tokens", ["0", "1"]),
    (spec(n=0), "n", ["0", "1"]),
    (spec(n=100_000), "n", ["100000", "16"]),
    (spec(priority=101), "priority", ["101", "100"]),
    (spec(priority=-101), "priority", ["-101", "-100"]),
    (spec(model="m" * 257), "model", ["257", "256"]),
    (spec(stop_sequences=["x"] * 17), "stop_sequences", ["17", "16"]),
    (spec(stop_sequences=["a", ""]), "stop_sequences[1]", ["0", "1"]),
    (spec(stop_sequences=["é" * 129]), "stop_sequences[0]", ["258", "256"]),
    (spec(stop_sequences=["é" * 64] * 8 + ["x"]), "stop_sequences", ["1025", "1024"]),
    (spec(tools=[chat_pb2.Tool()] * 129), "tools", ["129", "128"]),
    (spec(temperature=-0.5), "sampling.temperature", ["-0.5", "0"]),
    (spec(temperature=2.5), "sampling.temperature", ["2.5", "2"]),
    (spec(temperature=NAN), "sampling.temperature", ["nan"]),
    (spec(temperature=INF), "sampling.temperature", ["inf", "2"]),
    (spec(top_p=0.0), "sampling.top_p", ["0", "1"]),
    (spec(top_p=1.5), "sampling.top_p", ["1.5", "1"]),
    (spec(top_p=NAN), "sampling.top_p", ["nan"]),
    (spec(min_p=1.5), "sampling.min_p", ["1.5", "1"]),
    (spec(presence_penalty=-3.0), "sampling.presence_penalty", ["-3", "-2"]),
    (spec(frequency_penalty=NAN), "sampling.frequency_penalty", ["nan"]),
    (spec(repetition_penalty=0.0), "sampling.repetition_penalty", ["0", "2"]),
    (spec(logprobs=21), "sampling.logprobs", ["21", "20"]),
    (spec(prompt_logprobs=1000), "sampling.prompt_logprobs", ["1000", "20"]),
    (spec(min_tokens=11, max_tokens=10), "sampling.min_tokens", ["11", "10"]),
    (spec(stop_token_ids=range(65)), "sampling.stop_token_ids", ["65", "64"]),
    (spec(logit_bias=dict.fromkeys(range(1025), 0.0)), "sampling.logit_bias", ["1025", "1024"]),
    (spec(logit_bias={5: 101}), "sampling.logit_bias", ["101", "100"]),
    (spec(logit_bias={5: -101}), "sampling.logit_bias", ["-101", "-100"]),
    (spec(logit_bias={5: math.inf}), "sampling.logit_bias", ["inf", "100"]),
]


def within(**grammar) -> chat_pb2.ChatSpec:
    """A chat whose output is kept inside a grammar."""
    return spec(structured_output=common_pb2.StructuredOutput(**grammar))


def one_of(*choices: str) -> common_pb2.SamplingParams.Choices:
    return common_pb2.SamplingParams.Choices(choices=choices)


OUTPUT = "sampling.structured_output"
BAD_GRAMMARS = [
    (within(), f"{OUTPUT}.grammar", ["none"]),
    (within(json_object=False), f"{OUTPUT}.json_object", ["false"]),
    (within(json_schema=""), f"{OUTPUT}.json_schema", ["0", "1"]),
    (within(json_schema=" " * 65_537), f"{OUTPUT}.json_schema", ["65537", "65536"]),
    (within(json_schema='{"a": "Xanadu" 1}'), f"{OUTPUT}.json_schema", ["line 1 column 16"]),
    (within(json_schema='{"Xanadu": 1, "Xanadu": 2}'), f"{OUTPUT}.json_schema", ["same name"]),
    (within(json_schema='{"Xanadu": NaN}'), f"{OUTPUT}.json_schema", ["NaN is no number"]),
    (within(json_schema='{"Xanadu": 1e400}'), f"{OUTPUT}.json_schema", ["range of a double"]),
    (within(json_schema='{"Xanadu": ' + "9" * 5_000 + "}"), f"{OUTPUT}.json_schema", ["digits"]),
    (within(json_schema='["Xanadu"]'), f"{OUTPUT}.json_schema", ["not a JSON object"]),
    (within(json_schema='{"a":' * 65 + "{}" + "}" * 65), f"{OUTPUT}.json_schema", ["64"]),
    (within(json_schema='{"a":' + "[" * 60_000), f"{OUTPUT}.json_schema", []),
    (within(regex=""), f"{OUTPUT}.regex", ["0", "1"]),
    (within(regex="x" * 16_385), f"{OUTPUT}.regex", ["16385", "16384"]),
    (within(choice=one_of()), f"{OUTPUT}.choice.choices", ["0", "1024"]),
    (within(choice=one_of(*"x" * 1_025)), f"{OUTPUT}.choice.choices", ["1025", "1024"]),
    (within(choice=one_of("a", "")), f"{OUTPUT}.choice.choices[1]", ["0", "1"]),
    (within(choice=one_of("é" * 32_769)), f"{OUTPUT}.choice.choices", ["65538", "65536"]),
    (
        spec(structured_output=common_pb2.StructuredOutput(regex="a"), ignore_eos=True),
        "sampling.ignore_eos",
        ["structured_output"],
    ),
]
TOOL_USE = chat_pb2.ContentBlock(tool_use=chat_pb2.ToolUseBlock())
THINKING = chat_pb2.ContentBlock(thinking=chat_pb2.ThinkingBlock())
UNSUPPORTED = [
    (spec(tools=[chat_pb2.Tool(name="t")]), "tools"),
    (
        spec(tool_choice=chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_ANY)),
        "tool_choice",
    ),
    (spec(thinking=True), "thinking"),
    (with_message(blocks=[text("x"), TOOL_USE]), "messages[0].content[1].tool_use"),
    (with_message(blocks=[THINKING]), "messages[0].content[0].thinking"),
]


@pytest.mark.parametrize(("bad", "field", "numbers"), BAD_GRAMMARS)
def test_a_bad_grammar_is_named_without_its_text(bad, field, numbers):
    """SEC-05 for schemas: in no time, whatever was nested, repeated or overlong."""
    started = time.perf_counter()
    with pytest.raises(RequestError) as caught:
        checked_chat(bad, 100)
    assert time.perf_counter() - started < 0.5
    assert caught.value.reason is Reason.INVALID_FIELD
    ((named, problem),) = caught.value.fields
    assert named == field
    assert all(number in problem for number in numbers)
    assert "Xanadu" not in caught.value.message


@pytest.mark.parametrize(
    ("asked", "kind", "texts"),
    [
        (within(json_schema='{"a":' * 63 + "{}" + "}" * 63), "json_schema", None),
        (within(json_object=True), "json_object", ()),
        (within(regex="(not | judged here"), "regex", ("(not | judged here",)),
        (within(choice=one_of("no", "yes")), "choice", ("no", "yes")),
    ],
)
def test_a_grammar_is_passed_on_as_it_is(asked, kind, texts):
    grammar = checked_chat(asked, 100).sampling.grammar
    assert grammar.kind == kind
    assert texts in (None, grammar.texts)
    assert structured_output(kind, grammar.texts) == asked.sampling.structured_output
    assert all(text not in repr(grammar) for text in grammar.texts)


@pytest.mark.parametrize(("bad", "field", "numbers"), BAD)
def test_a_bad_field_is_named_with_both_numbers(bad, field, numbers):
    """SEC-09, STP-08."""
    with pytest.raises(RequestError) as caught:
        checked_chat(bad, 100)
    assert caught.value.reason is Reason.INVALID_FIELD
    ((named, problem),) = caught.value.fields
    assert named == field
    assert all(number in problem for number in numbers)


@pytest.mark.parametrize(("asked", "field"), UNSUPPORTED)
def test_what_is_not_honoured_is_refused_by_name(asked, field):
    with pytest.raises(RequestError) as caught:
        checked_chat(asked, 100)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert caught.value.fields[0][0] == field


@pytest.mark.parametrize("size", [limits.MAX_CHAT_BYTES + 1, 5_000_000, 60_000_000])
def test_too_much_text_is_refused_quickly_with_both_sizes(size):
    asked = spec("x" * size)
    started = time.perf_counter()
    with pytest.raises(RequestError) as caught:
        checked_chat(asked, 100)
    assert time.perf_counter() - started < 0.5
    assert caught.value.reason is Reason.MESSAGE_TOO_LARGE
    assert str(limits.MAX_CHAT_BYTES) in caught.value.message


def test_sampling_controls_arrive_as_they_are():
    chat = checked_chat(
        spec(
            n=3, min_p=0.25, presence_penalty=2, frequency_penalty=-2, repetition_penalty=2,
            logit_bias={49151: -100, 0: 100}, logprobs=20,
        ),
        100,
    )  # fmt: skip
    sampling = chat.sampling
    assert chat.num_choices == 3
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.25, 2, -2)
    assert (sampling.repetition_penalty, sampling.logprobs) == (2, 20)
    assert dict(sampling.logit_bias) == {49151: -100, 0: 100}


def test_values_that_ask_for_nothing_pass():
    """Neutral settings change nothing and are no reason to refuse."""
    chat = checked_chat(
        spec(
            n=1,
            thinking=False,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            tool_choice=chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_NONE),
        ),
        100,
    )
    assert chat.sampling.temperature == 1.0
    assert chat.sampling.top_p == 1.0
    assert (chat.sampling.repetition_penalty, chat.sampling.logprobs) == (1.0, None)
    assert chat.num_choices == 1
    assert chat.skip_special_tokens
    assert chat.max_tokens is None
    assert chat.seed is None


def test_what_was_asked_is_kept():
    """The edges of every range are inside it; an empty system text is not an absent one."""
    chat = checked_chat(
        spec(system="", temperature=0.0, top_p=1.0, seed=0, skip_special_tokens=False), 100
    )
    assert (chat.prompt.system, chat.sampling.temperature, chat.seed) == ("", 0.0, 0)
    assert not chat.skip_special_tokens
    assert checked_chat(spec(temperature=2.0), 100).sampling.temperature == 2.0
    assert checked_chat(spec(), 100).prompt.system is None


def test_the_keys_ceiling_caps_the_priority():
    assert checked_chat(spec(priority=50), 10).priority == 10
    assert checked_chat(spec(priority=-50), 10).priority == -50
