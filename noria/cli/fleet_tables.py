"""What `noria status` and `noria ps` show: plain text, a line for each thing."""

from collections.abc import Iterable, Sequence

from noria.cli.administering import columns
from noria.cli.terminal import one_line
from noria.v1 import admin_pb2, common_pb2

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_UNREACHABLE = admin_pb2.WORKER_STATE_UNREACHABLE
_READY = admin_pb2.WORKER_STATE_READY


def status(fleet: admin_pb2.GetFleetResponse) -> str:
    """The whole fleet as one router sees it: itself, then a table for each kind."""
    parts = [_router(fleet), _models(fleet), _workers(fleet.workers)]
    return "\n\n".join([*parts, _tokenizers(fleet.tokenizers)])


def requests(listed: admin_pb2.ListRequestsResponse) -> str:
    """Requests being answered now, oldest first."""
    head = ("REQUEST", "TENANT", "MODEL", "PHASE", "AGE", "IN", "OUT", "WORKER")
    rows = [
        (
            each.request_id,
            each.tenant,
            one_line(each.model),
            _lower(common_pb2.PhaseKind.Name(each.phase), "PHASE_KIND_"),
            _age(each.age_s),
            _number(each.input_tokens),
            str(each.output_tokens),
            one_line(each.worker_id),
        )
        for each in listed.requests
    ]
    hidden = listed.total - len(listed.requests)
    return columns(head, rows) + (f"\n... and {hidden} more" if hidden else "")


def drained(response: admin_pb2.DrainWorkerResponse, *, undo: bool) -> str:
    """What has become of a worker that was told to drain, and of its model."""
    worker, model = response.worker, one_line(response.worker.model)
    if undo:
        return f"{worker.worker_id} takes requests again"
    told = f"{worker.worker_id} takes nothing new; {_left(worker)}"
    if response.others_ready:
        return f"{told}; {_count(response.others_ready, 'other worker')} of {model}"
    return f"{told}\nno other worker serves {model}: its requests wait until one does"


def _left(worker: admin_pb2.WorkerStatus) -> str:
    left = worker.running + worker.waiting
    return f"{_count(left, 'sequence')} left" if left else "it is empty"


def _router(fleet: admin_pb2.GetFleetResponse) -> str:
    router, store = fleet.router, fleet.store
    state = "ready" if router.ready else "not ready"
    queued = f"{router.queued_requests} of {router.max_queued_requests} queued"
    shared = ("Redis" if store.up else "Redis, away") if store.shared else "this router's own"
    return "\n".join(
        [
            f"router {router.instance_id} ({router.version or 'version unknown'}): {state},"
            f" up {_age(router.uptime_s)}",
            f"requests: {router.live_requests} being answered, {queued}",
            f"store: {shared}",
        ]
    )


def _models(fleet: admin_pb2.GetFleetResponse) -> str:
    head = ("MODEL", "WORKERS", "RUNNING", "WAITING", "QUEUED", "KV", "TOKENS/S", "ALIASES")
    rows = []
    for model in fleet.models:
        workers = [each for each in fleet.workers if each.model == model.name]
        ready = sum(each.state == _READY for each in workers)
        rows.append(
            (
                one_line(model.name),
                f"{ready}/{len(workers)} ready",
                _part(workers, "running", "max_num_seqs"),
                str(sum(each.waiting for each in workers)),
                str(model.queued_requests),
                _kv(workers),
                f"{sum(each.tokens_per_second for each in workers):.0f}",
                ", ".join(map(one_line, model.aliases)),
            )
        )
    return columns(head, rows)


def _workers(workers: Iterable[admin_pb2.WorkerStatus]) -> str:
    head = ("WORKER", "MODEL", "STATE", "RUNNING", "WAITING", "KV", "TOKENS/S", "BREAKER")
    return columns(head, [_worker(each) for each in workers])


def _worker(worker: admin_pb2.WorkerStatus) -> Sequence[str]:
    state = _lower(admin_pb2.WorkerState.Name(worker.state), "WORKER_STATE_")
    if worker.state == _UNREACHABLE:
        return (one_line(worker.worker_id), "", state, *[""] * 5)
    if worker.state == admin_pb2.WORKER_STATE_STALLED:
        state = f"{state} {_age(worker.step_age_s)}"
    return (
        one_line(worker.worker_id),
        one_line(worker.model),
        state,
        _part([worker], "running", "max_num_seqs"),
        str(worker.waiting),
        _kv([worker]),
        f"{worker.tokens_per_second:.0f}",
        _lower(admin_pb2.BreakerState.Name(worker.breaker), "BREAKER_STATE_"),
    )


def _tokenizers(tokenizers: Iterable[admin_pb2.TokenizerStatus]) -> str:
    rows = [
        (
            one_line(each.address),
            one_line(each.model),
            "up" if each.up else "away",
            str(each.open_outputs),
        )
        for each in tokenizers
    ]
    return columns(("TOKENIZER", "MODEL", "STATE", "OPEN"), rows)


def _part(workers: Sequence[admin_pb2.WorkerStatus], part: str, whole: str) -> str:
    held, places = (sum(getattr(each, name) for each in workers) for name in (part, whole))
    return f"{held}/{places}"


def _kv(workers: Sequence[admin_pb2.WorkerStatus]) -> str:
    """The share of KV blocks that is needed now; cached prefixes are not."""
    blocks = sum(each.num_blocks for each in workers)
    free = sum(each.free_blocks for each in workers)
    return f"{max(0, blocks - free) / blocks:.0%}" if blocks else ""


def _lower(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", "-")


def _number(count: int) -> str:
    return str(count) if count else ""


def _count(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _age(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.1f}s"
    if seconds < _HOUR:
        return f"{int(seconds) // _MINUTE}m{int(seconds) % _MINUTE:02}s"
    if seconds < _DAY:
        return f"{int(seconds) // _HOUR}h{int(seconds) % _HOUR // _MINUTE:02}m"
    return f"{int(seconds) // _DAY}d{int(seconds) % _DAY // _HOUR:02}h"
