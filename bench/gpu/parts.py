"""The parts of `make test-gpu`, in their order, but for the engine as a whole."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.gpu import conformance
from bench.gpu.conformance import CPU, Subject, moved, planned
from bench.gpu.rows import OK, SKIPPED, Row, Unfit, attempt
from bench.gpu.setting import (
    Setting,
    present,
    runnable,
    seconds_of,
)
from worker.attention.base import AttentionBackend, KVCacheSpec
from worker.attention.selection import Machine

Part = Callable[[Setting], Iterator[Row]]
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-4}
_REPEATS = 20


def found(setting: Setting) -> Iterator[Row]:
    """What there is: the device, the libraries, each backend with the reason against it."""
    yield Row("found", f"torch {torch.__version__}", note=_device(setting))
    yield Row("found", f"triton {Machine.of(setting.device).installed('triton')}")
    for backend, reason in present(setting).items():
        yield Row("found", backend, SKIPPED if reason else OK, note=reason)


def _device(setting: Setting) -> str:
    if not setting.is_cuda:
        return "a CPU"
    about = torch.cuda.get_device_properties(setting.device)
    return (
        f"{about.name}, compute capability {about.major}.{about.minor}, "
        f"{about.multi_processor_count} multiprocessors, {about.total_memory >> 30} GiB, "
        f"CUDA {torch.version.cuda}"
    )


def ceilings(setting: Setting) -> Iterator[Row]:
    """A large copy and a large product of matrices."""
    size, side = (1 << 20, 64) if setting.tiny else (4 << 30, 8192)

    def copy() -> Row:
        source = torch.zeros(size, dtype=torch.uint8, device=setting.device)
        target = torch.empty_like(source)
        return Row(
            "", "", seconds=seconds_of(setting, lambda: target.copy_(source), 10), moved=2 * size
        )

    def multiply() -> Row:
        left, right = torch.randn(2, side, side, device=setting.device).to(setting.dtype)
        out = torch.empty_like(left)
        seconds = seconds_of(setting, lambda: torch.mm(left, right, out=out), 10)
        return Row("", "", seconds=seconds, computed=2 * side**3)

    yield attempt("ceilings", f"copy of {size >> 20} MiB", copy)
    yield attempt("ceilings", f"{setting.dtype} product of {side} x {side}", multiply)


def _subject(
    setting: Setting, name: str, make: Callable[[], AttentionBackend], dtype: torch.dtype
) -> Subject:
    block_size = make().default_block_size
    return Subject(
        make, dtype, _TOLERANCE[dtype], _memory, block_size, setting.device,
    )  # fmt: skip


def _memory(backend: AttentionBackend) -> list[torch.Tensor]:
    """A backend's own tensors of keys and values."""
    held = vars(backend)
    return [held[name] for name in ("_cache", "_keys", "_values") if name in held]


def conformance_of(backend: str) -> Part:
    """Every case of the suite, and its properties, in each dtype that the backend takes."""

    def run(setting: Setting) -> Iterator[Row]:
        part = "conformance"
        for name, make in runnable(setting):
            if name != backend:
                continue
            for dtype in _dtypes(setting, make):
                yield from _checked(
                    setting, _subject(setting, name, make, dtype), f"{name} {dtype}"
                )
            return
        yield Row(part, backend, SKIPPED, note=present(setting).get(backend, "unknown"))

    return run


def _dtypes(setting: Setting, make: Callable[[], AttentionBackend]) -> Iterator[torch.dtype]:
    if setting.tiny:
        yield torch.float32
        return
    for dtype in _TOLERANCE:
        backend = make()
        try:
            spec = KVCacheSpec(1, 1, 64, dtype)
            backend.allocate(spec, 1, backend.default_block_size)
        except ValueError:
            continue
        yield dtype


def _checked(setting: Setting, subject: Subject, name: str) -> Iterator[Row]:
    """A row for what holds, with the largest deviation, and one for each case that does not."""
    cases = conformance.cases(heavy=not setting.tiny)
    names = ["mixed"] if setting.tiny else list(cases)
    checks = {case: partial(conformance.check, subject, cases[case]) for case in names}
    if not setting.tiny:
        properties = conformance.PROPERTIES.items()
        checks |= {prop: partial(check, subject) for prop, check in properties}
    largest, held, left = 0.0, 0, 0
    for case, check in checks.items():
        if setting.is_over:
            left += 1
            continue
        row = attempt("conformance", f"{name}: {case}", partial(_deviation, check))
        if row.outcome == OK:
            held, largest = held + 1, max(largest, float(row.note))
        else:
            yield row
    yield Row(
        "conformance", name, note=f"{held} of {len(checks)} cases hold, deviation {largest:.2g}"
    )
    if left:
        yield Row("conformance", name, SKIPPED, note=f"{left} cases: no time left")


def _deviation(check: Callable[[], float]) -> Row:
    return Row("", "", note=repr(check()))


def layer(setting: Setting) -> Iterator[Row]:
    """Attention of one layer: decodes by batch and context, and one prefill."""
    batches, contexts = ((2,), (20,)) if setting.tiny else ((1, 32, 256), (512, 4096, 32768))
    for name, make in runnable(setting):
        for context in contexts:
            for batch in batches:
                step = [(context, 1)] * batch
                label = f"{name}: decode {batch} x {context}"
                yield _timed(setting, make, step, label)
            yield _timed(setting, make, [(context, context)], f"{name}: prefill 1 x {context}")


def _timed(
    setting: Setting,
    make: Callable[[], AttentionBackend],
    step: conformance.Step,
    label: str,
) -> Row:
    if setting.is_over:
        return Row("layer", label, SKIPPED, note="no time left")
    return attempt("layer", label, lambda: _layer_step(setting, make(), step))


def _layer_step(setting: Setting, backend: AttentionBackend, step: conformance.Step) -> Row:
    """Over random keys and values; a prefill attends to what precedes each position alone."""
    num_heads, num_kv_heads, head_dim = setting.heads
    spec = KVCacheSpec(1, num_kv_heads, head_dim, setting.dtype)
    size = backend.default_block_size
    blocks = conformance.num_blocks(step, size)
    needed = blocks * size * spec.bytes_per_token
    if needed > 0.8 * setting.free_bytes:
        raise Unfit(f"{needed:,} bytes of keys and values, {setting.free_bytes:,} are free")
    backend.allocate(spec, blocks, size)
    for tensor in _memory(backend):
        tensor.normal_()
    metadata = moved(planned(step, size), setting.device)
    positions = len(metadata.positions)
    query = torch.randn(positions, num_heads, head_dim, device=setting.device).to(setting.dtype)
    with torch.inference_mode():
        backend.plan(metadata)
        times = 2 if setting.tiny else _REPEATS
        seconds = seconds_of(setting, lambda: backend.attend(0, query, head_dim**-0.5), times)
    keys = sum(kv_len for kv_len, _ in step)
    pairs = sum(n * kv_len - n * (n - 1) // 2 for kv_len, n in step)
    return Row(
        "", "", seconds=seconds, tokens=positions, computed=4 * pairs * num_heads * head_dim,
        moved=keys * spec.bytes_per_token + 2 * query.numel() * query.itemsize,
    )  # fmt: skip


__all__ = ["CPU", "Part", "ceilings", "conformance_of", "found", "layer"]
