"""A request moved to another worker after any number of output tokens goes on unchanged."""

import pytest

from noria.v1 import common_pb2, worker_pb2
from tests.support.worker_client import worker_client
from worker.app import running_worker
from worker.config import WorkerConfig

pytestmark = pytest.mark.model

# A chat by its control tokens; which words stand between them does not matter.
PROMPT = [1, 4093, 198, 6827, 1296, 7714, 30, 2, 198, 1, 520, 9531, 198]
NUM_TOKENS = 24
GREEDY = common_pb2.SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = common_pb2.SamplingParams(
    temperature=0.9, top_p=0.95, top_k=50, seed=2026, ignore_eos=True
)


CONTROLLED = common_pb2.SamplingParams(
    temperature=0.8, top_k=40, min_p=0.01, seed=7, min_tokens=20, stop_token_ids=[30],
    presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.2,
    logit_bias={2: 3.0, 198: -5.0}, logprobs=2,
    structured_output=common_pb2.StructuredOutput(
        json_schema='{"type":"array","minItems":9,"items":{"type":"object","properties":'
        '{"name":{"type":"string","maxLength":9},"n":{"type":"integer"}},"required":["name"]}}'
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, CONTROLLED], ids=["greedy", "sampled", "controlled"]
)
async def test_for_every_k_a_second_worker_produces_exactly_the_rest(demo_model_path, sampling):
    config = WorkerConfig(model=demo_model_path, listen="127.0.0.1:0", num_blocks=256)
    async with running_worker(config) as worker:
        await worker.ready()
        async with worker_client(worker.address) as client:
            whole = await client.generate(PROMPT, NUM_TOKENS, sampling=sampling)
    assert len(whole) == NUM_TOKENS
    async with running_worker(config) as worker:
        await worker.ready()
        async with worker_client(worker.address) as client:
            numbers = [
                await client.submit(
                    PROMPT,
                    NUM_TOKENS,
                    sampling=sampling,
                    outputs=[worker_pb2.OutputTokens(ids=whole[:k])],
                )
                for k in range(NUM_TOKENS)
            ]
            rests = await client.finished(*numbers)
            counted = [client.terminals[number].finished for number in numbers]
    assert rests == [whole[k:] for k in range(NUM_TOKENS)]
    assert {finished.output_tokens[0] for finished in counted} == {NUM_TOKENS}
    assert {finished.prompt_tokens for finished in counted} == {len(PROMPT)}
