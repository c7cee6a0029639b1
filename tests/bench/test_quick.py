"""Two copies are compared by the ratio of each round, and a loss is said."""

import dataclasses
import subprocess

import pytest
from rich.console import Console

from bench.load.outcome import SERVED, Outcome
from bench.load.runner import Run
from bench.load.summary import Objective, summarize
from bench.quick import FIGURES, checked_out, comparison
from bench.served import NotServedError, serving


def summary(tokens_per_s, ttft_ms):
    times = [ttft_ms / 1e3 + index / tokens_per_s for index in range(10)]
    outcome = Outcome(0, 0.0, message_times=times, output_tokens=10, ended=SERVED)
    run = Run(outcomes=[outcome], ended_at=10 / tokens_per_s)
    return summarize(run, Objective())


def text(results):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison(results, "abc before"))
    return console.export_text()


def test_the_gain_is_the_median_of_the_rounds_ratios():
    pairs = [(summary(100, 50), summary(new, 50)) for new in (90, 120, 200)]
    lines = [line for line in text({1: pairs}).splitlines() if "output tokens/s" in line]
    words = lines[0].replace("│", " ").split()[3:]
    assert words == ["100.0", "120.0", "1.20x", "0.90", "to", "2.00"]
    assert "loss" not in lines[0]


def test_a_loss_beyond_the_tolerance_is_said_for_either_kind_of_figure():
    slower = text({32: [(summary(100, 50), summary(96, 60))]})
    assert slower.count("a loss") == 3
    alike = text({32: [(summary(100, 50), summary(98, 51))]})
    assert "a loss" not in alike


def test_every_figure_exists_in_a_summary():
    whole = summary(100, 50)
    assert [figure.value(whole) for figure in FIGURES] == pytest.approx([100, 50, 10])
    assert dataclasses.asdict(whole) == whole.to_json()


def test_a_revision_is_checked_out_beside_the_working_copy_and_leaves_nothing(tmp_path):
    def git(*arguments):
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(
            ["git", "-C", tmp_path, *author, *arguments], check=True, capture_output=True
        )

    git("init")
    (tmp_path / "file").write_text("old")
    git("add", "file")
    git("commit", "-m", "old")
    (tmp_path / "file").write_text("new")
    with checked_out(tmp_path, "HEAD") as folder:
        assert (folder / "file").read_text() == "old"
    assert not folder.exists()
    listed = subprocess.run(
        ["git", "-C", tmp_path, "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1


def test_services_that_cannot_start_say_why(pytestconfig):
    with (
        pytest.raises(NotServedError, match="no-such-model"),
        serving(pytestconfig.rootpath, "--model", "/no-such-model.gguf"),
    ):
        pass
