"""Several routers that share a Redis and all workers, on loopback in one process."""

import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from noria.v1 import chat_pb2, chat_pb2_grpc, common_pb2
from router.app import running_router
from router.assembly import Router
from router.config import RouterConfig
from router.ledger.row import UsageRow
from router.store.opened import Store
from tests.support.canary import CANARY
from tests.support.waiting import until
from tests.support.worker_client import StepGate
from tokenizer_svc.app import running_tokenizer
from tokenizer_svc.config import TokenizerConfig
from worker.accounting import Work
from worker.app import RunningWorker, running_worker
from worker.config import WorkerConfig

ANY_PORT = "127.0.0.1:0"
# The key of each tenant.
KEYS = {name: f"noria-{name}-{CANARY}" for name in ("search", "mail", "operators")}


@dataclass
class Replicas:
    """`stubs` has one for each router; `gates` hold the workers' steps if that was asked for."""

    routers: list[Router]
    stubs: list[chat_pb2_grpc.ChatServiceStub]
    workers: list[RunningWorker]
    gates: list[StepGate] = field(default_factory=list)
    holding: list[contextlib.AsyncExitStack] = field(default_factory=list)

    async def stop_router(self, number: int) -> None:
        """It leaves as it does after SIGTERM."""
        await self.holding[number].aclose()

    @property
    def store(self) -> Store:
        return self.routers[0]._store

    async def at_rest(self) -> None:
        """Nothing is held, and every row is written."""
        await until(lambda: not any(map(_holds, self.routers)), timeout=30)

    def told(self) -> Work:
        """What all workers have told routers of."""
        told = [worker.state().accounts.told for worker in self.workers]
        return sum(told[1:], start=told[0])

    def lost_us(self) -> int:
        return sum(worker.state().accounts.lost.device_us for worker in self.workers)

    def busy_us(self) -> int:
        return sum(worker.state().load.busy_us for worker in self.workers)

    async def open_rows(self) -> list[UsageRow]:
        ledger = self.store.ledger
        return [row for r in self.routers for row in await ledger.open_rows(r._instance_id)]


def _holds(router: Router) -> bool:
    return any(router.held().values()) or router.state().ledger_waiting > 0


def key_of(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[tenant]}"),)


def keys_file(folder: Path) -> Path:
    """Every tenant's key; `operators` has the scope `admin`."""
    path = folder / "keys.toml"
    tenants = []
    for name, key in KEYS.items():
        admin = "admin = true\n" if name == "operators" else ""
        digest = hashlib.sha256(key.encode()).hexdigest()
        tenants.append(
            f'[[tenants]]\nname = "{name}"\n{admin}[[tenants.keys]]\nsha256 = "{digest}"\n'
        )
    path.write_text("".join(tenants))
    return path


@contextlib.asynccontextmanager
async def running_replicas(
    model: Path,
    folder: Path,
    redis_url: str,
    *,
    num_routers: int = 2,
    num_workers: int = 1,
    gated: bool = False,
    router: dict | None = None,
    **worker,
) -> AsyncIterator[Replicas]:
    """All connected and ready. `router` and `worker` are settings."""
    async with contextlib.AsyncExitStack() as held:
        enter = held.enter_async_context
        tokenizer = await enter(running_tokenizer(TokenizerConfig(model, "demo", ANY_PORT)))
        config = WorkerConfig(model, "demo", ANY_PORT, **worker)
        workers = [await enter(running_worker(config)) for _ in range(num_workers)]
        await tokenizer.ready()
        facts = [await running.ready() for running in workers]
        settings = {
            "tokenizers": (tokenizer.address,),
            "workers": tuple(running.address for running in workers),
            "keys_file": keys_file(folder),
            "redis_url": redis_url,
            "redis_timeout_s": 5.0,
            "listen": ANY_PORT,
        }
        routing = RouterConfig(**settings | (router or {}))
        holding = [await enter(contextlib.AsyncExitStack()) for _ in range(num_routers)]
        routers = [await each.enter_async_context(running_router(routing)) for each in holding]
        channels = [await enter(grpc.aio.insecure_channel(each.address)) for each in routers]
        for each in routers:
            await until(lambda each=each: len(list(each.registry)) == num_workers, timeout=30)
            await each.wait_ready()
        stubs = [chat_pb2_grpc.ChatServiceStub(channel) for channel in channels]
        gates = [StepGate(fact.runner) for fact in facts] if gated else []
        yield Replicas(routers, stubs, workers, gates, holding)


def chat_spec(text: str, max_tokens: int = 5, **fields) -> chat_pb2.ChatSpec:
    """One question, by default answered greedily."""
    block = chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=text))
    message = chat_pb2.Message(role=chat_pb2.ROLE_USER, content=[block])
    fields.setdefault("sampling", common_pb2.SamplingParams(temperature=0))
    return chat_pb2.ChatSpec(messages=[message], max_tokens=max_tokens, **fields)
