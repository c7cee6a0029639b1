"""The `noria` command with the real services: what a person sees, and that nothing stays."""

import re
import subprocess
import sys
import urllib.request

import pytest

from tests.integration.test_golden_request import PROMPT, QUESTION, SCRIPT, SYSTEM
from tests.support.command import ends, running

NORIA = (sys.executable, "-m", "noria.cli")
# What transformers gives for the same weights in fp32: generate(do_sample=False) on the model's
# own chat template. The two best logits are nowhere closer than 0.007: torch in fp32 gives the
# same, bf16 may turn off where they are close, near the end.
TOMATO = (
    "A tomato is indeed a fruit. It is a member of the Vegetableaceae family, which also includes "
    'other fruits like grapes, cucumbers, and peppers. However, the term "fruit" is often used '
    "to refer to a specific type of edible fruit, specifically the edible part of the tomato, "
    "which is the tomato itself."
)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NORIA_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.delenv("NORIA_API_KEY", raising=False)


def chat(address, *arguments):
    command = (*NORIA, "chat", "--address", address, *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_up_and_chat_talk_to_real_services_with_the_key_that_up_made(
    environment, golden_model, script_file
):
    script = str(script_file([SCRIPT]))
    up = (
        "up",
        "--port",
        "0",
        "--metrics-port",
        "0",
        "--model",
        str(golden_model),
        "--script",
        script,
        "--verbose",
    )
    with running(*NORIA, *up) as command:
        address = command.until(r"serving: golden on (\S+)").group(1)
        scraped = command.until(r"metrics: (\S+) \(router\), \S+ \(tokenizer\), \S+ \(worker\)")
        with urllib.request.urlopen(scraped.group(1), timeout=10) as metrics:
            assert b'noria_workers{state="usable"} 1.0' in metrics.read()
        asked = (QUESTION, "--system", SYSTEM, "--temperature", "0")
        answered = chat(address, *asked)
        assert (answered.stdout, answered.stderr) == ("네, 과일입니다.\n", "")
        refused = chat(address, *asked, "--max-tokens", "1000000")
        assert refused.returncode == 1
        assert re.search(r"CONTEXT_LENGTH_EXCEEDED.*1000000.*\(request \S+\)\n", refused.stderr)
        children = command.child_handles()
        command.process.terminate()
        assert command.exit_code() == 0
    assert len(children) == 3
    assert all(ends(child) for child in children)
    assert str(PROMPT[1]) not in "".join(command.seen)
    assert QUESTION not in "".join(command.seen)


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "certain"),
    [(("--attention-backend", "torch"), TOMATO), ((), TOMATO[: TOMATO.index("However")])],
    ids=["fp32", "as it is"],
)
def test_demo_gives_the_greedy_answer_in_deltas_and_leaves_nothing(
    environment, demo_model_path, monkeypatch, flags, certain
):
    monkeypatch.setenv("NORIA_CACHE_DIR", str(demo_model_path.parent.parent))
    with running(*NORIA, "demo", *flags) as command:
        command.until("> Is a tomato")
        children = command.child_handles()
        assert command.exit_code() == 0
    answer = command.seen[-1].removeprefix("answer: ")
    assert answer in command.seen
    assert answer.startswith(certain)
    assert answer == certain or not flags
    deltas = re.search(r"\d\d tokens in (\d+) deltas", "\n".join(command.seen))
    assert int(deltas.group(1)) >= 5
    assert len(children) == 3
    assert all(ends(child) for child in children)
