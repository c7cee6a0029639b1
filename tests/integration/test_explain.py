"""`--explain` of real requests: the golden one's two tables, and every cause as it is provoked."""

import asyncio
import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from noria import Client, DeadlineExceededError
from noria.cli.explained import explained_answer
from noria.explain.observation import Arrival, Observation
from noria.explain.render import show
from noria.explain.story import story_of
from noria.explain.verdict import Cause
from noria.v1 import common_pb2
from tests.integration.test_golden_request import QUESTION, SCRIPT, SEED, SYSTEM
from tests.support.observed import observe
from tests.support.stack import API_KEY, running_stack
from tests.support.waiting import until

GOLDEN = Path(__file__).parent / "golden_explain.txt"
LETTERS = [32, 127]
# Milliseconds of each kind of phase, in place of those measured.
PHASES_MS = [("ADMISSION", 0.4), ("ENCODE", 1.1), ("QUEUE", 0.1), ("BATCH_WAIT", 0.2),
             ("PREFILL", 24.0), ("DECODE", 30.0), ("DETOKENIZE", 0.1), ("DELIVERY", 0.2),
             ("TRANSPORT", 2.5)]  # fmt: skip


@pytest.fixture
async def golden_stack(golden_model, script_file):
    async with running_stack(
        golden_model, script=script_file([SCRIPT]), seeds=[SEED] * 3, block_size=16
    ) as running:
        yield running


def with_set_times(seen):
    """The same request at a set pace, under a set name, at a set worker."""
    told = common_pb2.Timeline()
    told.CopyFrom(seen.timeline)
    told.request_id, told.worker_id = "req-golden", "worker-1:50053"
    del told.phases[:]
    for name, ms in PHASES_MS:
        kind = common_pb2.PhaseKind.Value(f"PHASE_KIND_{name}")
        told.phases.add(kind=kind, duration_us=round(ms * 1000))
    told.total_us = sum(phase.duration_us for phase in told.phases)
    arrivals = [
        Arrival(min(60_000, 10_000 * i), arrival.event)
        for i, arrival in enumerate(seen.arrivals, 1)
    ]
    return Observation(seen.asked, told.total_us + 3_000, arrivals, told)


def shown(story, **options):
    console = Console(file=io.StringIO(), width=80)
    show(story, console, **options)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


async def test_the_golden_request_is_told_as_the_facts_tell_it(golden_stack):
    turns = [("user", QUESTION)]
    seen = await observe(golden_stack.client, turns, system=SYSTEM, max_tokens=1024)
    story = story_of(with_set_times(seen))
    assert [
        (s.record.first_position, s.last_position, s.chosen.piece.decode(), s.record.kv_tokens)
        for s in story.steps
    ] == [
        (0, 15, "네", 16), (16, 16, ",", 17),
        (17, 17, " 과일입니다.", 18), (18, 18, "<|/assistant|>", 19),
    ]  # fmt: skip
    assert [s.token_in and s.token_in.piece.decode() for s in story.steps] == [
        None, "네", ",", " 과일입니다.",
    ]  # fmt: skip
    assert shown(story) == GOLDEN.read_text()


async def run_chat(address, *arguments):
    """`noria chat` with its output in a pipe: exit code and lines."""
    command = [sys.executable, "-m", "noria.cli", "chat", "--address", address, *arguments]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NORIA_API_KEY": API_KEY, "COLUMNS": "80"},
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode().splitlines()


async def test_the_command_streams_the_answer_and_tells_its_life(golden_stack):
    options = ["--system", SYSTEM, "--max-tokens", "1024", "--explain", "--answer-line"]
    code, lines = await run_chat(golden_stack.router.address, *options, QUESTION)
    assert code == 0
    assert (lines[0], lines[-1]) == ("네, 과일입니다.", "answer: 네, 과일입니다.")
    assert max(cell_len(line) for line in lines) <= 80
    # Everything between is the golden text, but for names and times.
    told, golden = (
        [line.split()[:2] for line in text if line[:1].isalpha()]
        for text in (lines[1:-1], GOLDEN.read_text().splitlines())
    )
    stations = golden.index(["Where", "the"])
    assert told[1:stations] == golden[1:stations]
    assert ["your", "wait"] in told


async def test_a_refused_request_tells_how_far_it_came(golden_stack):
    seen = await observe(golden_stack.client, [("user", QUESTION)], max_tokens=1_000_000)
    story = story_of(seen)
    assert [row.what for row in story.life] == [
        "question sent", "request made", "key checked", "cut into tokens", "not served",
    ]  # fmt: skip
    assert "CONTEXT_LENGTH_EXCEEDED" in story.life[-1].told
    assert story.times.wall_us == seen.wall_us
    assert "No text came" in shown(story)
    assert await golden_stack.client.timeline(seen.request_id) == seen.timeline


async def test_a_deadline_that_the_client_keeps_still_tells_where_the_time_went(
    golden_model, script_file, capsys
):
    one = {"max_num_seqs": 1, "step_seconds": 0.02}

    def ask(address):
        with Client(address, api_key=API_KEY, timeout=0.8) as client:
            explained_answer(client, [("user", "q")], {})

    async with scripted(golden_model, script_file, **one) as stack, busy_with(stack, 3, 300):
        with pytest.raises(DeadlineExceededError):
            await asyncio.to_thread(ask, stack.router.address)
    told = capsys.readouterr().out
    assert "turn awaited" in told
    assert "too few replicas" in " ".join(told.split())


@contextlib.asynccontextmanager
async def scripted(golden_model, script_file, *, step_seconds, **options):
    """A worker that never ends an answer by itself, at a set duration of each step."""
    script = script_file(mean_output_tokens=0, step_seconds=step_seconds, token_ids=LETTERS)
    async with running_stack(golden_model, script=script, **options) as stack:
        yield stack


@contextlib.asynccontextmanager
async def busy_with(stack, count, max_tokens):
    """So many other requests in their decode, cancelled on leaving."""
    others = [
        asyncio.create_task(stack.client.chat(f"other {i}", max_tokens=max_tokens))
        for i in range(count)
    ]
    scheduler = stack.workers[0].scheduler
    try:
        await until(lambda: scheduler.num_running == min(count, scheduler.max_num_seqs))
        yield
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await until(lambda: set(stack.held().values()) == {0})


async def verdict_of_question(stack, turns=(("user", "q"),), **options):
    seen = await observe(stack.client, list(turns), **options)
    story = story_of(seen)
    assert story.times.wall_us == seen.wall_us
    return story.verdict


async def test_waiting_behind_others_is_too_few_replicas(golden_model, script_file):
    one = {"max_num_seqs": 1, "step_seconds": 0.02}
    async with scripted(golden_model, script_file, **one) as stack, busy_with(stack, 3, 20):
        verdict = await verdict_of_question(stack, max_tokens=3)
    assert verdict.cause is Cause.TOO_FEW_REPLICAS


async def test_a_long_prompt_is_named(golden_model, script_file):
    chunks = {"max_num_batched_tokens": 64, "step_seconds": 0.06}
    async with scripted(golden_model, script_file, **chunks) as stack:
        verdict = await verdict_of_question(stack, [("user", "x" * 700)], max_tokens=3)
    assert verdict.cause is Cause.LONG_PROMPT


async def test_earlier_turns_computed_again_are_named(golden_model, script_file):
    turns = [("user", "x" * 700), ("assistant", "y"), ("user", "and?")]
    chunks = {"max_num_batched_tokens": 64, "step_seconds": 0.06}
    async with scripted(golden_model, script_file, **chunks) as stack:
        again = await verdict_of_question(stack, turns, max_tokens=3)
        cached = await verdict_of_question(stack, turns, max_tokens=3)
    assert again.cause is Cause.PREFIX_AGAIN
    assert cached.cause is Cause.NOTHING


async def test_a_crowded_batch_is_named(golden_model, script_file):
    slow = {"step_seconds": 0.08}
    async with scripted(golden_model, script_file, **slow) as stack, busy_with(stack, 12, 400):
        verdict = await verdict_of_question(stack, max_tokens=8)
    assert verdict.cause is Cause.CROWDED_BATCH


async def test_a_large_kv_cache_is_named(golden_model, script_file):
    """One prefill step within half a second; then slow steps that read over 2,048 tokens each."""
    whole = {"max_num_batched_tokens": 4096, "step_seconds": 0.09}
    async with scripted(golden_model, script_file, **whole) as stack:
        verdict = await verdict_of_question(stack, [("user", "x" * 2200)], max_tokens=8)
    assert verdict.cause is Cause.LARGE_KV_CACHE


async def test_a_preemption_is_named(golden_model, script_file):
    small = {"num_blocks": 8, "block_size": 16, "step_seconds": 0.01}
    async with scripted(golden_model, script_file, **small) as stack, busy_with(stack, 1, 100):
        verdict = await verdict_of_question(stack, max_tokens=70)
    assert verdict.cause is Cause.PREEMPTION


def test_the_golden_text_is_what_the_golden_events_say():
    """Guards the file itself: the figures of the facts stand in it."""
    text = GOLDEN.read_text()
    facts = json.loads((GOLDEN.parent / "golden_request.json").read_text())
    assert facts[0]["message_start"]["usage"]["input_tokens"] == 16
    for figure in ("16 tokens", "0-15", "[16, 3584]", "0.70", "0.30", "KV 16", "19 tokens"):
        assert figure in text
