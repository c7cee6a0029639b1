"""Brings waiting requests and workers together; purely synchronous.

`dispatch` is called whenever something may have changed: a request came, a worker
reported, connected or left.

While the head of a model's line fits nowhere, smaller requests behind it may pass, for
`OVERTAKING_S` at most; then the worker with the most spare blocks takes nothing else until
the head fits.
"""

from collections.abc import Callable, Sequence

from noria.reasons import Reason, RequestError
from router.policy import Choice, Need, has_room, pick_worker, spare_blocks
from router.queue import Permit, RequestQueue
from router.registry import Registry
from router.retry_budget import RetryBudget
from router.token_stream import TokenStream
from router.worker_state import WorkerState

OVERTAKING_S = 1.0
# How many behind the head are looked at: this runs at every message of a worker.
_OVERTAKERS = 32

Waiting = Permit[TokenStream]


class Dispatcher:
    """The one place where a request is given to a worker."""

    def __init__(
        self, queue: RequestQueue[TokenStream], registry: Registry, clock: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._registry = registry
        self._clock = clock
        self._retries = RetryBudget()

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
        stream.queue(self._queue.position(stream.permit))
        self.dispatch()

    def put_back(self, stream: TokenStream) -> None:
        """Let a request wait again at the head of its priority, for the next `dispatch`."""
        self._queue.put_back(stream.permit)
        stream.queue(self._queue.position(stream.permit))

    def may_retry(self, stream: TokenStream) -> bool:
        """Whether a request that a worker failed may try another one; counts as a try."""
        workers = self._registry.usable(stream.generation.model)
        return any(w not in stream.failed_at for w in workers) and self._retries.withdraw()

    def preview(self, model: str, need: Need) -> Choice | None:
        """Where a request would go now; nothing is held for it."""
        return pick_worker(self._registry.usable(model), need, self._clock())

    def dispatch(self) -> None:
        """Place whoever can be placed."""
        now = self._clock()
        for model in self._queue.models():
            self._dispatch_model(model, now)

    def give_up_unserved(self, patience_s: float) -> None:
        """End those whose model no worker has served for longer than `patience_s`."""
        now = self._clock()
        for model in self._queue.models():
            if self._registry.unserved_s(model, now) > patience_s:
                for permit in self._queue.waiting_for(model):
                    if permit.item is not None:
                        lost = f"no worker has served {model} for {patience_s:g} s"
                        permit.item.give_up(RequestError(Reason.NO_WORKER, lost))

    def _dispatch_model(self, model: str, now: float) -> None:
        workers = self._registry.usable(model)
        while (head := self._queue.head(model)) is not None:
            if not self._place(head, workers, now):
                self._let_pass(head, workers, now)
                return

    def _place(self, permit: Waiting, workers: list[WorkerState], now: float) -> bool:
        """Give a request to the best of the workers, if one has room."""
        stream = permit.item
        if stream is None:
            return False
        generation = stream.generation
        need = Need(
            permit.tokens,
            generation.price,
            generation.num_choices,
            generation.priority,
            has_grammar=generation.sampling.grammar is not None,
        )
        untried = [worker for worker in workers if worker not in stream.failed_at]
        choice = pick_worker(untried or workers, need, now)
        if choice is None:
            return False
        if not stream.attempts:
            self._retries.deposit()
        self._queue.take(permit)
        self._registry.used(choice.worker)
        _move_to_end(workers, choice.worker)
        choice.worker.submit(stream, now, choice.note)
        return True

    def _let_pass(self, head: Waiting, workers: list[WorkerState], now: float) -> None:
        if head.blocked_since is None:
            head.blocked_since = now
        if now - head.blocked_since >= OVERTAKING_S:
            workers = _all_but_keeper(workers, head.priority, now)
        # None behind the head is of a higher priority than it.
        least = Need(1, 1, priority=head.priority)
        if not any(has_room(worker, least, now) for worker in workers):
            return
        for permit in self._queue.behind(head, _OVERTAKERS):
            if permit.tokens < head.tokens:
                self._place(permit, workers, now)


def _all_but_keeper(workers: Sequence[WorkerState], priority: int, now: float) -> list[WorkerState]:
    """Without the worker that will have room for the head first, by its spare blocks."""
    keeper = max(
        workers, key=lambda w: (not w.is_stalled(now), spare_blocks(w, priority)), default=None
    )
    return [worker for worker in workers if worker is not keeper]


def _move_to_end(workers: list[WorkerState], worker: WorkerState) -> None:
    workers.remove(worker)
    workers.append(worker)
