"""All three services on loopback in one process, and a client of theirs."""

import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import generate_latest

from noria import AsyncClient
from router.app import running_router
from router.assembly import Router
from router.config import RouterConfig
from tests.support.canary import API_KEY, look
from tests.support.worker_client import record_steps
from tokenizer_svc.app import running_tokenizer
from tokenizer_svc.config import TokenizerConfig
from worker.app import running_worker
from worker.build import WorkerFacts
from worker.config import WorkerConfig


@dataclass
class Stack:
    """A running system. `steps` gets what each worker computes, step by step.

    `addresses`, and `metrics` where they are served, are those of router, tokenizer and
    workers, in this order.
    """

    router: Router
    client: AsyncClient
    workers: list[WorkerFacts]
    steps: list[list] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)

    def held(self) -> dict[str, int]:
        """What router and workers hold for requests, by kind."""
        held = dict(self.router.held())
        schedulers = [facts.scheduler for facts in self.workers]
        held["sequences"] = sum(each.num_running + each.num_waiting for each in schedulers)
        held["blocks"] = sum(each.pool.num_used for each in schedulers)
        return held


@contextlib.asynccontextmanager
async def running_stack(
    model: Path,
    *,
    num_workers: int = 1,
    seeds=None,
    router: dict | None = None,
    metrics_listen: str = "",
    tls=None,
    **worker,
) -> AsyncIterator[Stack]:
    """Tokenizer, workers and router for one model, ready to answer.

    `tls` (tests.support.certificates.Fleet): mutual TLS on every hop.
    """
    service_tls = None if tls is None else tls.service
    async with contextlib.AsyncExitStack() as held:
        tokenizer = await held.enter_async_context(
            running_tokenizer(
                TokenizerConfig(model, "demo", "127.0.0.1:0", metrics_listen, tls=service_tls)
            )
        )
        worker.setdefault("tls", service_tls)
        config = WorkerConfig(model, "demo", "127.0.0.1:0", metrics_listen, **worker)
        workers = [
            await held.enter_async_context(running_worker(config)) for _ in range(num_workers)
        ]
        await tokenizer.ready()
        facts = [await running.ready() for running in workers]
        settings = {
            "tokenizers": (tokenizer.address,),
            "workers": tuple(running.address for running in workers),
            "api_key_sha256": hashlib.sha256(API_KEY.encode()).hexdigest(),
            "listen": "127.0.0.1:0",
            "metrics_listen": metrics_listen,
            "tls": None if tls is None else tls.router,
            "peer_tls": None if tls is None else tls.peers,
        }
        routing = RouterConfig(**settings | (router or {}))
        sources = {} if seeds is None else {"seed_source": iter(seeds).__next__}
        serving = await held.enter_async_context(running_router(routing, **sources))
        await serving.wait_ready()
        client = AsyncClient(serving.address, api_key=API_KEY, tls=tls and tls.client())
        await held.enter_async_context(client)
        steps = [record_steps(fact.runner) for fact in facts]
        services = (serving, tokenizer, *workers)
        addresses = [running.address for running in services]
        metrics = [running.metrics_address for running in services]
        yield Stack(serving, client, facts, steps, addresses, metrics)
        for registry in (serving.metrics_registry, *(running.registry for running in workers)):
            look("metrics", generate_latest(registry).decode())
