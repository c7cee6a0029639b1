"""`python -m worker`: one worker process."""

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog

from noria.service.log import LEVELS, configure_logging, places_of, why_not
from noria.service.parent import die_with_parent
from noria.service.server import stop_event
from noria.service.tasks import first_of, unless
from noria.service.threads import ThreadDeath, first_death, leave
from noria.service.tls_flags import server_tls_flags, take_server_tls
from worker.app import RunningWorker, running_worker
from worker.config import (
    ATTENTION_BACKENDS,
    CPU_KERNELS,
    DEVICES,
    DTYPES,
    GPU_MEMORY_UTILIZATION,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    WorkerConfig,
)
from worker.flights import DeviceLostError

if TYPE_CHECKING:
    from worker.build import WorkerFacts

# The interpreter lock comes back after a fraction of a millisecond instead of several
# beside a busy thread: network and engine threads hand it to each other at every step.
_SWITCH_INTERVAL_S = 2e-4
_MODEL = "A GGUF file or a Hugging Face folder."
_COUNT = click.IntRange(1)
_SECONDS = click.FloatRange(0)


@click.command(context_settings={"auto_envvar_prefix": "NORIA_WORKER", "show_default": True})
@click.option("--model", type=click.Path(exists=True, path_type=Path), required=True, help=_MODEL)
@click.option("--served-model-name", default="", help="Name that requests use.")
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    envvar="NORIA_WORKER_ALIAS",
    help="A further name; repeatable, in the environment separated by spaces.",
)
@click.option("--listen", default="127.0.0.1:50053", help="host:port; port 0 picks one.")
@click.option("--metrics-listen", default="", help="host:port for /metrics; empty: none.")
@server_tls_flags
@click.option(
    "--redis-url",
    default="",
    help="Be found there by routers; it may hold a password: use the environment.",
)
@click.option("--advertise", default="", help="host:port at which they find it. Default: listen.")
@click.option(
    "--attention-backend",
    type=click.Choice(ATTENTION_BACKENDS),
    default="auto",
    help="auto: on a GPU the fastest; on a CPU cpu_native where it can compute the model.",
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    help="auto: cuda where there is one.",
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=GPU_MEMORY_UTILIZATION,
    help="Share of a GPU's memory that this worker takes in all.",
)
@click.option("--enforce-eager", is_flag=True, help="On a GPU: no CUDA graphs.")
@click.option(
    "--async-scheduling/--no-async-scheduling",
    default=None,
    help="Launch a step before the last has landed. Default: on a GPU alone.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    help="Of weights, keys and values. auto: bfloat16; float32 with torch on a CPU.",
)
@click.option(
    "--cpu-kernels",
    type=click.Choice(CPU_KERNELS),
    default="auto",
    help="Which build of cpu_native; auto: the fastest on this CPU.",
)
@click.option("--max-num-seqs", type=_COUNT, default=MAX_NUM_SEQS, help="Places in the batch.")
@click.option(
    "--max-num-batched-tokens",
    type=_COUNT,
    default=MAX_NUM_BATCHED_TOKENS,
    help="Positions computed in one step.",
)
@click.option("--max-model-len", type=_COUNT, help="Default: what the model allows.")
@click.option("--default-max-tokens", type=click.IntRange(0), default=0, help="0: the room left.")
@click.option("--block-size", type=_COUNT, help="Default: the backend's.")
@click.option("--num-blocks", type=_COUNT, help="Default: what the memory holds.")
@click.option(
    "--kv-cache-memory-bytes",
    type=_COUNT,
    help="For keys and values; touched only as blocks are used. Default: half of what is free.",
)
@click.option("--local-workers", type=_COUNT, default=1, help="That divide this memory.")
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=True,
    help="Compute a prefix that several prompts share once.",
)
@click.option("--cpu-threads", type=_COUNT, help="Default: all cores.")
@click.option("--script", type=click.Path(exists=True, path_type=Path), help="Replay a script.")
@click.option("--drain-grace-s", type=_SECONDS, default=60.0, help="For work left at SIGTERM.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", help="The least told.")
@click.option("--parent-pid", type=int, help="End when this process ends.")
def main(parent_pid: int | None, log_level: str, **settings: Any) -> None:
    """Serve one model to routers."""
    if parent_pid is not None:
        die_with_parent(parent_pid)
    try:
        config = WorkerConfig(tls=take_server_tls(settings), **settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    log = configure_logging("worker", log_level)
    leave(asyncio.run(serve(config, log)))


async def serve(config: WorkerConfig, log: structlog.typing.FilteringBoundLogger) -> int:
    """Run until told to stop; the exit status."""
    stop = stop_event()

    def on_progress(stage: str, done: int, total: int) -> None:
        if done * 20 // total != (done - 1) * 20 // total:
            log.info("progress", stage=stage, done=done, total=total)

    def on_failure(failure: Exception) -> None:
        log.error("batch failed", kind=type(failure).__name__, where=places_of(failure))

    try:
        with first_death() as death:
            async with running_worker(
                config, on_progress=on_progress, on_failure=on_failure
            ) as worker:
                log.info("listening", address=worker.address, metrics=worker.metrics_address)
                return await _until_stopped(worker, stop, death, config, log)
    except Exception as error:
        log.error("cannot serve", **why_not(error))
        return 1


def _tell_backend(log: structlog.typing.FilteringBoundLogger, facts: "WorkerFacts") -> None:
    network = facts.network
    log.info(
        "backend",
        attention_backend=network.backend.name,
        kernels=network.kernels,
        dtype=network.dtype,
        row_exact=network.backend.row_exact,
        passed_over=list(network.passed_over),
    )


def _tell_cache(log: structlog.typing.FilteringBoundLogger, facts: "WorkerFacts") -> None:
    size = facts.cache_size
    log.info(
        "kv_cache",
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        bytes_per_token=size.spec.bytes_per_token,
        max_num_seqs=facts.info.hello.max_num_seqs,
        max_model_len=size.max_model_len,
        arithmetic=size.arithmetic(),
    )


async def _until_stopped(
    worker: RunningWorker,
    stop: asyncio.Event,
    death: "asyncio.Future[ThreadDeath]",
    config: WorkerConfig,
    log: structlog.typing.FilteringBoundLogger,
) -> int:
    """Load, serve, then drain; the end of a thread that the worker needs ends either."""
    started, ended = time.monotonic(), dict[str, int]()

    async def serve_and_drain() -> None:
        facts = await unless(stop, worker.ready())
        if facts is not None:
            _tell_backend(log, facts)
            _tell_cache(log, facts)
            log.info("ready", seconds=round(time.monotonic() - started, 2), model=config.name)
            await stop.wait()
        log.info("draining")
        left = await worker.drain(config.drain_grace_s)
        log.info("stopped", aborted=left)
        ended["status"] = 0

    async def engine_crash() -> None:
        failure = await worker.crashed()
        if isinstance(failure, DeviceLostError):
            log.error("device lost", reason=str(failure))
        else:
            log.error("engine crashed", kind=type(failure).__name__, where=places_of(failure))
        ended["status"] = 1

    async def thread_crash() -> None:
        told = await asyncio.shield(death)
        kind, where = type(told.error).__name__, places_of(told.error)
        log.error("thread crashed", name=told.name, kind=kind, where=where)
        ended["status"] = 1

    await first_of(serve_and_drain(), engine_crash(), thread_crash())
    return max(ended.values())


if __name__ == "__main__":
    main()
