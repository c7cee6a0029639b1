"""How much a tenant may ask for; the fields of its record, checked."""

from dataclasses import dataclass, fields

# Levels of buckets are whole numbers below 2**53 (see `router.token_bucket`).
MAX_PER_MINUTE = 10**10
MAX_CONCURRENT = 10**6


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Bounds shared by all routers; None: only those of the server.

    requests_per_minute  requests that may begin; up to a minute's worth at once
    tokens_per_minute    prompt and output tokens; up to a minute's worth at once
    concurrent_requests  running at the same time, each choice of `n` counted
    concurrent_encodes   prompts being turned into ids at the same time
    queue_share          above 0, at most 1: the part of each router's queue that it may fill

    Raises ValueError naming the field, the value and the bounds.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    concurrent_encodes: int | None = None
    queue_share: float | None = None

    def __post_init__(self) -> None:
        for name, bound in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= bound:
                raise ValueError(f"{name}: {value}; from 1 to {bound}")
        if self.queue_share is not None and not 0 < self.queue_share <= 1:
            raise ValueError(f"queue_share: {self.queue_share:g}; above 0, at most 1")

    @property
    def are_shared(self) -> bool:
        """Whether routers have anything to tell each other; the queue is each one's own."""
        return any(getattr(self, name) is not None for name in _BOUNDS)


_BOUNDS = {
    "requests_per_minute": MAX_PER_MINUTE,
    "tokens_per_minute": MAX_PER_MINUTE,
    "concurrent_requests": MAX_CONCURRENT,
    "concurrent_encodes": MAX_CONCURRENT,
}
LIMIT_FIELDS = tuple(field.name for field in fields(TenantLimits))
UNLIMITED = TenantLimits()
