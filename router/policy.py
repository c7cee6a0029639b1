"""Which worker takes the next request.

Room is what the worker last reported, less what was sent since. A few sequences beyond
that (`WorkerFigures.look_ahead`) may wait at the worker, so that a place that falls
free is taken at the very next step; the worker applies the same rule and refuses what
exceeds it. Among workers with room the one with the fewest tokens in flight is taken,
where a request counts its prompt and its `max_tokens` until its terminal entry.

A report older than its time to live says nothing: such a worker has no room, rather
than all of it.
"""

from collections.abc import Iterable

from router.registry import WorkerState

LOAD_TTL_S = 2.0


def blocks_for(tokens: int, block_size: int) -> int:
    """KV blocks that hold this many tokens."""
    return -(-tokens // block_size)


def has_room(worker: WorkerState, prompt_tokens: int, now: float) -> bool:
    """Whether the worker would take a prompt of this length now, as far as is known."""
    load, figures = worker.load, worker.figures
    if load is None or now - load.received_at > LOAD_TTL_S:
        return False
    if load.draining or worker.refused_since_load:
        return False
    sent = [attempt.prompt_tokens for attempt in worker.submitted_since_load()]
    waiting = load.waiting + len(sent)
    if waiting < figures.look_ahead:
        return True
    claimed = blocks_for(load.waiting_tokens, figures.block_size)
    claimed += sum(blocks_for(tokens, figures.block_size) for tokens in sent)
    needed = blocks_for(prompt_tokens, figures.block_size)
    has_place = load.running + waiting < figures.max_num_seqs
    return has_place and claimed + needed <= load.free_blocks


def pick_worker(
    workers: Iterable[WorkerState], prompt_tokens: int, now: float
) -> WorkerState | None:
    """The worker with room and the fewest tokens in flight; the first of equals."""
    with_room = [worker for worker in workers if has_room(worker, prompt_tokens, now)]
    return min(with_room, key=lambda worker: worker.tokens_in_flight, default=None)
