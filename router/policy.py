"""Which worker takes the next request.

Room is what the worker last reported, less what was sent since. A few sequences beyond
that (`WorkerFigures.look_ahead`) may wait at the worker, so that a place that falls
free is taken at the very next step; the worker applies the same rule and refuses what
exceeds it. What lower priorities hold is in no higher one's way: they give up places and
blocks there (on workers that say so).

Among workers with room the lowest of these wins, in this order:

1. cost in tokens = slowness x (tokens in flight + this request's own
                                + block_size x max(0, needed - spare blocks)).
   It stands for the time until the request would be done there. Slowness: the worker's
   median step over the shortest of those with room, rounded to a whole number, at least
   1; 1 where no step was seen yet. So workers of about one speed (up to 1.5 times) are
   equal, and one four times slower is given a request once the fast one holds four
   times as much as it would.
   In flight: prompt and, for each choice, `max_tokens` of everything this router sent
   there, until its terminal entry. Needed: blocks of the same of this request. Spare: free
   blocks (cached ones included) as reported, less those of what waits there and of what
   was sent since. So KV counts where it is short, by the tokens that it is short of.
2. KV pressure = 1 - spare blocks / blocks, within [0, 1].
3. The worker that was given a request the longest ago (the order of the registry).

Signals that are missing: a load that never came, or is out of date, says
nothing, and the worker has no room rather than all of it; so has one that drains, that
refused since its report, or whose step has stalled. A worker that names no number of
blocks has no KV pressure. Another router's tokens show in the blocks and places alone.

A worker that fails requests (`router.breaker`) is passed over while there are others of its
model, but for a probe now and then.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from noria.service.limits import MIN_PRIORITY
from router.worker_state import WorkerState


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of a worker, in tokens: its prompt, and that with all its output.

    Each of its choices takes a place in the batch.
    """

    prompt_tokens: int
    price: int
    num_choices: int = 1
    priority: int = 0
    has_grammar: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The worker that was chosen, and the terms that decided, for people."""

    worker: WorkerState
    note: str


def has_room(worker: WorkerState, need: Need, now: float) -> bool:
    """Whether the worker would take such a request now, as far as is known."""
    load, figures = worker.known_load(now), worker.figures
    ahead = worker.ahead_of(need.priority)
    if load is None or ahead is None:
        return False
    if worker.refuses(need.priority, has_grammar=need.has_grammar):
        return False
    if load.draining or worker.is_stalled(now):
        return False
    sent = worker.submitted_since_load(need.priority)
    waiting = ahead.waiting + sum(attempt.num_choices for attempt in sent)
    if waiting < figures.look_ahead:
        return True
    has_place = ahead.running + waiting + need.num_choices <= figures.max_num_seqs
    wanted = _blocks_at_once(worker, need.prompt_tokens, need.num_choices)
    return has_place and wanted <= spare_blocks(worker, need.priority)


def spare_blocks(worker: WorkerState, priority: int = MIN_PRIORITY) -> int:
    """KV blocks for a request of this priority, by default the lowest: free ones and those that
    lower ones yield, less those already claimed; negative if more is claimed than there is.
    """
    ahead = worker.ahead_of(priority)
    if ahead is None:
        return 0
    claimed = worker.figures.blocks_for(ahead.waiting_tokens)
    sent = worker.submitted_since_load(priority)
    return (
        ahead.free_blocks
        - claimed
        - sum(_blocks_at_once(worker, a.prompt_tokens, a.num_choices) for a in sent)
    )


def _blocks_at_once(worker: WorkerState, prompt_tokens: int, num_choices: int) -> int:
    """KV blocks that a request takes when it enters: choices after the first share the
    prompt's full blocks, and need one of their own and a spare one, as the worker counts.
    """
    return worker.figures.blocks_for(prompt_tokens) + 2 * (num_choices - 1)


def pick_worker(workers: Iterable[WorkerState], need: Need, now: float) -> Choice | None:
    """The best worker with room; the first of equals. None: no worker has room."""
    candidates = list(workers)
    trusted = [worker for worker in candidates if worker.breaker.admits(now)]
    with_room = [worker for worker in trusted or candidates if has_room(worker, need, now)]
    if not with_room:
        return None
    fastest_s = min((w.usual_step_s for w in with_room if w.usual_step_s), default=None)
    best = min(with_room, key=lambda w: (_cost(w, need, fastest_s), kv_pressure(w)))
    note = (
        f"lowest cost of {len(with_room)} with room, {len(candidates)} in all: "
        f"{best.tokens_in_flight} tokens in flight, {_missing_tokens(best, need)} short of KV, "
        f"KV {kv_pressure(best):.0%} used"
    )
    failing = sum(worker.breaker.is_open for worker in candidates)
    note += f"; {failing} of all failing" if failing else ""
    return Choice(best, note)


def kv_pressure(worker: WorkerState) -> float:
    """The share of a worker's blocks that are in use or claimed, in [0, 1]."""
    blocks = worker.figures.num_blocks
    return min(1.0, max(0.0, 1 - spare_blocks(worker) / blocks)) if blocks else 0.0


def _cost(worker: WorkerState, need: Need, fastest_s: float | None) -> int:
    tokens = worker.tokens_in_flight + need.price + _missing_tokens(worker, need)
    return slowness(worker.usual_step_s, fastest_s) * tokens


def slowness(step_s: float | None, fastest_s: float | None) -> int:
    """How many times longer a worker's steps take than the fastest's; 1 if unknown."""
    return max(1, round(step_s / fastest_s)) if step_s and fastest_s else 1


def _missing_tokens(worker: WorkerState, need: Need) -> int:
    missing = worker.figures.blocks_for(need.price) - spare_blocks(worker, need.priority)
    return worker.figures.block_size * max(0, missing)
