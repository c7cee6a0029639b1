"""The three services on this computer: what runs, in which order, and when they are ready."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import noria
from noria.cli.model_source import ModelSource
from noria.cli.supervisor import Child, ChildSpec, OnEvent, StopRule, running_child, unless_died
from noria.client.connection import channel_options

HOST = "127.0.0.1"
# Modules of the extras `tokenizer`, `worker` and `router`.
NEEDED = (
    "gguf", "grpc_health", "grpc_reflection", "jinja2", "numpy", "prometheus_client",
    "safetensors", "structlog", "tokenizers", "torch",
)  # fmt: skip


@dataclass(frozen=True)
class StackPlan:
    """What to run: `port` is the router's, 0 picks a free one; the others pick theirs.

    `keys_file` takes the place of `key_sha256`. `metrics_ports` are the router's, the
    tokenizer's and the workers', in this order; empty: no metrics.
    """

    model: ModelSource
    key_sha256: str
    port: int
    workers: int = 1
    worker_flags: tuple[str, ...] = ()
    keys_file: Path | None = None
    metrics_ports: tuple[int, ...] = ()

    @property
    def worker_names(self) -> tuple[str, ...]:
        if self.workers == 1:
            return ("worker",)
        return tuple(f"worker {number + 1}" for number in range(self.workers))

    @property
    def metrics(self) -> dict[str, int]:
        """The port of each service's metrics, by its name."""
        names = ("router", "tokenizer", *self.worker_names)
        return dict(zip(names, self.metrics_ports, strict=False))


@dataclass(frozen=True)
class RunningStack:
    """A stack that is ready. `address` is the router's host:port, `metrics` that of each
    service's metrics by its name.
    """

    address: str
    model_name: str
    metrics: Mapping[str, str]
    children: tuple[Child, ...]


def missing_packages() -> list[str]:
    """Which of the services' packages are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def _environment() -> Mapping[str, str]:
    """What every child's environment has besides: no key, and this very copy of Noria."""
    here = str(Path(noria.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "NORIA_API_KEY": ""}


def _service(name: str, module: str, *flags: str, **environment: str) -> ChildSpec:
    # -P: a folder named like a service, where the command was given, is not that service.
    argv = (sys.executable, "-P", "-m", module, *flags)
    return ChildSpec(name, argv, {**_environment(), **environment})


def backend_specs(plan: StackPlan) -> list[ChildSpec]:
    """The tokenizer service and the workers, each on a port of its own choice."""
    model = ("--model", str(plan.model.path), "--served-model-name", plan.model.name)
    common = (*model, "--listen", f"{HOST}:0")
    # The services and their clients share these cores: engine threads that spin while they
    # wait for each other would keep off whom they wait for.
    waiting = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    tokenizer = _service("tokenizer", "tokenizer_svc", *common, *_metrics_flags(plan, "tokenizer"))
    workers = [
        _service(
            *(name, "worker", *common, *_metrics_flags(plan, name), *plan.worker_flags), **waiting
        )
        for name in plan.worker_names
    ]
    return [tokenizer, *workers]


def _metrics_flags(plan: StackPlan, name: str) -> tuple[str, ...]:
    port = plan.metrics.get(name)
    return () if port is None else ("--metrics-listen", f"{HOST}:{port}")


def router_spec(plan: StackPlan, tokenizer: str, workers: list[str]) -> ChildSpec:
    """The router, told where the others listen."""
    flags = ["--listen", f"{HOST}:{plan.port}", "--tokenizer", tokenizer]
    for worker in workers:
        flags += ["--worker", worker]
    flags += _metrics_flags(plan, "router")
    if plan.keys_file is not None:
        return _service("router", "router", *flags, "--keys-file", str(plan.keys_file))
    return _service("router", "router", *flags, NORIA_ROUTER_API_KEY_SHA256=plan.key_sha256)


@contextlib.asynccontextmanager
async def running_stack(
    plan: StackPlan, on_event: OnEvent, rule: StopRule
) -> AsyncIterator[RunningStack]:
    """Start everything and wait until the router serves; stop in order on exit, router first.

    Raises ChildDiedError when a child ends before all is ready.
    """
    async with contextlib.AsyncExitStack() as held:
        children = [
            await held.enter_async_context(running_child(spec, on_event, rule))
            for spec in backend_specs(plan)
        ]
        tokenizer, *workers = await unless_died(children, _addresses(children))
        router = await held.enter_async_context(
            running_child(router_spec(plan, tokenizer, workers), on_event, rule)
        )
        children.append(router)
        address = await unless_died(children, _all_ready(children, router))
        metrics = await _metrics_addresses([router, *children[:-1]])
        yield RunningStack(address, plan.model.name, metrics, tuple(children))


async def _metrics_addresses(children: list[Child]) -> dict[str, str]:
    told = {child.name: (await child.event("listening")).get("metrics") for child in children}
    return {name: str(address) for name, address in told.items() if address}


async def _addresses(children: list[Child]) -> list[str]:
    return [str((await child.event("listening"))["address"]) for child in children]


async def _all_ready(children: list[Child], router: Child) -> str:
    """Wait until the router serves and all have said that they are ready; its address."""
    address = await _serving(router)
    for child in children:
        await child.event("ready")
    return address


async def _serving(router: Child) -> str:
    """Wait until the router's health service says SERVING; its address."""
    (address,) = await _addresses([router])
    # gRPC starts threads of its own: it is loaded when all children run.
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    serving = health_pb2.HealthCheckResponse.SERVING
    async with grpc.aio.insecure_channel(address, options=channel_options(address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), wait_for_ready=True)
        async for answer in watch:
            if answer.status == serving:
                break
    return address
