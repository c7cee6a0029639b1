"""Brings waiting requests and workers together; purely synchronous.

`dispatch` is called whenever something may have changed: a request came, a worker
reported, connected or left. While the head of a model's line fits nowhere, the line waits.
"""

from collections.abc import Callable

from noria.reasons import Reason, RequestError
from router.policy import pick_worker
from router.queue import RequestQueue
from router.registry import Registry
from router.token_stream import TokenStream


class Dispatcher:
    """The one place where a request is given to a worker."""

    def __init__(
        self, queue: RequestQueue[TokenStream], registry: Registry, clock: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._registry = registry
        self._clock = clock

    def enqueue(self, stream: TokenStream) -> None:
        """Let a request wait, and place it at once if it can be. Raises QUEUE_FULL."""
        generation = stream.generation
        self._queue.wait(
            stream.permit,
            stream,
            model=generation.model,
            priority=generation.priority,
            tokens=len(generation.prompt_token_ids),
        )
        self.dispatch()

    def put_back(self, stream: TokenStream) -> None:
        """Let a request wait again at the head of its priority, for the next `dispatch`."""
        self._queue.put_back(stream.permit)

    def dispatch(self) -> None:
        """Place whoever can be placed."""
        for model in self._queue.models():
            self._dispatch_model(model)

    def give_up_unserved(self, patience_s: float) -> None:
        """End those whose model no worker has served for longer than `patience_s`."""
        now = self._clock()
        for model in self._queue.models():
            if self._registry.unserved_s(model, now) > patience_s:
                for permit in self._queue.waiting_for(model):
                    if permit.item is not None:
                        lost = f"no worker has served {model} for {patience_s:g} s"
                        permit.item.give_up(RequestError(Reason.NO_WORKER, lost))

    def _dispatch_model(self, model: str) -> None:
        workers = self._registry.usable(model)
        now = self._clock()
        while (permit := self._queue.head(model)) is not None and permit.item is not None:
            worker = pick_worker(workers, permit.tokens, now)
            if worker is None:
                return
            self._queue.take(permit)
            worker.submit(permit.item)
