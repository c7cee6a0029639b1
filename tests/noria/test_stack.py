"""What `noria up` runs, and what it checks before."""

import dataclasses
import importlib.util
import os
import socket
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from noria.cli import stack, up
from noria.cli.main import main
from noria.cli.options import worker_flags
from noria.cli.served_models import ServedModel
from noria.cli.stack import StackPlan, backend_specs, router_spec
from noria.service.api_key import key_sha256

PLAN = StackPlan((ServedModel(Path("/m/x.gguf"), "x"),), key_sha256("secret"), 50051)


def flag(spec, name):
    return [spec.argv[i + 1] for i, part in enumerate(spec.argv) if part == name]


def test_tokenizer_and_workers_serve_the_same_model_on_free_loopback_ports():
    plan = StackPlan(PLAN.models, PLAN.key_sha256, 50051, 3, ("--max-num-seqs", "4"))
    specs = backend_specs(plan)
    assert [spec.name for spec in specs] == ["tokenizer", "worker 1", "worker 2", "worker 3"]
    for spec in specs:
        assert flag(spec, "--model") == ["/m/x.gguf"]
        assert flag(spec, "--served-model-name") == ["x"]
        assert flag(spec, "--listen") == ["127.0.0.1:0"]
    assert [flag(spec, "--max-num-seqs") for spec in specs] == [[], ["4"], ["4"], ["4"]]


def test_each_of_several_models_has_a_tokenizer_and_workers_of_its_own():
    models = (ServedModel(Path("/m/x"), "x", ("fast", "small")), ServedModel(Path("/m/y"), "y"))
    ports = tuple(range(1, 8))
    plan = StackPlan(models, PLAN.key_sha256, 1, workers=2, metrics_ports=ports)
    specs = backend_specs(plan)
    assert [spec.name for spec in specs] == [
        *("tokenizer x", "tokenizer y"),
        *("worker x 1", "worker x 2", "worker y 1", "worker y 2"),
    ]
    named = [flag(spec, "--model") + flag(spec, "--served-model-name") for spec in specs]
    x, y = ["/m/x", "x"], ["/m/y", "y"]
    assert named == [x, y, x, x, y, y]
    aliases = [flag(spec, "--alias") for spec in specs]
    assert aliases == [[], [], ["fast", "small"], ["fast", "small"], [], []]
    router = router_spec(plan, ["t:1", "t:2"], ["w:1"])
    assert flag(router, "--tokenizer") == ["t:1", "t:2"]
    served = [flag(spec, "--metrics-listen") for spec in (router, *specs)]
    assert served == [[f"127.0.0.1:{port}"] for port in ports]


def test_the_router_is_told_the_addresses_and_the_hash_but_no_service_the_key(monkeypatch):
    monkeypatch.setenv("NORIA_API_KEY", "secret")
    router = router_spec(PLAN, ["127.0.0.1:7"], ["127.0.0.1:8", "127.0.0.1:9"])
    assert flag(router, "--listen") == ["127.0.0.1:50051"]
    assert flag(router, "--tokenizer") == ["127.0.0.1:7"]
    assert flag(router, "--worker") == ["127.0.0.1:8", "127.0.0.1:9"]
    assert router.environment["NORIA_ROUTER_API_KEY_SHA256"] == key_sha256("secret")
    for spec in (router, *backend_specs(PLAN)):
        inherited = {**os.environ, **spec.environment}
        assert "secret" not in inherited.values()
        assert "secret" not in spec.argv


def test_a_folder_named_like_a_service_is_not_run(tmp_path):
    spec = stack._service("x", "worker")
    assert spec.argv[:3] == (sys.executable, "-P", "-m")
    assert Path(spec.environment["PYTHONPATH"].split(os.pathsep)[0], "noria").is_dir()


def test_missing_packages_are_one_plain_line(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else real(name)
    )
    with pytest.raises(click.ClickException) as caught:
        up.prepare(0, ["x"], 1, {}, "key")
    assert caught.value.message.count("\n") == 0
    assert 'pip install "noria[all]"' in caught.value.message
    assert "torch" in caught.value.message


def test_flags_are_passed_on_as_they_were_given():
    given = {"max_num_seqs": 4, "dtype": None, "script": "/s.json"}
    assert worker_flags(given) == ("--max-num-seqs", "4", "--script", "/s.json")


@pytest.mark.parametrize(
    ("workers", "given", "expected"),
    [(1, None, []), (2, None, ["4"]), (2, 3, ["3"]), (64, None, ["1"])],
)
def test_several_workers_share_the_cores(monkeypatch, tmp_path, workers, given, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    model = tmp_path / "m.gguf"
    model.touch()
    plan = up.prepare(0, [str(model)], workers, {"cpu_threads": given}, "key")
    assert flag(backend_specs(plan)[1], "--cpu-threads") == expected


def test_workers_of_all_models_share_the_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    models = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for model in models:
        model.touch()
    plan = up.prepare(0, list(map(str, models)), 2, {}, "key")
    assert [model.name for model in plan.models] == ["a", "b"]
    worker = backend_specs(plan)[-1]
    assert (flag(worker, "--cpu-threads"), flag(worker, "--local-workers")) == (["2"], ["4"])


def test_names_that_cannot_be_served_are_refused_before_anything_starts(tmp_path):
    model = tmp_path / "m.gguf"
    model.touch()
    result = CliRunner().invoke(
        main,
        ["up", "--port", "0", "--model", str(model), "--model", str(model)],
        env={"NORIA_CONFIG_DIR": str(tmp_path)},
    )
    assert result.exit_code == 2
    assert "two models are named 'm'; give --served-model-name for each" in result.stderr


def test_fetch_prints_where_the_model_lies_or_why_it_cannot_be_had(tmp_path):
    model = tmp_path / "m.gguf"
    model.touch()
    found = CliRunner().invoke(main, ["fetch", str(model)])
    assert (found.exit_code, found.stdout) == (0, f"{model}\n")
    absent = CliRunner().invoke(main, ["fetch", str(tmp_path / "none")])
    assert absent.exit_code == 1
    assert absent.stderr.startswith("Error: model ")


def test_a_keys_file_takes_the_place_of_the_hash():
    plan = dataclasses.replace(PLAN, keys_file=Path("/c/keys.toml"))
    router = router_spec(plan, ["127.0.0.1:7"], ["127.0.0.1:8"])
    assert flag(router, "--keys-file") == ["/c/keys.toml"]
    assert "NORIA_ROUTER_API_KEY_SHA256" not in router.environment


def test_each_service_serves_its_metrics_on_a_port_of_its_own_or_none_does():
    plan = dataclasses.replace(PLAN, workers=2, metrics_ports=(1, 2, 3, 4))
    specs = [router_spec(plan, ["t:1"], ["w:1"]), *backend_specs(plan)]
    served = [flag(spec, "--metrics-listen") for spec in specs]
    assert served == [[f"127.0.0.1:{port}"] for port in (1, 2, 3, 4)]
    assert flag(router_spec(PLAN, ["t:1"], ["w:1"]), "--metrics-listen") == []


def test_taken_ports_are_passed_over_and_too_few_are_none(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert port not in up.free_ports(port, 2)
        assert len(up.free_ports(port, 2)) == 2
        monkeypatch.setattr(up, "_METRICS_PORTS_TRIED", 1)
        assert up.free_ports(port, 1) == ()
    assert up.free_ports(0, 3) == (0, 0, 0)
    assert "--metrics-port" in up._metrics({})
