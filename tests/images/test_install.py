"""Each role installs into an empty folder, and serves from there without writing to it."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path("images/install.sh").resolve()
NOBODY = 65534
# Megabytes that an installation may take; torch's CPU build is most of the worker's.
SIZES = {"router": 110, "tokenizer": 120, "worker-cpu": 1400}


def install(role, prefix):
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(
        [SCRIPT, role, str(prefix)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("arguments", [[], ["router"], ["gateway", "x"], ["router", "x", "y"]])
def test_a_wrong_call_is_answered_with_how_to_call_it(arguments, tmp_path):
    run = subprocess.run(
        [SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "images/install.sh ROLE PREFIX" in run.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("")
    run = install("router", tmp_path)
    assert (run.returncode, run.stderr) == (1, f"install.sh: {tmp_path} is not empty\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_dockerfile_is_clean():
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), "Dockerfile"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("", 0)


def flags(role, model):
    """What a service needs to come up; nobody else is there."""
    listen = ["--listen", "127.0.0.1:0"]
    if role == "router":
        peers = ["--worker", "127.0.0.1:1", "--tokenizer", "127.0.0.1:1"]
        return [*listen, *peers, "--api-key-sha256", "0" * 64]
    return [*listen, "--model", str(model)]


def events_until(process, wanted):
    """The service's events up to the wanted one."""
    for line in process.stderr:
        event = json.loads(line)
        yield event
        if event["event"] == wanted:
            return


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("role", SIZES)
def test_a_role_serves_from_its_folder_without_writing_to_it(role, demo_model_path, tmp_path):
    """Its size is bounded, router and tokenizer have no torch, SIGTERM ends it with 0."""
    prefix, nowhere = tmp_path / "noria", tmp_path / "nowhere"
    run = install(role, prefix)
    assert run.returncode == 0, run.stderr
    paths = list(prefix.rglob("*"))
    size = sum(path.lstat().st_size for path in paths) / 1e6
    sys.stdout.write(f"{role}: {size:.0f} MB\n")
    assert size < SIZES[role]
    assert any(path.name == "torch" for path in paths) == role.startswith("worker")
    before = {path: path.lstat().st_mtime_ns for path in paths}
    with running(role, prefix, nowhere, demo_model_path) as process:
        wanted = "listening" if role == "router" else "ready"
        seen = {event["event"]: event for event in events_until(process, wanted)}
        assert wanted in seen
        if role == "worker-cpu":
            assert seen["backend"]["attention_backend"] == "cpu_native"
        process.send_signal(signal.SIGTERM)
        assert [json.loads(line)["event"] for line in process.stderr][-1] == "stopped"
        assert process.wait(30) == 0
    assert {path: path.lstat().st_mtime_ns for path in prefix.rglob("*")} == before
    assert not nowhere.exists()


def running(role, prefix, nowhere, model):
    """The service with no compiler and no home; as nobody where the interpreter lets nobody in."""
    open_to_all = [prefix, *prefix.parents]
    interpreter = (prefix / "bin" / "python").resolve()
    as_nobody = os.geteuid() == 0 and all(map(lets_all_in, interpreter.parents))
    if as_nobody:
        for folder in open_to_all:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    return subprocess.Popen(
        [prefix / "bin" / "noria-service", *flags(role, model)],
        env={"PATH": "/nowhere", "HOME": str(nowhere), "NORIA_CACHE_DIR": str(nowhere)},
        user=NOBODY if as_nobody else None,
        cwd="/",
        stderr=subprocess.PIPE,
        text=True,
    )


def lets_all_in(folder):
    return bool(folder.stat().st_mode & stat.S_IXOTH)
