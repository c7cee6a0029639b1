"""What one router holds of its tenants' limits, kept exactly, and its own decisions.

A router's own buckets see everything that it charges, shared or not. So they never allow
less than the shared ones would, and alone they bound what it grants while these are away.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType

from router.limit_decision import Account, Ask, Statement, Verdict
from router.store.memory_limits import MemoryLimits
from router.tenant_limits import UNLIMITED, TenantLimits

# In a router's own buckets it is the only one; how long it may be silent there does not matter.
_HERE = "here"
_HERE_LEASE_S = 60.0


@dataclass(slots=True, eq=False)
class Pending:
    """An ask that the shared limits have not answered; granted here, with `wanted` tokens."""

    hold: "Hold"
    ask: Ask


@dataclass(slots=True, eq=False)
class Book:
    """One tenant's account at this router: the truth that the stores are told.

    known     as the shared store acknowledged it last
    known_at  when, in seconds on the router's clock
    here      as this router's own buckets were told last
    pending   what is in the account and has not been granted by the shared store
    """

    tenant: str
    limits: TenantLimits = UNLIMITED
    account: Account = field(default_factory=Account)
    known: Account = field(default_factory=Account)
    known_at: float = float("-inf")
    here: Account = field(default_factory=Account)
    pending: list[Pending] = field(default_factory=list)
    holds: "set[Hold]" = field(default_factory=set)

    def confirmed(self) -> Account:
        """The account without what is pending."""
        account = replace(self.account)
        for each in self.pending:
            account.add(each.ask, each.ask.wanted, -1)
        return account

    def note_use(self) -> None:
        """Look at how much of what is reserved has been used so far."""
        for hold in self.holds:
            hold.note_use()

    def acknowledge(self, account: Account, now: float) -> None:
        """The shared store has this account now."""
        self.known, self.known_at = account, now


class Hold:
    """What one request holds: a context manager.

    `used` tells the tokens that workers have computed for it, 0 before one took it. On leaving
    everything comes back but the tokens used, and the request itself if it was served or used
    any. Of more than was reserved no more is charged. `on_change` hears that the account did.
    """

    def __init__(
        self, book: Book, used: Callable[[], int], on_change: Callable[[Book], None]
    ) -> None:
        self.book = book
        self.tokens = 0
        self._used = used
        self._on_change = on_change
        self._requests = 0
        self._concurrent = 0
        self._encodes = 0
        self._noted = 0

    def __enter__(self) -> "Hold":
        self.book.holds.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self not in self.book.holds:
            return
        self.book.holds.remove(self)
        self.note_use()
        was_served = kind is None or self._noted > 0
        account = self.book.account
        account.concurrent -= self._concurrent
        account.encodes -= self._encodes
        account.requests -= 0 if was_served else self._requests
        account.tokens -= self.tokens - self._noted
        account.open_tokens -= self.tokens - self._noted
        self._on_change(self.book)

    def take(self, ask: Ask, tokens: int) -> None:
        """It was granted this, with so many tokens."""
        self._add(ask, tokens, 1)

    def answered(self, ask: Ask, verdict: Verdict) -> None:
        """The shared limits' word about what was granted here: what they refuse goes back."""
        if self not in self.book.holds or ask.dry_run:
            return
        if verdict.refused_by is not None:
            self._add(ask, ask.wanted, -1)
        elif verdict.tokens < ask.wanted:
            self._add(Ask(), ask.wanted - verdict.tokens, -1)

    def encoded(self) -> None:
        """The prompt is in ids: the place for that goes back."""
        self.book.account.encodes -= self._encodes
        self._encodes = 0
        self._on_change(self.book)

    def keep(self, tokens: int) -> None:
        """Of the tokens reserved no more than these are needed."""
        if tokens < self.tokens:
            self._add(Ask(), self.tokens - tokens, -1)
            self._on_change(self.book)

    def note_use(self) -> None:
        """What has been used is open no more."""
        used = min(self._used(), self.tokens)
        self.book.account.open_tokens -= used - self._noted
        self._noted = used

    def _add(self, ask: Ask, tokens: int, sign: int) -> None:
        self._requests += sign * ask.requests
        self._concurrent += sign * ask.concurrent
        self._encodes += sign * ask.encodes
        self.tokens += sign * tokens
        self.book.account.add(ask, tokens, sign)


class Books:
    """All tenants' accounts at this router, with buckets of its own.

    `clock` counts seconds. `lease_s` is how long a shared store keeps what it was told of a
    router that is silent; 0: there is none.
    """

    def __init__(self, clock: Callable[[], float], lease_s: float = 0) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._here = MemoryLimits(clock)
        self._books: dict[str, Book] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._books)

    @property
    def num_holds(self) -> int:
        return sum(len(book.holds) for book in self._books.values())

    def of(self, tenant: str, limits: TenantLimits) -> Book:
        """The tenant's account, under the limits that it has now."""
        book = self._books.get(tenant)
        if book is None:
            book = self._books[tenant] = Book(tenant)
        book.limits = limits
        return book

    def holding(self) -> list[Book]:
        """Those whose leases have to be renewed, with what was used so far."""
        books = [book for book in self._books.values() if book.holds]
        for book in books:
            book.note_use()
        return books

    def decide(self, hold: Hold, ask: Ask) -> Verdict:
        """This router's own decision; what it grants is the hold's."""
        book = hold.book
        if not book.limits.are_shared:
            hold.take(ask, ask.wanted)
            book.here = replace(book.account)
            return Verdict(ask.wanted)
        (verdict,) = self._decide_here(book, (ask,))
        if verdict.refused_by is None and not ask.dry_run:
            hold.take(ask, verdict.tokens)
        book.here = replace(book.account)
        return verdict

    def statement(self, book: Book, asks: tuple[Ask, ...]) -> Statement:
        """What the shared limits are told and asked about a tenant, now."""
        self._decide_here(book, ())
        book.here = replace(book.account)
        lacking = self._here.lacking(book.tenant, book.limits)
        return Statement(
            book.tenant,
            book.limits,
            book.confirmed(),
            book.known,
            *lacking,
            number=next(self._numbers),
            asks=asks,
        )

    def _decide_here(self, book: Book, asks: tuple[Ask, ...]) -> list[Verdict]:
        statement = Statement(
            book.tenant,
            book.limits,
            replace(book.account),
            book.here,
            *_ALL,
            number=next(self._numbers),
            asks=asks,
        )
        return self._here.decide(_HERE, statement, _HERE_LEASE_S)

    def forget_idle(self) -> None:
        """Forget tenants of whom nothing is held and nothing remembered, here or in the store.

        A new account begins at zero: it must not be compared with what an old one told.
        """
        self._here.forget_idle()
        now = self._clock()
        for tenant, book in list(self._books.items()):
            untold = self._lease_s and book.limits.are_shared and book.account != book.known
            remembered = tenant in self._here or now - book.known_at <= 2 * self._lease_s
            if not (book.holds or untold or remembered):
                del self._books[tenant]


# A router's own buckets hear of every charge at once, and count all of it.
_ALL = (2**53, 2**53)
