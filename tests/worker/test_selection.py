"""A GPU's backend is the first that can compute the model, or the one asked for, with reasons."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import flash_contracts
from worker.attention.selection import GPU_BACKENDS, Demand, Machine, choose
from worker.attention.triton_tiles import HEAD_DIMS

HOPPER, AMPERE, VOLTA = (9, 0), (8, 0), (7, 0)
CUDA = torch.device("cuda", 0)
FLASH_3 = {"flash_attn_interface": flash_contracts}
FLASH_2 = {"flash_attn": flash_contracts}
VARLEN = {"torch.nn.attention.varlen": flash_contracts}
TRITON = {
    "worker.attention.triton_backend": SimpleNamespace(
        INTERPRETED=False, BLOCK_MULTIPLE=16,
        limits=lambda head_dim, dtype: [] if head_dim != 72 else ["head_dim is 72"],
        TritonBackend=lambda device: SimpleNamespace(name="triton", device=device),
    )
}  # fmt: skip
EVERYTHING = {**FLASH_3, **TRITON, **FLASH_2, **VARLEN}
VERSIONS = {"triton": "3.6.0", "flash-attn": "2.8.3.post2"}


def machine(capability=HOPPER, modules=EVERYTHING, missing="", **versions):
    def module(name):
        if name not in modules:
            raise ImportError(name)
        return modules[name]

    found = {**VERSIONS, **{name.replace("_", "-"): value for name, value in versions.items()}}
    device = torch.device("cpu") if capability is None else CUDA
    return Machine(device, capability, module, found.get, lambda: missing)


def demand(dtype=torch.bfloat16, head_dim=128, block_size=None):
    return Demand(dtype, head_dim, 32, 8, block_size)


def chosen(on, asked="auto", **wanted):
    choice = choose(asked, demand(**wanted), on)
    return choice.backend.name, " | ".join(choice.passed_over)


@pytest.mark.parametrize(
    ("on", "name", "reason"),
    [
        (machine(), "flash_attn_3", ""),
        (machine(AMPERE), "triton", "flash_attn_3: compute capability 8.0; it needs 9.0"),
        (machine(modules=TRITON), "triton", "no module flash_attn_interface or flash_attn_3"),
        (machine(AMPERE, missing="no C compiler"), "flash_attn_2", "triton: no C compiler"),
        (machine(AMPERE, triton=None), "flash_attn_2", "triton: triton is not installed"),
        (machine(AMPERE, triton="3.5.1"), "flash_attn_2", "triton 3.5.1 is installed; it needs"),
        (
            machine(AMPERE, triton=None, flash_attn="2.8.4"),
            "torch_varlen",
            "flash_attn_2: flash-attn 2.8.4 is installed; it needs 2.8.3 or later, below 2.8.4",
        ),
        (machine(AMPERE, triton=None, flash_attn="2.7.4"), "torch_varlen", "2.7.4 is installed"),
        (
            machine(AMPERE, VARLEN, triton=None),
            "torch_varlen",
            "flash_attn_2: flash_attn cannot be imported",
        ),
    ],
)
def test_the_first_that_can_is_taken_and_the_others_say_why_not(on, name, reason):
    taken, passed_over = chosen(on)
    assert taken == name
    assert reason in passed_over


@pytest.mark.parametrize(
    ("wanted", "name", "reason"),
    [
        ({"dtype": torch.float32}, "triton", "flash_attn_3: the cache's dtype is torch.float32"),
        ({"head_dim": 72}, "flash_attn_3", ""),
        ({"block_size": 16}, "flash_attn_3", ""),
    ],
)
def test_the_model_decides_too(wanted, name, reason):
    taken, passed_over = chosen(machine(), **wanted)
    assert taken == name
    assert reason in passed_over


@pytest.mark.parametrize("asked", ["flash_attn_3", "triton", "flash_attn_2", "torch_varlen"])
def test_one_can_be_asked_for(asked):
    assert chosen(machine(), asked) == (asked, "")


@pytest.mark.parametrize(
    ("asked", "on", "wanted", "reason"),
    [
        ("flash_attn_3", machine(AMPERE), {}, "compute capability 8.0; it needs 9.0"),
        ("flash_attn_3", machine(None), {}, "the device is no CUDA device"),
        ("flash_attn_2", machine(), {"block_size": 16}, "block_size 16 is no multiple of 256"),
        ("flash_attn_2", machine(VOLTA), {}, "compute capability 7.0; it needs 8.0"),
        (
            "torch_varlen",
            machine(),
            {"head_dim": 264},
            "head_dim is 264; a multiple of 8 up to 256",
        ),
        ("triton", machine(), {"block_size": 24}, "block_size 24 is no multiple of 16"),
        ("triton", machine(), {"head_dim": 72}, "head_dim is 72"),
        ("triton", machine(VOLTA), {}, "compute capability 7.0; it needs 8.0"),
        ("triton", machine(None), {}, "no CUDA device, and the kernels are not interpreted"),
        ("paper", machine(), {}, "it is not known here"),
    ],
)
def test_one_that_was_asked_for_and_cannot_run_is_refused_with_the_reason(
    asked, on, wanted, reason
):
    with pytest.raises(ValueError, match=f"attention_backend {asked} cannot be used: .*{reason}"):
        choose(asked, demand(**wanted), on)


def test_an_old_torch_without_block_tables_is_told():
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        raise AssertionError

    old = {"torch.nn.attention.varlen": SimpleNamespace(varlen_attn=varlen_attn)}
    with pytest.raises(ValueError, match="no varlen_attn with block_table, seqused_k, num_splits"):
        choose("torch_varlen", demand(), machine(modules=old))


def test_a_module_that_was_built_for_another_torch_is_passed_over():
    def module(name):
        if "flash_attn" in name:
            raise OSError("undefined symbol")
        return EVERYTHING[name]

    on = Machine(CUDA, HOPPER, module, VERSIONS.get, str)
    assert chosen(on)[0] == "triton"


def test_without_a_compiler_or_headers_triton_could_launch_nothing(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs a C compiler" in Machine(CUDA, HOPPER).missing()
    monkeypatch.setenv("CC", "/usr/bin/cc")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert f"there is no {tmp_path}/Python.h" in Machine(CUDA, HOPPER).missing()
    (tmp_path / "Python.h").touch()
    assert Machine(CUDA, HOPPER).missing() == ""


@pytest.mark.soak
def test_this_torch_has_the_varlen_attention_that_is_called():
    """The contract's function has the parameters of the real one."""
    from inspect import signature

    real = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    known = signature(real).parameters
    if "block_table" not in known:
        pytest.skip(f"torch {torch.__version__} has no block tables")
    assert list(signature(flash_contracts.varlen_attn).parameters) == list(known)


def test_backends_are_named_in_their_order():
    assert GPU_BACKENDS == (
        "flash_attn_3", "triton", "flash_attn_2", "torch_varlen", "torch_padded", "torch",
    )  # fmt: skip


def test_the_docs_name_every_backend_and_what_triton_takes():
    root = Path(__file__).resolve().parents[2]
    readme, page = (root / name for name in ("README.md", "docs/gpu.md"))
    for name in GPU_BACKENDS[:-1]:
        assert f"`{name}`" in readme.read_text()
        assert f"| `{name}` |" in page.read_text()
    assert ", ".join(map(str, HEAD_DIMS)) in page.read_text()
