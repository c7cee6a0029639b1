"""Limits within one process."""

import time
from collections.abc import Callable, Sequence

from router import token_bucket
from router.limit_decision import Statement, TenantState, Verdict, exchange
from router.tenant_limits import TenantLimits


class MemoryLimits:
    """A `LimitStore` for the routers of one process.

    `clock` counts seconds. A tenant is forgotten once nothing of it could be told from one
    that was never there.
    """

    available = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, TenantState] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._tenants

    async def wait_available(self) -> None:
        return

    async def exchange(
        self, router: str, statements: Sequence[Statement], lease_s: float
    ) -> list[list[Verdict]]:
        self.forget_idle()
        return [self.decide(router, statement, lease_s) for statement in statements]

    def decide(self, router: str, statement: Statement, lease_s: float) -> list[Verdict]:
        """What `exchange` does, for one statement and at once."""
        now_ms = self._now_ms()
        state = self._tenants.setdefault(statement.tenant, TenantState(now_ms))
        return exchange(state, router, statement, int(lease_s * 1000), now_ms)

    def lacking(self, tenant: str, limits: TenantLimits) -> tuple[int, int]:
        """Requests and tokens, rounded up, that the tenant's buckets lacked when last decided."""
        state = self._tenants.get(tenant)
        if state is None:
            return 0, 0
        return (
            _lacking(state.requests_level, limits.requests_per_minute),
            _lacking(state.tokens_level, limits.tokens_per_minute),
        )

    def forget_idle(self) -> None:
        """Forget tenants whose leases have run out, if their buckets must be full again."""
        now_ms = self._now_ms()
        for tenant, state in list(self._tenants.items()):
            leases = state.leases.values()
            idle = all(lease.expires_ms <= now_ms for lease in leases)
            if idle and now_ms - state.at_ms >= token_bucket.FULL_AFTER_MS:
                del self._tenants[tenant]

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _lacking(level: int | None, per_minute: int | None) -> int:
    if level is None or per_minute is None:
        return 0
    return -(-(token_bucket.full(per_minute) - level) // token_bucket.UNITS)
