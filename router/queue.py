"""One bounded queue: strict priorities, order of arrival within one.

Every decision is synchronous; whoever holds a permit waits on something else. A permit
is a place in the queue from admission until a worker takes the request, and leaves
with its holder, however that ends.
"""

import bisect
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from noria.reasons import Reason, RequestError

T = TypeVar("T")

_RATE_WINDOW_S = 30.0
_UNKNOWN_PACE_RETRY_S = 5.0
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 30.0


class Permit(Generic[T]):
    """A place in the queue: a context manager. `item` waits for `model` once `wait` is called."""

    def __init__(self, queue: "RequestQueue[T]", arrival: int, owner: str) -> None:
        self._queue = queue
        self.owner = owner
        self.arrival = arrival
        self.inside = True
        self.waiting = False
        self.model = ""
        self.priority = 0
        self.tokens = 0
        self.item: T | None = None
        # Since when it has been the head of its line without fitting anywhere.
        self.blocked_since: float | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first."""
        return (-self.priority, self.arrival)

    def __enter__(self) -> "Permit[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()
        self.item = None

    def leave(self) -> None:
        """Give the place back; idempotent."""
        self._queue.leave(self)


class RequestQueue(Generic[T]):
    """Requests that no worker has taken yet, those still being encoded included.

    At most `max_requests` of them; at most `max_tokens` prompt tokens wait, except that
    an empty queue takes a prompt of any length.
    """

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._arrivals = 0
        self._waiting: dict[str, list[Permit[T]]] = {}
        self._drained: deque[float] = deque()
        self._of_owner: Counter[str] = Counter()
        self.num_requests = 0
        self.num_tokens = 0

    def permit(self, owner: str = "", share: float | None = None) -> Permit[T]:
        """Take a place; of all places `owner` may have this share, and one in any case.

        Raises QUEUE_FULL, QUEUE_SHARE with the time after which one may be free.
        """
        if self.num_requests >= self._max_requests:
            raise self._full(f"{self.num_requests} requests, at most {self._max_requests}")
        self._check_share(owner, share)
        self._arrivals += 1
        permit = Permit(self, self._arrivals, owner)
        self._count(permit, 1)
        return permit

    def wait(self, permit: Permit[T], item: T, *, model: str, priority: int, tokens: int) -> None:
        """Stand in line for a worker of `model`. Raises QUEUE_FULL."""
        self.check_tokens(tokens)
        permit.item, permit.model = item, model
        permit.priority, permit.tokens = priority, tokens
        self._insert(permit)

    def models(self) -> list[str]:
        """Models for which something waits."""
        return list(self._waiting)

    def head(self, model: str) -> Permit[T] | None:
        """Who is next for `model`."""
        line = self._waiting.get(model)
        return line[0] if line else None

    def waiting_for(self, model: str) -> list[Permit[T]]:
        """All who wait for `model`, next first."""
        return list(self._waiting.get(model, ()))

    def behind(self, permit: Permit[T], count: int) -> list[Permit[T]]:
        """Up to `count` that come right after one that waits."""
        first = self.position(permit) + 1
        return self._waiting[permit.model][first : first + count]

    def position(self, permit: Permit[T]) -> int:
        """How many wait in front of one that waits."""
        line = self._waiting[permit.model]
        return bisect.bisect_left(line, permit.rank, key=lambda other: other.rank)

    def position_of_next(self, model: str, priority: int) -> int:
        """How many would wait in front of one that came now."""
        rank = (-priority, self._arrivals + 1)
        return bisect.bisect_left(self._waiting.get(model, ()), rank, key=lambda other: other.rank)

    def check_tokens(self, tokens: int) -> None:
        """Raises QUEUE_FULL if a prompt of this length may not wait now."""
        if self.num_tokens and self.num_tokens + tokens > self._max_tokens:
            held = f"{self.num_tokens} tokens and {tokens} more, at most {self._max_tokens}"
            raise self._full(held)

    def take(self, permit: Permit[T]) -> None:
        """A worker takes the request: its place and tokens are free again."""
        self.leave(permit)
        permit.blocked_since = None
        self._drained.append(self._clock())

    def put_back(self, permit: Permit[T]) -> None:
        """Back to where it stood, at the head of its priority, however full the queue is."""
        if permit.inside:
            return
        permit.inside = True
        self._count(permit, 1)
        self._insert(permit)

    def leave(self, permit: Permit[T]) -> None:
        """Give the place back; idempotent."""
        if permit.waiting:
            self._remove(permit)
        if permit.inside:
            permit.inside = False
            self._count(permit, -1)

    def _count(self, permit: Permit[T], change: int) -> None:
        self.num_requests += change
        self._of_owner[permit.owner] += change
        if not self._of_owner[permit.owner]:
            del self._of_owner[permit.owner]

    def _check_share(self, owner: str, share: float | None) -> None:
        places = self._max_requests if share is None else max(1, int(share * self._max_requests))
        if self._of_owner[owner] >= places:
            held = f"{self._of_owner[owner]} requests wait, at most {places} of the queue's places"
            raise RequestError(
                Reason.QUEUE_SHARE,
                f"queue_share: {held}",
                retry_after_s=self.retry_after_s(),
                quota=("queue_share", held),
            )

    def _insert(self, permit: Permit[T]) -> None:
        line = self._waiting.setdefault(permit.model, [])
        bisect.insort(line, permit, key=lambda other: other.rank)
        permit.waiting = True
        self.num_tokens += permit.tokens

    def _remove(self, permit: Permit[T]) -> None:
        line = self._waiting[permit.model]
        del line[self.position(permit)]
        if not line:
            del self._waiting[permit.model]
        permit.waiting = False
        self.num_tokens -= permit.tokens

    def _full(self, held: str) -> RequestError:
        return RequestError(
            Reason.QUEUE_FULL,
            f"the queue is full: {held}",
            retry_after_s=self.retry_after_s(),
            quota=("queue", held),
        )

    def retry_after_s(self) -> float:
        """Seconds in which the recent pace frees one place, between 1 and 30."""
        now = self._clock()
        while self._drained and self._drained[0] < now - _RATE_WINDOW_S:
            self._drained.popleft()
        if not self._drained:
            return _UNKNOWN_PACE_RETRY_S
        per_place = (now - self._drained[0]) / len(self._drained)
        return min(max(per_place, _MIN_RETRY_S), _MAX_RETRY_S)
