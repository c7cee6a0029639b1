"""A conversation's earlier turns are not computed again, and no tenant meets another's prefixes."""

import hashlib

import pytest

from noria import AsyncClient
from tests.support.stack import API_KEY, running_stack

OTHER_KEY, GROUPED_KEYS = "another-key-0001", ("grouped-key-0001", "grouped-key-0002")
DOCUMENT = "토마토는 과일이야? " * 30


def tenant(name, key, more=""):
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[tenants]]\nname = "{name}"\n{more}\n[[tenants.keys]]\nsha256 = "{digest}"\n'


@pytest.fixture
async def stack(golden_model, script_file, tmp_path):
    keys = tmp_path / "keys.toml"
    grouped = 'cache_group = "shared"'
    keys.write_text(
        tenant("one", API_KEY)
        + tenant("two", OTHER_KEY)
        + tenant("three", GROUPED_KEYS[0], grouped)
        + tenant("four", GROUPED_KEYS[1], grouped)
    )
    script = script_file(mean_output_tokens=0, token_ids=[32, 127])
    router = {"keys_file": keys, "api_key_sha256": ""}
    async with running_stack(golden_model, script=script, router=router) as running:
        yield running


async def cached_tokens(stack, key, text=DOCUMENT):
    async with AsyncClient(stack.router.address, api_key=key) as client:
        return (await client.chat(text, max_tokens=2, seed=1)).usage.cached_tokens


async def test_a_tenant_finds_its_own_prefixes_and_no_others(stack):
    """PFX-03: the second tenant's request computes what the first one's did."""
    computed = []
    for key, least in ((API_KEY, 0), (OTHER_KEY, 0), (API_KEY, 100), (OTHER_KEY, 100)):
        seen = len(stack.steps[0])
        cached = await cached_tokens(stack, key)
        assert cached > least if least else cached == 0
        computed.append([output.num_tokens for output in stack.steps[0][seen:]])
    cold, other, known, known_to_other = computed
    assert other == cold
    assert known == known_to_other
    assert sum(known) < sum(cold) - 100


async def test_tenants_that_the_operator_grouped_share(stack):
    first, second = GROUPED_KEYS
    assert await cached_tokens(stack, first) == 0
    assert await cached_tokens(stack, second) > 100
    assert await cached_tokens(stack, API_KEY) == 0


async def test_the_second_turn_computes_only_what_is_new(stack):
    first = await stack.client.chat(DOCUMENT, max_tokens=40, seed=1)
    turns = [("user", DOCUMENT), ("assistant", first.text), ("user", "그럼 수박은?")]
    second = await stack.client.chat(turns, max_tokens=2, seed=1)
    # All full blocks of the first prompt; its answer's text may encode to other ids.
    assert second.usage.cached_tokens >= first.usage.input_tokens // 16 * 16
    prompts = [o for o in stack.steps[0] if any(e.num_tokens > 1 for e in o.scheduled)]
    computed = prompts[-1].scheduled[-1].num_tokens
    assert computed == second.usage.input_tokens - second.usage.cached_tokens
