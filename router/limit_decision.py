"""What a tenant may take now: the one decision, made from what all routers told.

Each router tells absolute figures: what it holds for a tenant now, and what it has charged
since its start. Telling them twice, or again after an answer was lost, changes nothing. What
a router holds is leased: one that is silent for longer than the lease holds nothing any more,
and gets back what it had reserved without using it.

No I/O and no clock. `store/limits.lua` makes the same decision; tests hold the two together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from router import token_bucket
from router.tenant_limits import TenantLimits

# Nobody knows when a running request ends: what is told of the wait for its place.
PLACE_WAIT_MS = 1000


class Limit(IntEnum):
    """What refuses. Of several the one with the longest wait is told, of equals the first."""

    REQUESTS_PER_MINUTE = 1
    TOKENS_PER_MINUTE = 2
    CONCURRENT_REQUESTS = 3
    CONCURRENT_ENCODES = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request would take, all or nothing; of tokens `needed` at least, `wanted` at best.

    A dry run takes nothing.
    """

    requests: int = 0
    concurrent: int = 0
    encodes: int = 0
    needed: int = 0
    wanted: int = 0
    dry_run: bool = False


@dataclass(slots=True)
class Account:
    """One router's figures for one tenant.

    `concurrent` and `encodes` are held now; `requests` and `tokens` were charged since the
    router's start, less what was given back; `open_tokens` of the charged ones are reserved
    and not used so far.
    """

    concurrent: int = 0
    encodes: int = 0
    requests: int = 0
    tokens: int = 0
    open_tokens: int = 0

    @property
    def holds_anything(self) -> bool:
        return bool(self.concurrent or self.encodes or self.open_tokens)

    def add(self, ask: Ask, tokens: int, sign: int = 1) -> None:
        """Book what was granted to an ask; with sign -1 take it back."""
        self.requests += sign * ask.requests
        self.concurrent += sign * ask.concurrent
        self.encodes += sign * ask.encodes
        self.tokens += sign * tokens
        self.open_tokens += sign * tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """`refused_by` None: granted, with so many tokens, and so many `left` of those per minute.

    A refusal tells after how many milliseconds it may pass, and what is `left` of the limit.
    """

    tokens: int = 0
    refused_by: Limit | None = None
    wait_ms: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Statement:
    """What one router tells of a tenant, and what it asks for its requests, in order.

    `number` grows with each that a router makes: one that was overtaken is not heard. `known`
    is the account as the store acknowledged it last. A charge that was told late counts no more
    than what this router's own bucket still lacks: the rest was refilled meanwhile.
    """

    tenant: str
    limits: TenantLimits
    account: Account
    known: Account
    lacking_requests: int
    lacking_tokens: int
    number: int
    asks: Sequence[Ask] = ()


@dataclass(slots=True)
class Lease:
    """A router's account, until `expires_ms`, as its statement of this number told it."""

    expires_ms: int
    account: Account
    number: int


@dataclass(slots=True)
class TenantState:
    """What is known of a tenant; levels as in `token_bucket`, None: never limited so far."""

    at_ms: int
    requests_level: int | None = None
    tokens_level: int | None = None
    leases: dict[str, Lease] = field(default_factory=dict)


def exchange(
    state: TenantState, router: str, statement: Statement, lease_ms: int, now_ms: int
) -> list[Verdict]:
    """Take over what a router tells and decide what it asks; a verdict for each ask.

    What arrives after a later statement, from a connection that was given up, changes nothing
    and gets no verdicts: nobody waits for them.
    """
    limits, lease = statement.limits, state.leases.get(router)
    if lease is not None and lease.expires_ms > now_ms and statement.number <= lease.number:
        return []
    _advance(state, limits, now_ms)
    _expire(state, limits, lease_ms)
    account = _take_over(state, state.leases.get(router), statement)
    state.leases[router] = Lease(now_ms + lease_ms, account, statement.number)
    return [_decide(state, limits, account, ask) for ask in statement.asks]


def _advance(state: TenantState, limits: TenantLimits, now_ms: int) -> None:
    """Refill the buckets. After a step back the clock counts from where it stands now."""
    elapsed_ms = now_ms - state.at_ms
    state.at_ms = now_ms
    state.requests_level = _refilled(state.requests_level, limits.requests_per_minute, elapsed_ms)
    state.tokens_level = _refilled(state.tokens_level, limits.tokens_per_minute, elapsed_ms)


def _refilled(level: int | None, per_minute: int | None, elapsed_ms: int) -> int | None:
    if per_minute is None:
        return None
    if level is None:
        return token_bucket.full(per_minute)
    # The limit may have been lowered since.
    level = max(level, -token_bucket.full(per_minute))
    return token_bucket.refilled(level, per_minute, elapsed_ms)


def _expire(state: TenantState, limits: TenantLimits, lease_ms: int) -> None:
    """Drop whoever has been silent; what it reserved and did not use comes back."""
    unused = 0
    for router, lease in list(state.leases.items()):
        # A clock that stepped back must not lengthen a lease.
        lease.expires_ms = min(lease.expires_ms, state.at_ms + lease_ms)
        if lease.expires_ms <= state.at_ms:
            unused += lease.account.open_tokens
            del state.leases[router]
    _charge(state, limits, 0, -unused)


def _take_over(state: TenantState, lease: Lease | None, statement: Statement) -> Account:
    """Charge what the router charged since it was heard last."""
    account, known = statement.account, statement.known
    # Without a lease: new here, or its lease ran out and its open tokens were given back.
    before = lease.account if lease else replace(known, tokens=known.tokens - known.open_tokens)
    requests = min(account.requests - before.requests, statement.lacking_requests)
    tokens = min(account.tokens - before.tokens, statement.lacking_tokens)
    _charge(state, statement.limits, requests, tokens)
    return replace(account)


def _charge(state: TenantState, limits: TenantLimits, requests: int, tokens: int) -> None:
    if state.requests_level is not None and limits.requests_per_minute is not None:
        state.requests_level = token_bucket.charged(
            state.requests_level, limits.requests_per_minute, requests
        )
    if state.tokens_level is not None and limits.tokens_per_minute is not None:
        state.tokens_level = token_bucket.charged(
            state.tokens_level, limits.tokens_per_minute, tokens
        )


def _decide(state: TenantState, limits: TenantLimits, account: Account, ask: Ask) -> Verdict:
    refusals = _refusals(state, limits, ask)
    if refusals:
        return max(refusals, key=lambda verdict: verdict.wait_ms)
    tokens = ask.wanted
    if state.tokens_level is not None:
        tokens = min(tokens, token_bucket.left(state.tokens_level))
    if not ask.dry_run:
        _charge(state, limits, ask.requests, tokens)
        account.add(ask, tokens)
    return Verdict(tokens, left=token_bucket.left(state.tokens_level or 0))


def _refusals(state: TenantState, limits: TenantLimits, ask: Ask) -> list[Verdict]:
    """In the order of `Limit`."""
    accounts = [lease.account for lease in state.leases.values()]
    checks = (
        _lacks(
            Limit.REQUESTS_PER_MINUTE,
            state.requests_level,
            limits.requests_per_minute,
            ask.requests,
        ),
        _lacks(Limit.TOKENS_PER_MINUTE, state.tokens_level, limits.tokens_per_minute, ask.needed),
        _crowded(
            Limit.CONCURRENT_REQUESTS,
            sum(account.concurrent for account in accounts),
            limits.concurrent_requests,
            ask.concurrent,
        ),
        _crowded(
            Limit.CONCURRENT_ENCODES,
            sum(account.encodes for account in accounts),
            limits.concurrent_encodes,
            ask.encodes,
        ),
    )
    return [verdict for verdict in checks if verdict is not None]


def _lacks(limit: Limit, level: int | None, per_minute: int | None, amount: int) -> Verdict | None:
    if level is None or per_minute is None or not amount:
        return None
    wait_ms = token_bucket.wait_ms(level, per_minute, amount)
    return Verdict(0, limit, wait_ms, token_bucket.left(level)) if wait_ms else None


def _crowded(limit: Limit, held: int, bound: int | None, more: int) -> Verdict | None:
    if bound is None or not more or held + more <= bound:
        return None
    return Verdict(0, limit, PLACE_WAIT_MS, max(0, bound - held))
