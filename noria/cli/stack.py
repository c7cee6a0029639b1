"""The three services on this computer: what runs, in which order, and when they are ready."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import noria
from noria.cli.served_models import ServedModel
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

    Each model has a tokenizer and `workers` workers. `keys_file` takes the place of
    `key_sha256`. `metrics_ports` are the router's, the tokenizers' and the workers', in this
    order; empty: no metrics.
    """

    models: tuple[ServedModel, ...]
    key_sha256: str
    port: int
    workers: int = 1
    worker_flags: tuple[str, ...] = ()
    keys_file: Path | None = None
    metrics_ports: tuple[int, ...] = ()

    @property
    def tokenizer_names(self) -> tuple[str, ...]:
        """One for each model; named after it if there are several."""
        return tuple(f"tokenizer{self._of(model)}" for model in self.models)

    def worker_names(self, model: ServedModel) -> tuple[str, ...]:
        """The workers of a model; numbered if there are several."""
        if self.workers == 1:
            return (f"worker{self._of(model)}",)
        return tuple(f"worker{self._of(model)} {number + 1}" for number in range(self.workers))

    @property
    def metrics(self) -> dict[str, int]:
        """The port of each service's metrics, by its name."""
        workers = (name for model in self.models for name in self.worker_names(model))
        names = ("router", *self.tokenizer_names, *workers)
        return dict(zip(names, self.metrics_ports, strict=False))

    def _of(self, model: ServedModel) -> str:
        return f" {model.name}" if len(self.models) > 1 else ""


@dataclass(frozen=True)
class RunningStack:
    """A stack that is ready. `address` is the router's host:port, `metrics` that of each
    service's metrics by its name.
    """

    address: str
    model_names: tuple[str, ...]
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
    """The tokenizer services, then the workers, each on a port of its own choice."""
    # The services and their clients share these cores: engine threads that spin while they
    # wait for each other would keep off whom they wait for.
    waiting = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    tokenizers = [
        _service(name, "tokenizer_svc", *_model_flags(model), *_metrics_flags(plan, name))
        for name, model in zip(plan.tokenizer_names, plan.models, strict=True)
    ]
    workers = [
        _service(
            *(name, "worker", *_model_flags(model), *_alias_flags(model)),
            *(*_metrics_flags(plan, name), *plan.worker_flags),
            **waiting,
        )
        for model in plan.models
        for name in plan.worker_names(model)
    ]
    return [*tokenizers, *workers]


def _model_flags(model: ServedModel) -> tuple[str, ...]:
    served = ("--model", str(model.path), "--served-model-name", model.name)
    return (*served, "--listen", f"{HOST}:0")


def _alias_flags(model: ServedModel) -> tuple[str, ...]:
    return tuple(part for alias in model.aliases for part in ("--alias", alias))


def _metrics_flags(plan: StackPlan, name: str) -> tuple[str, ...]:
    port = plan.metrics.get(name)
    return () if port is None else ("--metrics-listen", f"{HOST}:{port}")


def router_spec(plan: StackPlan, tokenizers: list[str], workers: list[str]) -> ChildSpec:
    """The router, told where the others listen."""
    flags = ["--listen", f"{HOST}:{plan.port}"]
    for tokenizer in tokenizers:
        flags += ["--tokenizer", tokenizer]
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
        addresses = await unless_died(children, _addresses(children))
        count = len(plan.models)
        spec = router_spec(plan, addresses[:count], addresses[count:])
        router = await held.enter_async_context(running_child(spec, on_event, rule))
        children.append(router)
        address = await unless_died(children, _all_ready(children, router))
        metrics = await _metrics_addresses([router, *children[:-1]])
        yield RunningStack(
            address, tuple(model.name for model in plan.models), metrics, tuple(children)
        )


@contextlib.asynccontextmanager
async def another_router(
    stack: RunningStack, workers: list[str], plan: StackPlan, on_event: OnEvent, rule: StopRule
) -> AsyncIterator[str]:
    """A further router in front of some of a stack's workers, serving; its host:port."""
    tokenizers = await _addresses(list(stack.children[: len(plan.models)]))
    spec = router_spec(plan, tokenizers, workers)
    async with running_child(spec, on_event, rule) as router:
        yield await unless_died([router], serving(router))


async def worker_addresses(stack: RunningStack) -> list[str]:
    """Where the workers of a stack listen."""
    workers = [child for child in stack.children if child.name.startswith("worker")]
    return await _addresses(workers)


async def _metrics_addresses(children: list[Child]) -> dict[str, str]:
    told = {child.name: (await child.event("listening")).get("metrics") for child in children}
    return {name: str(address) for name, address in told.items() if address}


async def _addresses(children: list[Child]) -> list[str]:
    return [str((await child.event("listening"))["address"]) for child in children]


async def _all_ready(children: list[Child], router: Child) -> str:
    """Wait until the router serves and all have said that they are ready; its address."""
    address = await serving(router)
    for child in children:
        await child.event("ready")
    return address


async def serving(router: Child) -> str:
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
