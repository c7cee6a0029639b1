"""Every sampling control through all services: it does what it says, or is refused by name."""

import asyncio
import json

import pytest

import noria
from noria.client.errors import InvalidFieldError
from noria.service.limits import MAX_LOGPROBS
from tests.support.stack import running_stack
from tests.support.waiting import until
from tests.support.worker_client import StepGate

# Printable ASCII in the fixture tokenizer; the scripted model mostly speaks of eight of them.
LETTERS = [32, 127]
FEW = range(60, 68)
QUESTION = "토마토는 과일이야? " * 8
VOCAB = 21_880


@pytest.fixture(scope="module")
async def stack(golden_model, tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps({"mean_output_tokens": 0, "token_ids": [FEW.start, FEW.stop]}))
    async with running_stack(golden_model, script=script, max_num_seqs=8) as running:
        yield running


@pytest.fixture
async def neighbour(stack):
    """What a request beside must not notice: its text, alone and while the test runs."""
    alone = await stack.client.chat("네", max_tokens=60, seed=11)
    beside = asyncio.create_task(stack.client.chat("네", max_tokens=60, seed=11))
    yield
    assert (await beside).text == alone.text
    await until(lambda: set(stack.held().values()) == {0})


async def ask(stack, **options):
    return await stack.client.chat(QUESTION, **{"max_tokens": 24, "seed": 5, **options})


async def test_several_answers_share_one_prefill_and_the_first_is_that_of_n_1(stack):
    alone = await ask(stack)
    seen = len(stack.steps[0])
    together = await ask(stack, n=3)
    assert together.text == together.choices[0].text == alone.text
    assert len({choice.text for choice in together.choices}) == 3
    prompt_tokens = together.usage.input_tokens
    assert together.usage.output_tokens == 3 * 24
    fed = sum(output.num_tokens for output in stack.steps[0][seen:])
    # At most a block of the prompt for each further answer, and its decodes.
    assert fed <= prompt_tokens + 2 * 16 + 3 * 23
    streamed = stack.client.stream_chat(QUESTION, max_tokens=24, seed=5, n=3)
    async with streamed as stream:
        assert "".join([piece async for piece in stream]) == alone.text
    assert stream.result.choices == together.choices
    assert stream.result.timeline.usage.output_tokens == 3 * 24


async def test_a_stop_string_ends_one_answer_and_the_others_go_on(stack):
    whole = await ask(stack, n=3)
    stop = whole.choices[1].text[5:8]
    expected = [choice.text.split(stop)[0] for choice in whole.choices]
    stopped = await ask(stack, n=3, stop_sequences=[stop])
    assert [choice.text for choice in stopped.choices] == expected
    assert stopped.choices[1].stop_reason == "stop_sequence"
    assert "max_tokens" in {choice.stop_reason for choice in stopped.choices}
    tokens = sum(choice.usage.output_tokens for choice in stopped.choices)
    assert stopped.timeline.usage.output_tokens == tokens < 3 * 24
    assert stopped.timeline.wasted_tokens <= 3 * 24 - tokens
    await until(lambda: set(stack.held().values()) == {0})


async def test_an_answer_that_a_stop_string_ended_is_computed_no_further(stack):
    """Steps already begun are wasted; not the hundreds that the other answer still takes."""
    whole = await ask(stack, n=2, max_tokens=600)
    stop = whole.choices[1].text[5:17]
    assert stop not in whole.choices[0].text
    stopped = await ask(stack, n=2, max_tokens=600, stop_sequences=[stop])
    assert [choice.text for choice in stopped.choices] == [whole.text, whole.choices[1].text[:5]]
    used = stopped.choices[1].usage.output_tokens
    assert stopped.timeline.wasted_tokens < (600 - used) / 2
    await until(lambda: set(stack.held().values()) == {0})


async def test_when_all_answers_hit_stop_strings_the_worker_stops(stack):
    ends = sorted(set((await ask(stack, max_tokens=200, temperature=2)).text))
    assert len(ends) == len(FEW)
    stopped = await ask(stack, n=3, max_tokens=3000, stop_sequences=ends)
    assert {choice.stop_reason for choice in stopped.choices} == {"stop_sequence"}
    assert {choice.text for choice in stopped.choices} == {""}
    await until(lambda: set(stack.held().values()) == {0})


async def test_a_cancel_ends_all_answers(golden_model, script_file):
    script = script_file(mean_output_tokens=0, token_ids=LETTERS)
    async with running_stack(golden_model, script=script, max_num_seqs=4) as stack:
        gate, (steps,) = StepGate(stack.workers[0].runner), stack.steps
        async with stack.client.stream_chat(QUESTION, max_tokens=900, n=3) as stream:
            events = stream.events()
            gate.let_through(5)
            await until(lambda: len(steps) == 5 and gate.holds_one)
            assert {e.sequence_id for e in steps[-1].scheduled} == {1, 2, 3}
            begun = set()
            while len(begun) < 3:
                begun.add((await anext(events)).choice)
        gate.let_through(100)
        await until(lambda: set(stack.held().values()) == {0})
        assert len(steps) < 20


async def test_more_answers_than_places_all_come(golden_model, script_file):
    script = script_file(mean_output_tokens=20, token_ids=LETTERS)
    async with running_stack(golden_model, script=script, max_num_seqs=2) as stack:
        result = await ask(stack, n=5)
        assert len({choice.text for choice in result.choices}) == 5
        assert set(stack.held().values()) == {0}


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("temperature", [0, -0.0, 5e-324, 1e-45, 1e-10, 9.9e-6])
async def test_tiny_temperatures_are_the_greedy_choice(stack, temperature):
    """SMP-03."""
    greedy = await ask(stack, temperature=0.0)
    assert (await ask(stack, temperature=temperature)).text == greedy.text


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    "bad",
    [
        *[{"temperature": value} for value in (-1, 2.1, 100, float("nan"), float("inf"))],
        *[{"top_p": value} for value in (0, -0.1, 1.0001, float("nan"))],
        *[{"min_p": value} for value in (-0.1, 1.1, float("nan"))],
        *[{"presence_penalty": value} for value in (-2.1, 2.1, float("inf"))],
        *[{"frequency_penalty": value} for value in (-2.1, 2.1, float("nan"))],
        *[{"repetition_penalty": value} for value in (0, -1, 2.1)],
        *[{"logit_bias": {60: value}} for value in (101, -101, float("nan"), float("inf"))],
        {"logit_bias": {VOCAB: 1.0}},
        {"logit_bias": {2**32 - 1: 1.0}},
        {"logit_bias": dict.fromkeys(range(1025), 0.5)},
        {"stop_token_ids": [VOCAB]},
        *[{"logprobs": value} for value in (21, 16384, 49153, 1_000_000)],
        {"prompt_logprobs": 21},
        {"n": 0},
        {"n": 17},
        {"max_tokens": 0},
        {"max_tokens": 2**31},
        {"max_tokens": 2**32 - 1},
    ],
    ids=str,
)
async def test_what_is_out_of_range_is_refused_by_name_and_touches_nobody(stack, bad):
    """SMP-03, SMP-04, SMP-08, SMP-09, SMP-11."""
    with pytest.raises((InvalidFieldError, noria.ContextLengthExceededError)) as caught:
        await ask(stack, **bad)
    ((field, _),) = caught.value.fields
    assert field.split(".")[-1] == next(iter(bad))


@pytest.mark.parametrize("one", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0, "top_k": 1}])
async def test_filters_that_leave_one_token_are_the_greedy_choice(stack, one):
    """SMP-04."""
    assert (await ask(stack, **one)).text == (await ask(stack, temperature=0)).text


async def test_filters_that_are_off_or_wider_than_the_vocabulary_change_nothing(stack):
    """SMP-04."""
    plain = (await ask(stack)).text
    idle = [{"top_k": 0}, {"top_k": VOCAB - 1}, {"top_k": VOCAB}, {"top_k": 10**9}, {"top_p": 1}]
    for off in [*idle, {"min_p": 0}]:
        assert (await ask(stack, **off)).text == plain


async def test_a_forced_tie_is_drawn_from_both(stack):
    """SMP-04, SMP-08: whenever two ids are favoured alike, it is between them by their logits."""
    forced = await ask(stack, max_tokens=200, logit_bias={60: 100.0, 61: 100.0}, logprobs=0)
    favoured = [token.id for token in forced.choices[0].tokens if token.id in (60, 61)]
    # A scripted model has four candidates at most: some positions have neither.
    assert len(favoured) > 100
    assert min(favoured.count(60), favoured.count(61)) > 20


async def test_a_bias_of_minus_100_leaves_the_other_ids(stack):
    """SMP-08."""
    barred = dict.fromkeys(range(60, 64), -100.0)
    told = await ask(stack, max_tokens=200, logit_bias=barred, logprobs=3)
    for token in told.choices[0].tokens:
        others = {other.id for other in token.alternatives}
        assert token.id not in barred or others <= set(barred)


async def test_penalties_reach_the_engine(stack):
    """Greedy text repeats itself less the more it costs."""
    plain = await ask(stack, temperature=0, max_tokens=100)
    for name, value in (("frequency_penalty", 2.0), ("presence_penalty", 2.0)):
        assert (await ask(stack, temperature=0, max_tokens=100, **{name: value})).text != plain.text
    raised = dict.fromkeys(FEW, 5.0)
    base = await ask(stack, temperature=0, max_tokens=100, logit_bias=raised)
    told = await ask(
        stack, temperature=0, max_tokens=100, logit_bias=raised, repetition_penalty=2.0
    )
    assert base.text == plain.text != told.text


async def test_tokens_are_told_with_bytes_that_make_up_the_text(stack):
    """SMP-09: for every output token one entry; at most as many alternatives as asked for."""
    result = await ask(stack, logprobs=MAX_LOGPROBS, n=2)
    for choice in result.choices:
        assert len(choice.tokens) == choice.usage.output_tokens
        assert b"".join(token.bytes for token in choice.tokens).decode() == choice.text
        for token in choice.tokens:
            # The scripted model thinks of four ids at most.
            assert token.logprob <= 0
            assert len(token.alternatives) <= 3
            assert token.id not in {other.id for other in token.alternatives}
            shares = [other.logprob for other in token.alternatives]
            assert shares == sorted(shares, reverse=True)
    asked = stack.client.stream_chat(QUESTION, max_tokens=24, seed=5, n=2, logprobs=20)
    async with asked as stream:
        events = [event async for event in stream.events()]
    streamed = [t for e in events if e.choice == 1 for t in e.content_block_delta.tokens]
    assert tuple(streamed) == result.choices[1].tokens


async def test_the_prompt_is_told_of_once_whatever_is_cached_and_however_many_answer(stack):
    plain = await ask(stack, prompt_logprobs=None)
    told = await ask(stack, prompt_logprobs=2, n=3, max_tokens=3)
    first, *others = told.prompt_tokens
    assert len(told.prompt_tokens) == told.usage.input_tokens == plain.usage.input_tokens
    assert QUESTION in b"".join(token.bytes for token in told.prompt_tokens).decode()
    assert not first.HasField("logprob")
    assert all(token.HasField("logprob") and token.logprob <= 0 for token in others)
    for token in others:
        # The scripted model thinks of four ids at most; few of them are the prompt's.
        shares = [other.logprob for other in token.alternatives]
        assert len(shares) <= 2
        assert shares == sorted(shares, reverse=True)
        assert token.id not in {other.id for other in token.alternatives}
    assert told.usage.cached_tokens == 0
    async with stack.client.stream_chat(QUESTION, max_tokens=3, prompt_logprobs=2) as stream:
        async for _ in stream:
            pass
    assert stream.result.prompt_tokens == told.prompt_tokens
    assert (await ask(stack)).usage.cached_tokens > 0
    await until(lambda: set(stack.held().values()) == {0})
