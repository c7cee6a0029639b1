"""All services' metrics while requests end in every way, and once nothing is left."""

import asyncio
import itertools
import random
import re
from pathlib import Path

from noria import AsyncClient, NoriaError
from tests.support.scraping import scrape
from tests.support.stack import API_KEY, running_stack
from tests.support.waiting import until

LETTERS = [32, 127]
POOL = {"num_blocks": 24, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64}
AT_REST = (
    "noria_held",
    "noria_queue_requests",
    "noria_queue_tokens",
    "noria_sequences_demand",
    "noria_kv_tokens_demand",
    "noria_worker_running_sequences",
    "noria_worker_waiting_sequences",
    "noria_worker_waiting_tokens",
    "noria_worker_kv_blocks_used",
    "noria_worker_kv_tokens_used",
    "noria_worker_live_submits",
    "noria_worker_step_age_seconds",
    "noria_tokenizer_open_slots",
)
OPERATIONS = Path(__file__).parent.parent.parent / "docs" / "operations.md"


async def test_gauges_never_lie_under_load_and_read_zero_at_rest(golden_model, script_file):
    """MET-02: scraped a hundred times; counts only grow, and outcomes add up to what was asked."""
    script = script_file(mean_output_tokens=30, step_seconds=0.001, token_ids=LETTERS)
    async with running_stack(
        golden_model, num_workers=2, script=script, metrics_listen="127.0.0.1:0",
        router={"max_queued_requests": 60}, **POOL,
    ) as stack:  # fmt: skip
        first = await scrapes(stack)
        load = asyncio.create_task(ask_much(stack))
        rounds = [first]
        while len(rounds) <= 100 or not load.done():
            rounds.append(await scrapes(stack))
        outcomes = await load
        await until(lambda: set(stack.held().values()) == {0})
        await asyncio.sleep(0.01)
        last = await scrapes(stack)
    check_gauges([*rounds, last])
    check_counters([*rounds, last])
    busy = [found["noria_worker_running_sequences",] for each in rounds for found in each[2:]]
    assert max(busy) > 1
    left = {
        name: value
        for figures in last
        for name, value in figures.items()
        if name[0] in AT_REST and value
    }
    assert left == {}
    counted = {
        name[2]: value
        for name, value in last[0].items()
        if name[0] == "noria_requests_total" and name[1] == "StreamChat" and value
    }
    # A call that ends before its metadata is read was never a request.
    unread = outcomes.count("closed") + outcomes.count("DEADLINE_EXCEEDED")
    assert len(outcomes) - unread <= sum(counted.values()) <= len(outcomes)
    assert counted["SERVED"] >= outcomes.count("served") > 20
    assert counted["INVALID_KEY"] == outcomes.count("INVALID_KEY") > 0
    generated = sum(figures["noria_worker_generated_tokens_total",] for figures in last[2:])
    assert generated >= last[0]["noria_output_tokens_total", "demo"] > 100
    assert last[1]["noria_tokenizer_decoded_ids_total",] > 100


def check_gauges(rounds):
    for each in rounds:
        for figures in each:
            negative = {name: v for name, v in figures.of_type("gauge").items() if v < 0}
            assert negative == {}
        for worker in each[2:]:
            assert worker["noria_worker_kv_blocks_used",] <= worker["noria_worker_kv_blocks",]
            assert worker["noria_worker_running_sequences",] <= worker["noria_worker_max_num_seqs",]


def check_counters(rounds):
    """Every counter and bucket of a round is at least what it was before, and is still there."""
    for before, after in itertools.pairwise(rounds):
        for old, new in zip(before, after, strict=True):
            for kind in ("counter", "histogram"):
                shrunk = {n: v for n, v in old.of_type(kind).items() if new.get(n, -1) < v}
                assert shrunk == {}


async def scrapes(stack):
    return [await scrape(address) for address in stack.metrics]


async def ask_much(stack):
    rng = random.Random(7)
    address = stack.router.address
    async with (
        AsyncClient(address, api_key=API_KEY, retry=False) as client,
        AsyncClient(address, api_key="wrong") as stranger,
    ):
        asked = [ask(client, stranger, index, rng.random()) for index in range(150)]
        return await asyncio.gather(*asked)


async def ask(client, stranger, index, chance):
    """One request with a random ending; its name."""
    await asyncio.sleep(chance)
    caller = stranger if chance > 0.95 else client
    timeout = 0.1 if 0.85 < chance < 0.95 else 60.0
    try:
        async with caller.stream_chat(
            "토마토 " * (index % 20 + 1), max_tokens=20 + index % 60, seed=index, timeout=timeout
        ) as stream:
            seen = 0
            async for _ in stream.events():
                seen += 1
                if chance < 0.2 and seen > index % 6:
                    return "closed"
            return "served"
    except NoriaError as error:
        return error.reason.value


async def test_the_documented_metrics_are_those_that_are_served(golden_model, script_file):
    async with running_stack(
        golden_model, script=script_file(), metrics_listen="127.0.0.1:0"
    ) as stack:
        await stack.client.chat("hi", max_tokens=3)
        served = [figures.families for figures in await scrapes(stack)]
    names = {
        family.name + ("_total" if family.type == "counter" else "")
        for families in served
        for family in families.values()
        if family.name.startswith("noria_")
    }
    documented = set(re.findall(r"^\| `(noria_\w+)", OPERATIONS.read_text(), re.MULTILINE))
    assert documented == names
