"""The golden request, through all three services, compared with a golden file.

Ids, probabilities and texts are scripted; positions and KV figures are the scheduler's and
the block pool's own.
"""

import base64
import json
import math
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict

from tests.support.stack import running_stack
from tests.support.worker_client import StepGate

GOLDEN = Path(__file__).parent / "golden_request.json"
SYSTEM, QUESTION, FOLLOW_UP = "짧게 답하세요.", "토마토는 과일이야?", "그럼 수박은?"
PROMPT = [5, 21873, 1240, 6150, 703, 2981, 13, 6, 7, 7342, 9180, 412, 1785, 30, 8, 9]
NE, COMMA, FRUIT, EOS = 4512, 11, 15339, 2
SCRIPT = {
    "prompt_token_ids": PROMPT,
    "output_token_ids": [NE, COMMA, FRUIT, EOS],
    "logits": {"0": {str(NE): math.log(0.70), str(NE + 1): math.log(0.30)}},
}
# A request that names no seed gets one from the router; with this one the first draw's
# uniform number is below 0.70.
SEED = 4


@pytest.fixture
async def stack(golden_model, script_file):
    async with running_stack(
        golden_model, script=script_file([SCRIPT]), seeds=[SEED, SEED, SEED], block_size=16
    ) as running:
        yield running


def told(event):
    """An event as plain data, without what differs from run to run."""
    kind = event.WhichOneof("event")
    data = MessageToDict(getattr(event, kind), preserving_proto_field_name=True)
    data.pop("request_id", None)
    data.pop("timeline", None)
    for step in data.get("steps", []):
        del step["step_us"]
        step["token_bytes"] = base64.b64decode(step["token_bytes"]).decode()
        step["probability"] = round(step["probability"], 6)
        for other in step.get("runners_up", []):
            other["probability"] = round(other["probability"], 6)
    return {kind: data}


async def read_step_by_step(stream, stack):
    """All events; the worker computes its next step only once the last one's text is here."""
    gate = StepGate(stack.workers[0].runner)
    gate.let_through()
    events = []
    async for event in stream.events():
        events.append(event)
        if event.content_block_delta.text:
            gate.let_through()
    return events


async def test_the_golden_request_is_replayed_exactly(stack):
    ask = stack.client.stream_chat(QUESTION, system=SYSTEM, max_tokens=1024, trace_steps=True)
    async with ask as stream:
        events = await read_step_by_step(stream, stack)
    assert [told(event) for event in events] == json.loads(GOLDEN.read_text())
    assert events[0].message_start.request_id == stream.request_id

    (outputs,) = stack.steps
    fed = [(list(e.token_ids), e.first_position) for o in outputs for e in o.scheduled]
    assert fed == [(PROMPT, 0), ([NE], 16), ([COMMA], 17), ([FRUIT], 18)]
    assert stack.workers[0].runner.num_positions_fed == 19
    draws = [entry.draw.sampling for output in outputs for entry in output.scheduled]
    assert {(draw.temperature, draw.seed) for draw in draws} == {(1.0, SEED)}
    assert set(stack.held().values()) == {0}


async def test_each_token_is_a_delta_of_its_own_sent_before_the_next_is_computed(stack):
    ask = stack.client.stream_chat(QUESTION, system=SYSTEM, max_tokens=1024)
    async with ask as stream:
        events = await read_step_by_step(stream, stack)
    deltas = [event.content_block_delta for event in events]
    pieces = [delta.text for delta in deltas if delta.text]
    assert pieces == ["네", ",", " 과일입니다."]
    assert stream.result.stop_reason == "end_turn"
    assert (stream.result.usage.input_tokens, stream.result.usage.output_tokens) == (16, 4)


async def test_the_follow_up_is_a_new_request_that_begins_with_the_first_ones_ids(stack):
    turns = [("user", QUESTION), ("assistant", "네, 과일입니다."), ("user", FOLLOW_UP)]
    async with stack.client.stream_chat(turns, system=SYSTEM, max_tokens=3) as stream:
        async for _ in stream:
            pass
    (outputs,) = stack.steps
    prompt = list(outputs[0].scheduled[0].token_ids)
    assert prompt[:20] == [*PROMPT, NE, COMMA, FRUIT, EOS]
    assert len(prompt) > 20
    assert stream.result.usage.input_tokens == len(prompt)


async def test_the_whole_answer_in_one_message_is_the_same(stack):
    result = await stack.client.chat(QUESTION, system=SYSTEM, max_tokens=1024)
    assert result.text == "네, 과일입니다."
    assert result.stop_reason == "end_turn"
    assert (result.usage.input_tokens, result.usage.output_tokens) == (16, 4)
