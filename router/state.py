"""What a router holds now, read from its parts."""

from collections import Counter
from collections.abc import Mapping

from router.bookkeeping import Bookkeeping
from router.config import RouterConfig
from router.limit_sharing import SharingFigures
from router.metrics import Load, RouterState
from router.queue import RequestQueue
from router.registry import Registry
from router.store.opened import Store
from router.token_stream import TokenStream


def router_state(
    config: RouterConfig,
    store: Store,
    books: Bookkeeping,
    held: Mapping[str, int],
    queue: RequestQueue[TokenStream],
    registry: Registry,
    sharing: SharingFigures,
    num_workers: int,
) -> RouterState:
    """Call it on the event loop; `num_workers` are connected or tried."""
    connected = list(registry)
    return RouterState(
        held=held,
        store_up=store.available,
        ledger_waiting=books.waiting,
        ledger_dropped=books.dropped,
        sharing=sharing,
        queue=Load(queue.num_requests, queue.num_tokens),
        queue_bounds=Load(config.max_queued_requests, config.max_queued_tokens),
        workers={
            "known": num_workers,
            "connected": len(connected),
            "usable": sum(registry.understands(worker) for worker in connected),
            "draining": sum(worker.is_draining for worker in connected),
            "failing": sum(worker.breaker.is_open for worker in connected),
        },
        demand=_demand(queue, registry),
        capacity=_capacity(registry),
    )


def _demand(queue: RequestQueue[TokenStream], registry: Registry) -> dict[str, Load]:
    sequences: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for model in queue.models():
        waiting = [permit.item for permit in queue.waiting_for(model) if permit.item is not None]
        sequences[model] += sum(stream.generation.num_choices for stream in waiting)
        tokens[model] += sum(stream.generation.price for stream in waiting)
    for worker in registry:
        attempts = worker.attempts.values()
        sequences[worker.figures.model] += sum(attempt.num_choices for attempt in attempts)
        tokens[worker.figures.model] += worker.tokens_in_flight
    return {model: Load(sequences[model], tokens[model]) for model in sequences}


def _capacity(registry: Registry) -> dict[str, Load]:
    """A worker that drains offers nothing: what it still computes is demand for another."""
    sequences: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for worker in registry:
        figures = worker.figures
        offers = not worker.is_draining
        sequences[figures.model] += offers * figures.max_num_seqs
        tokens[figures.model] += offers * figures.num_blocks * figures.block_size
    return {model: Load(sequences[model], tokens[model]) for model in sequences}
