"""The services as processes of their own, with a scripted model, and all that they write."""

import asyncio
import contextlib
import hashlib
import signal
import sys
from collections import defaultdict
from pathlib import Path

from noria import AsyncClient
from noria.cli.supervisor import Child, ChildSpec, StopRule, running_child, unless_died
from router.app import running_router
from router.config import RouterConfig
from tests.support.canary import API_KEY, look
from tests.support.waiting import until
from tokenizer_svc.app import running_tokenizer
from tokenizer_svc.config import TokenizerConfig

ROOT = Path(__file__).parent.parent.parent
ANY_PORT = "127.0.0.1:0"


class Fleet:
    """A tokenizer, workers and a router. `events[name]` is all that a process wrote."""

    def __init__(self, model, script, held, **environment):
        self.events = defaultdict(list)
        self.children = {}
        self.tokenizer_address = ""
        self.client = None
        self._model = ("--model", str(model), "--served-model-name", "demo")
        self._script = ("--script", str(script))
        self._held = held
        self._environment = environment

    async def start(self, name, module, *flags) -> Child:
        """Start a process; it listens when this returns."""
        argv = (sys.executable, "-P", "-m", module, *flags)
        environment = {"PYTHONPATH": str(ROOT), **self._environment}
        spec = ChildSpec(name, argv, environment)
        running = running_child(spec, self._note, StopRule(grace_s=5))
        child = self.children[name] = await self._held.enter_async_context(running)
        await unless_died([child], child.event("listening"))
        return child

    def count(self, name, event):
        """How often a process has written an event."""
        return sum(noted["event"] == event for noted in self.events[name])

    def _note(self, name, event):
        self.events[name].append(dict(event))
        look(f"events of {name}", dict(event))

    async def start_tokenizer(self, listen=ANY_PORT, name="tokenizer") -> Child:
        child = await self.start(
            name, "tokenizer_svc", *self._model, "--listen", listen, "--metrics-listen", ANY_PORT
        )
        self.tokenizer_address = await address(child)
        return child

    async def start_worker(self, name, *flags, listen=ANY_PORT) -> Child:
        places = ("--listen", listen, "--metrics-listen", ANY_PORT, "--cpu-threads", "1")
        return await self.start(name, "worker", *self._model, *self._script, *places, *flags)

    async def start_router(self, keys_file, *workers) -> Child:
        flags = ["--listen", ANY_PORT, "--metrics-listen", ANY_PORT, "--keys-file", str(keys_file)]
        for worker in workers:
            flags += ["--worker", await address(worker)]
        router = await self.start("router", "router", *flags, "--tokenizer", self.tokenizer_address)
        await unless_died([router], router.event("ready"))
        return router

    async def metrics_addresses(self):
        """Those of all processes that still run."""
        running = [c for c in self.children.values() if c.process.returncode is None]
        return [(await child.event("listening"))["metrics"] for child in running]


async def address(child):
    return (await child.event("listening"))["address"]


async def exit_code(child, number=signal.SIGTERM):
    """Send a signal and wait for the end."""
    child.process.send_signal(number)
    return await child.process.wait()


@contextlib.asynccontextmanager
async def worker_fleet(model, script, *, num_workers=2, worker_flags=(), router=None):
    """Workers as processes; tokenizer and router here, where a test can look into them.

    Gives the processes (`children` "worker 0", ...), the router and the tokenizer.
    """
    async with contextlib.AsyncExitStack() as held:
        running = Fleet(model, script, held)
        starting = [running.start_worker(f"worker {n}", *worker_flags) for n in range(num_workers)]
        workers = await asyncio.gather(*starting)
        tokenizer = await held.enter_async_context(
            running_tokenizer(TokenizerConfig(model, "demo", ANY_PORT, ANY_PORT))
        )
        await tokenizer.ready()
        config = {
            "tokenizers": (tokenizer.address,),
            "workers": tuple([await address(worker) for worker in workers]),
            "api_key_sha256": hashlib.sha256(API_KEY.encode()).hexdigest(),
            "listen": ANY_PORT,
            "metrics_listen": ANY_PORT,
        }
        serving = await held.enter_async_context(
            running_router(RouterConfig(**config | (router or {})))
        )
        await until(lambda: len(list(serving.registry)) == num_workers, timeout=30)
        await serving.wait_ready()
        yield running, serving, tokenizer


@contextlib.asynccontextmanager
async def fleet(model, script, keys_file, *, num_workers=2, worker_flags=(), **environment):
    """Everything started and ready, and a client of the router."""
    async with contextlib.AsyncExitStack() as held:
        running = Fleet(model, script, held, **environment)
        await running.start_tokenizer()
        workers = [
            await running.start_worker(f"worker {number}", *worker_flags)
            for number in range(num_workers)
        ]
        for worker in workers:
            await unless_died([worker], worker.event("ready"))
        router = await running.start_router(keys_file, *workers)
        client = AsyncClient(await address(router), api_key=API_KEY)
        running.client = await held.enter_async_context(client)
        yield running
