"""Workers share the tokens by what they can do, not by turns."""

import asyncio
import contextlib
import hashlib
import json
from collections import Counter

import pytest

from noria import AsyncClient
from router.app import running_router
from router.config import RouterConfig
from tests.support.stack import API_KEY
from tokenizer_svc.app import running_tokenizer
from tokenizer_svc.config import TokenizerConfig
from worker.app import running_worker
from worker.config import WorkerConfig

STREAMS = 64
TOKENS = 6


@contextlib.asynccontextmanager
async def workers_of_speeds(model, folder, step_seconds):
    """A client of two scripted workers with these step times, and the workers' addresses."""
    async with contextlib.AsyncExitStack() as held:
        enter = held.enter_async_context
        tokenizer = await enter(running_tokenizer(TokenizerConfig(model, "demo", "127.0.0.1:0")))
        workers = []
        for number, seconds in enumerate(step_seconds):
            script = folder / f"{number}.json"
            settings = {"step_seconds": seconds, "mean_output_tokens": 0, "token_ids": [32, 127]}
            script.write_text(json.dumps({"scripts": [], **settings}))
            config = WorkerConfig(model, "demo", "127.0.0.1:0", script=script, max_num_seqs=4)
            workers.append(await enter(running_worker(config)))
        await tokenizer.ready()
        await asyncio.gather(*(worker.ready() for worker in workers))
        router = await enter(
            running_router(
                RouterConfig(
                    tokenizers=(tokenizer.address,),
                    workers=tuple(worker.address for worker in workers),
                    api_key_sha256=hashlib.sha256(API_KEY.encode()).hexdigest(),
                    listen="127.0.0.1:0",
                )
            )
        )
        await router.wait_ready()
        async with asyncio.timeout(10):
            while len(list(router.registry)) < len(workers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        client = await enter(AsyncClient(router.address, api_key=API_KEY))
        yield client, [worker.address for worker in workers]


async def tokens_by_worker(client, pause_s=0.01) -> Counter:
    """Streams arrive one by one, whether earlier ones are done or not."""
    asking = []
    for index in range(STREAMS):
        asking.append(asyncio.create_task(client.chat(f"{index}", max_tokens=TOKENS, seed=index)))
        await asyncio.sleep(pause_s)
    tokens = Counter()
    for result in await asyncio.gather(*asking):
        assert result.usage.output_tokens == TOKENS
        tokens[result.timeline.worker_id] += TOKENS
    return tokens


@pytest.mark.parametrize("pause_s", [0.02, 0.08])
async def test_a_worker_four_times_slower_gets_at_most_a_third(golden_model, tmp_path, pause_s):
    """With twice as many streams as both can take, and with fewer than one can."""
    async with workers_of_speeds(golden_model, tmp_path, [0.03, 0.12]) as (client, addresses):
        tokens = await tokens_by_worker(client, pause_s)
    assert tokens.total() == STREAMS * TOKENS
    assert tokens[addresses[1]] <= tokens.total() / 3


async def test_equal_workers_get_about_half_each(golden_model, tmp_path):
    async with workers_of_speeds(golden_model, tmp_path, [0.02, 0.02]) as (client, addresses):
        tokens = await tokens_by_worker(client)
    shares = [tokens[address] / (STREAMS * TOKENS) for address in addresses]
    assert shares == pytest.approx([0.5, 0.5], abs=0.05)
