"""Kernels are built once, whole, for what the CPU has; without a compiler the reason is told."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.native import kernels
from worker.native import prebuild
from worker.native.kernels import load_kernels
from worker.native.library import (
    BuildError,
    Compiler,
    KernelCache,
    find_compiler,
    kernels_dir,
    writable_cache,
)
from worker.native.variants import CPU, VARIANTS, UnsupportedCPUError, choose_variant, this_cpu

AVX2 = VARIANTS[-1]
EVERYTHING = frozenset(VARIANTS[0].features)
# A library that loads and answers, made in no time.
STUB = """#!{python}
import subprocess, sys
if "--version" in sys.argv:
    print("stub 1.0")
else:
    out = sys.argv[sys.argv.index("-o") + 1]
    with open({log!r}, "a") as log:
        log.write(out + "\\n")
    {body}
"""


@pytest.fixture
def stub_compiler(tmp_path):
    """CXX for a compiler that notes its calls in `log` and does `body` with `out`."""

    def make(body):
        path, log = tmp_path / "stub-c++", tmp_path / "log"
        path.write_text(STUB.format(python=sys.executable, log=str(log), body=body))
        path.chmod(0o755)
        return {"CXX": str(path), "PATH": os.environ["PATH"]}, log

    return make


@pytest.fixture
def copying_compiler(stub_compiler):
    """Its builds are copies of a real one, written in two parts with a pause between."""
    kernels("avx2", 1)
    real = KernelCache(kernels_dir()).find(AVX2, find_compiler(os.environ))
    return stub_compiler(
        f"data = open({str(real)!r}, 'rb').read(); f = open(out, 'wb'); f.write(data[:999]); "
        "f.flush(); import time; time.sleep(0.1); f.write(data[999:]); f.close()"
    )


@pytest.mark.parametrize(
    ("vendor", "features", "chosen"),
    [
        ("AuthenticAMD", EVERYTHING, "avx512_bf16"),
        ("GenuineIntel", EVERYTHING, "avx512"),
        ("AuthenticAMD", EVERYTHING - {"avx512_bf16"}, "avx512"),
        ("GenuineIntel", EVERYTHING - {"avx512f", "avx512_bf16"}, "avx2"),
    ],
)
def test_the_fastest_variant_that_the_cpu_has_is_chosen(vendor, features, chosen):
    assert choose_variant("auto", CPU(vendor, features)).name == chosen


def test_a_variant_by_name_and_what_the_cpu_lacks():
    assert choose_variant("avx2", CPU("", EVERYTHING)) is AVX2
    with pytest.raises(UnsupportedCPUError, match="has no avx512_bf16"):
        choose_variant("avx512_bf16", CPU("", EVERYTHING - {"avx512_bf16"}))
    with pytest.raises(UnsupportedCPUError, match="has no avx2, fma"):
        choose_variant("auto", CPU())


def test_the_cpu_is_read_from_its_description(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("vendor_id\t: AuthenticAMD\nmodel name\t: x\nflags\t\t: fpu fma avx2\n\n")
    assert this_cpu(path) == CPU("AuthenticAMD", frozenset(("fpu", "fma", "avx2")))
    assert this_cpu(tmp_path / "none") == CPU()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "/nowhere/c++"}, r"no C\+\+ compiler found \(looked for CXX = /nowhere/c\+\+\)"),
        ({"PATH": "/nowhere"}, r"looked for g\+\+, c\+\+, clang\+\+"),
    ],
)
def test_without_a_compiler_the_reason_says_what_was_looked_for(tmp_path, environment, reason):
    with pytest.raises(BuildError, match=reason):
        load_kernels("avx2", 1, folder=tmp_path, environment=environment)


def test_a_compiler_that_fails_is_told_with_its_first_error(tmp_path, stub_compiler):
    environment, _ = stub_compiler("sys.exit('x.cpp:1: error: no such thing')")
    with pytest.raises(BuildError, match=r"failed: x.cpp:1: error: no such thing"):
        load_kernels("avx2", 1, folder=tmp_path / "cache", environment=environment)
    assert not list((tmp_path / "cache").iterdir())


def test_a_library_that_does_not_load_is_no_library(tmp_path, stub_compiler):
    environment, _ = stub_compiler("open(out, 'w').write('not a library')")
    with pytest.raises(BuildError, match="cannot be loaded"):
        load_kernels("avx2", 1, folder=tmp_path / "cache", environment=environment)


def test_a_build_is_used_again(tmp_path, copying_compiler):
    environment, log = copying_compiler
    for _ in range(2):
        load_kernels("avx2", 1, folder=tmp_path / "cache", environment=environment)
    assert len(log.read_text().splitlines()) == 1


def test_a_broken_build_is_repaired(tmp_path, copying_compiler):
    environment, _ = copying_compiler
    cache, builds = KernelCache(tmp_path / "cache"), []
    path = cache._path(AVX2, find_compiler(environment))
    path.parent.mkdir()
    path.write_bytes(b"cut off")
    folder = path.parent
    load_kernels("avx2", 1, lambda: builds.append(1), folder=folder, environment=environment)
    assert builds == [1]


def test_what_any_compiler_built_serves_a_computer_without_one(tmp_path, copying_compiler):
    environment, _ = copying_compiler
    load_kernels("avx2", 1, folder=tmp_path / "cache", environment=environment)
    nothing = {"PATH": "/nowhere"}
    assert load_kernels("avx2", 1, folder=tmp_path / "cache", environment=nothing).threads == 1
    with pytest.raises(BuildError, match="no C"):
        load_kernels("avx2", 1, folder=tmp_path / "other", environment=nothing)


def test_what_was_installed_needs_no_compiler_and_nothing_to_write(
    tmp_path, copying_compiler, monkeypatch, capsys
):
    """Every variant is built; each is found where neither a compiler nor a cache is."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(os, "environ", copying_compiler[0])
    assert prebuild.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(VARIANTS)
    nowhere = {"PATH": "/nowhere"}
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "kernels"
    assert load_kernels("avx2", 1, folder=folder, environment=nowhere).threads == 1
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    with pytest.raises(BuildError, match="no C"):
        load_kernels("avx2", 1, folder=folder, environment=nowhere)


def test_without_a_compiler_nothing_is_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(os, "environ", {"PATH": "/nowhere"})
    assert prebuild.main() == 1
    assert "no C++ compiler" in capsys.readouterr().err


def test_sources_options_and_compiler_name_the_build(tmp_path):
    cache, compiler = KernelCache(tmp_path), Compiler(("/usr/bin/c++",), "1.0")
    names = {
        cache._path(variant, chosen)
        for variant in (AVX2, replace(AVX2, options=("-mavx2",)), VARIANTS[0])
        for chosen in (compiler, Compiler(("/usr/bin/c++",), "1.1"), Compiler(("/c++",), "1.0"))
    }
    assert len(names) == 9


def test_where_nothing_can_be_written_the_build_is_a_passing_one(tmp_path):
    (tmp_path / "file").write_text("")
    with writable_cache(tmp_path / "file" / "kernels") as cache:
        folder = cache._folder
        assert folder.is_dir()
    assert not folder.exists()


BUILD = """
import ctypes, os, sys
from pathlib import Path
from worker.native.library import KernelCache, find_compiler
from worker.native.variants import VARIANTS
path = KernelCache(Path(sys.argv[1])).build(VARIANTS[-1], find_compiler(os.environ))
ctypes.CDLL(str(path))
"""


def test_processes_that_build_at_once_all_load_a_whole_library(tmp_path, copying_compiler):
    environment, log = copying_compiler
    command = [sys.executable, "-c", BUILD, str(tmp_path / "cache")]
    started = [subprocess.Popen(command, env={**os.environ, **environment}) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == 3
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


def test_the_folder_is_the_cache_s():
    assert str(kernels_dir({"NORIA_CACHE_DIR": "/c"})) == "/c/kernels"
    assert str(kernels_dir({"XDG_CACHE_HOME": "/x"})) == "/x/noria/kernels"
