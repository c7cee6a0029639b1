"""A batch against real services: killed and begun again, it does every line, none twice."""

import asyncio
import json
import signal
import sys

import pytest

from tests.support.command import running
from tests.support.stack import API_KEY, running_stack
from tests.support.waiting import until

NORIA = (sys.executable, "-m", "noria.cli")


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("count", [120, pytest.param(1000, marks=pytest.mark.soak)])
async def test_killed_twice_it_ends_with_each_line_once(
    golden_model, script_file, tmp_path, monkeypatch, count
):
    monkeypatch.setenv("NORIA_API_KEY", API_KEY)
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests = [
        {"messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 3}
        if number % 2
        else {"prompt": f"once upon {number}", "max_tokens": 3, "id": f"n{number}"}
        for number in range(count)
    ]
    requests[5] = {"prompt": "x", "max_tokens": 10**6}
    source.write_text("\n".join(map(json.dumps, requests)))
    script = script_file(mean_output_tokens=20, step_seconds=0.002, token_ids=[32, 127])
    async with running_stack(golden_model, script=script) as stack:
        command = (*NORIA, "batch", str(source), str(results), "--concurrency", "8")
        command += ("--address", stack.addresses[0])
        for share in (0.25, 0.6):
            with running(*command) as batch:
                await until(lambda n=share * count: len(lines_of(results)) >= n, 60)
                batch.process.send_signal(signal.SIGKILL)
        with running(*command, "--output-price", "2") as batch:
            assert await asyncio.to_thread(batch.exit_code) == 0
        await until(lambda: not any(stack.held().values()))
    told = [json.loads(row) for row in lines_of(results)]
    assert sorted(row["line"] for row in told) == list(range(1, count + 1))
    assert {row["id"] for row in told if row["line"] <= 3} == {"n0", "2", "n2"}
    (failed,) = [row for row in told if "error" in row]
    assert (failed["line"], failed["error"]["reason"]) == (6, "CONTEXT_LENGTH_EXCEEDED")
    assert all(row["usage"]["output_tokens"] for row in told if "text" in row)
    assert f"{count}/{count} lines" in batch.seen[-1]
    assert "cost" in batch.seen[-1]
