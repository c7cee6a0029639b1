"""Structured output of the demo model, through all services: it is what it was asked to be."""

import asyncio
import json
import re
from collections import Counter
from itertools import count, islice

import jsonschema
import pytest

from tests.support.schemas import random_schema
from tests.support.stack import running_stack
from tests.support.waiting import until

pytestmark = pytest.mark.model

PLACES = 12


@pytest.fixture(scope="module")
async def stack(demo_model_path):
    async with running_stack(demo_model_path, max_num_seqs=PLACES, num_blocks=1024) as running:
        yield running


def check(schema, text):
    """Raises unless the text is JSON that the schema allows."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


async def how_it_ended(stack, seed, max_tokens, question):
    """Why a random schema's output ended; one that ended by itself is valid."""
    schema = random_schema(seed)
    result = await stack.client.chat(
        question.format(schema=json.dumps(schema)),
        json_schema=schema,
        max_tokens=max_tokens,
        seed=seed,
        timeout=3_000,
    )
    if result.stop_reason == "end_turn":
        check(schema, result.text)
    return result.stop_reason


async def endings(stack, seeds, max_tokens, question):
    places = asyncio.Semaphore(PLACES)

    async def one(seed):
        async with places:
            return await how_it_ended(stack, seed, max_tokens, question)

    return Counter(await asyncio.gather(*map(one, seeds)))


async def test_random_schemas_give_valid_json(stack):
    """Ten small ones; what does not end by itself says so."""
    small = (seed for seed in count(1_000) if len(json.dumps(random_schema(seed))) < 200)
    ended = await endings(stack, islice(small, 10), max_tokens=40, question="JSON, please.")
    assert ended.keys() <= {"end_turn", "max_tokens"}
    assert ended["end_turn"] >= 6
    await until(lambda: set(stack.held().values()) == {0})


@pytest.mark.soak
@pytest.mark.timeout(3_600)
async def test_200_random_schemas_give_valid_json_and_190_end_within_512_tokens(stack):
    question = "Write JSON that follows this schema: {schema}"
    ended = await endings(stack, range(200), max_tokens=512, question=question)
    assert ended.keys() <= {"end_turn", "max_tokens"}
    assert ended["end_turn"] >= 190, ended


async def test_each_kind_gives_what_it_says(stack):
    ask = stack.client.chat
    number, color, fruit, any_object = await asyncio.gather(
        ask("When did Rome fall?", regex=r"[0-9]{3} (AD|BC)", seed=1, max_tokens=40),
        ask("What colour is a tomato?", choice=["red", "blue, or so"], seed=2, max_tokens=40),
        ask("Is a tomato a fruit?", choice=["Yes", "Yes, it is"], n=3, seed=3, max_tokens=40),
        ask("A small object.", json_object=True, temperature=0, max_tokens=48),
    )
    assert re.fullmatch(r"[0-9]{3} (AD|BC)", number.text)
    assert color.text in ("red", "blue, or so")
    assert {choice.text for choice in fruit.choices} <= {"Yes", "Yes, it is"}
    assert {choice.stop_reason for choice in fruit.choices} == {"end_turn"}
    if any_object.stop_reason == "end_turn":
        json.loads(any_object.text)
    assert any_object.text.startswith("{")
