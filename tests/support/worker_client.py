"""A bare router for worker tests: one session, submits by number, everything it sent back."""

import asyncio
import contextlib
import threading
from collections import defaultdict

import grpc

from noria.service.channel import CLIENT_OPTIONS
from noria.v1 import common_pb2, worker_pb2, worker_pb2_grpc

GREEDY = common_pb2.SamplingParams(temperature=0.0, ignore_eos=True)


class WorkerClient:
    """`ids[n]` and `steps[n]` gather the deltas of submit n; `terminals[n]` its last entry."""

    def __init__(self, call):
        self._call = call
        self._arrived = asyncio.Condition()
        self.hello = None
        self.load = None
        self.ids = defaultdict(list)
        self.steps = defaultdict(list)
        self.terminals = {}
        self.messages = []
        self._next_number = 1

    async def submit(self, prompt, max_tokens, **fields):
        number = self._next_number
        self._next_number += 1
        fields.setdefault("sampling", GREEDY)
        submit = worker_pb2.Submit(
            id=f"r{number}/1",
            submit_number=number,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            **fields,
        )
        await self._call.write(worker_pb2.SessionRequest(submit=submit))
        return number

    async def abort(self, number):
        abort = worker_pb2.Abort(submit_number=number)
        await self._call.write(worker_pb2.SessionRequest(abort=abort))

    async def abort_choice(self, number, choice):
        abort = worker_pb2.AbortChoice(submit_number=number, choice=choice)
        await self._call.write(worker_pb2.SessionRequest(abort_choice=abort))

    async def until(self, condition, timeout=60):
        """Wait until a condition on this client holds; checked after every message."""
        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(condition), timeout)

    async def finished(self, *numbers):
        """Wait for terminal entries; the ids of each submit."""
        await self.until(lambda: all(number in self.terminals for number in numbers))
        return [self.ids[number] for number in numbers]

    async def generate(self, prompt, max_tokens, **fields):
        number = await self.submit(prompt, max_tokens, **fields)
        return (await self.finished(number))[0]

    async def read(self):
        async for message in self._call:
            async with self._arrived:
                self._take(message)
                self._arrived.notify_all()

    def _take(self, message):
        kind = message.WhichOneof("message")
        if kind == "hello":
            self.hello = message.hello
            return
        self.load = message.load if kind == "load" else message.step.load
        if kind == "step":
            self.messages.append(message.step)
            for delta in message.step.deltas:
                self.ids[delta.submit_number].extend(delta.token_ids)
                self.steps[delta.submit_number].extend(delta.steps)
            for terminal in message.step.terminals:
                assert terminal.submit_number not in self.terminals
                self.terminals[terminal.submit_number] = terminal


@contextlib.asynccontextmanager
async def worker_client(address):
    """A session that said hello and got its answer."""
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
        hello = worker_pb2.RouterHello(protocol_version=1, router_instance_id="test")
        await call.write(worker_pb2.SessionRequest(hello=hello))
        client = WorkerClient(call)
        reading = asyncio.create_task(client.read())
        try:
            await client.until(lambda: client.hello is not None)
            yield client
        finally:
            call.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


class StepGate:
    """Holds a runner at the door of every step until the test lets it through."""

    def __init__(self, runner):
        self._places = threading.Semaphore(0)
        self.holds_one = False
        self._execute = runner.execute
        runner.execute = self._wait_and_execute

    def let_through(self, steps=1):
        self._places.release(steps)

    def _wait_and_execute(self, output):
        self.holds_one = True
        assert self._places.acquire(timeout=30), "the test let no step through"
        self.holds_one = False
        return self._execute(output)


def record_steps(runner):
    """A list that gets every SchedulerOutput the runner computes from now on."""
    outputs = []
    execute = runner.execute

    def recording(output):
        outputs.append(output)
        return execute(output)

    runner.execute = recording
    return outputs
