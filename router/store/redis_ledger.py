"""The ledger in Redis.

A router's open rows are a hash by request id, a day's closed rows another. A tenant's totals of
a day are a hash of their own, with one field for each count, so that nobody's question reads what
is others'. All of a day expires by itself. Each row is written by one script, so that rows and
totals cannot disagree.
"""

import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Sequence
from dataclasses import astuple
from datetime import UTC, date, datetime
from typing import Any

from redis.asyncio import Redis

from router.ledger.row import LOST, UsageRow, decode_price, decode_row, encode_price, encode_row
from router.ledger.totals import COUNT_NAMES, Counts, Heading, Totals, counts_of, heading_of
from router.store.base import PREFIX
from router.store.ledger_store import DAY_S, KEPT, Retention
from router.store.redis_connection import RedisConnection, Script

_LEDGER = f"{PREFIX}{{ledger}}:"
_ROUTERS = f"{_LEDGER}routers"
# Open rows that one call closes, and fields that one call reads.
_SWEPT, _READ = 50, 1000

# KEYS: closed rows of the day, open rows of the router, routers with open rows.
# ARGV: router, then request id and row of each.
_OPEN = Script("""
for i = 2, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 0 then
    redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1])
    redis.call('SADD', KEYS[3], ARGV[1])
  end
end
return 1
""")

# KEYS: closed rows of the day, the tenant's totals of it, open rows of the router, tenants with
# totals of the day. ARGV: when rows expire, when totals do, whether only open rows are closed
# (1), the tenant, the names of the counts with commas; then for each row its request id, itself,
# its heading and the counts.
# A row that says LOST has counted one request and one lost one, and nothing else.
# Gives how many rows it closed.
_CLOSE = Script(f"""
local names = {{}}
for name in string.gmatch(ARGV[5], '[^,]+') do names[#names + 1] = name end
local only_open, closed = ARGV[3] == '1', 0

local function close(at)
  local id, row, heading = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local opened = redis.call('HDEL', KEYS[3], id)
  if only_open and opened == 0 then return end
  local before = redis.call('HGET', KEYS[1], id)
  if before then
    if only_open or cjson.decode(before)['outcome'] ~= '{LOST}' then return end
    redis.call('HINCRBY', KEYS[2], heading .. 'requests', -1)
    redis.call('HINCRBY', KEYS[2], heading .. 'lost', -1)
  end
  redis.call('HSET', KEYS[1], id, row)
  for i, name in ipairs(names) do
    redis.call('HINCRBY', KEYS[2], heading .. name, ARGV[at + 2 + i])
  end
  closed = closed + 1
end

for at = 6, #ARGV, 3 + #names do close(at) end
if closed == 0 then return 0 end
redis.call('SADD', KEYS[4], ARGV[4])
redis.call('EXPIREAT', KEYS[1], ARGV[1])
redis.call('EXPIREAT', KEYS[2], ARGV[2])
redis.call('EXPIREAT', KEYS[4], ARGV[2])
return closed
""")

# KEYS: open rows of the router, routers with open rows. ARGV: router.
_FORGET = Script("""
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('SREM', KEYS[2], ARGV[1]) end
return 1
""")


class RedisLedger:
    """A `LedgerStore` that all replicas share."""

    def __init__(self, connection: RedisConnection, retention: Retention = KEPT) -> None:
        self._connection = connection
        self._retention = retention

    async def open(self, rows: Sequence[UsageRow]) -> None:
        grouped: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            entry = grouped.setdefault((row.day, row.router_id), [])
            entry += [row.request_id, encode_row(row)]
        for (day, router_id), entries in grouped.items():
            keys = [_rows_key(day), _open_key(router_id), _ROUTERS]
            await self._connection.evaluate(_OPEN, keys, [router_id, *entries])

    async def close(self, rows: Sequence[UsageRow]) -> None:
        await self._close(rows, only_open=False)

    async def orphans(self, live: Collection[str]) -> list[str]:
        known = await self._connection.call(lambda client: client.smembers(_ROUTERS))
        return sorted(set(map(str, known)) - set(live))

    async def lose(self, router_id: str, now_us: int) -> int:
        key = _open_key(router_id)
        found: Any = await self._connection.call(
            lambda client: client.hrandfield(key, _SWEPT, withvalues=True)
        )
        if not found:
            await self._connection.evaluate(_FORGET, [key, _ROUTERS], [router_id])
            return 0
        opened = {
            ident: _open_row(text) for ident, text in zip(found[::2], found[1::2], strict=True)
        }
        unreadable = [ident for ident, row in opened.items() if row is None]
        if unreadable:
            # Nobody can book them, and they would keep others from being found.
            await self._connection.call(lambda client: client.hdel(key, *unreadable))
        rows = [row.lost(now_us) for row in opened.values() if row is not None]
        return await self._close(rows, only_open=True) + len(unreadable)

    async def rows(self, day: str) -> list[UsageRow]:
        return await self._hash_of_rows(_rows_key(day))

    async def open_rows(self, router_id: str) -> list[UsageRow]:
        return await self._hash_of_rows(_open_key(router_id))

    async def totals(self, days: Sequence[str], tenant: str | None) -> Totals:
        totals: dict[Heading, dict[str, int]] = {}
        for day in days:
            for each in await self._tenants(day) if tenant is None else [tenant]:
                async for field, count in self._fields(_totals_key(day, each)):
                    heading, name = _read_field(day, each, field)
                    if name in COUNT_NAMES:
                        totals.setdefault(heading, {})[name] = int(count)
        counted = {heading: Counts(**counts) for heading, counts in totals.items()}
        return {heading: counts for heading, counts in counted.items() if counts != Counts()}

    async def _tenants(self, day: str) -> list[str]:
        """Those that have totals of a day."""
        key = _tenants_key(day)
        found = await self._connection.call(lambda client: client.smembers(key))
        return sorted(map(str, found))

    async def _close(self, rows: Iterable[UsageRow], *, only_open: bool) -> int:
        """How many of them this closed."""
        grouped: dict[tuple[str, str, str], list[str | int]] = {}
        for row in rows:
            entry = grouped.setdefault((row.day, row.tenant, row.router_id), [])
            entry += [row.request_id, encode_row(row), _field(heading_of(row), "")]
            entry += astuple(counts_of(row))
        closed = 0
        for (day, tenant, router_id), entries in grouped.items():
            keys = [_rows_key(day), _totals_key(day, tenant), _open_key(router_id)]
            kept = [
                _end_of(day, self._retention.row_days),
                _end_of(day, self._retention.total_days),
            ]
            names = ",".join(COUNT_NAMES)
            args = [*kept, int(only_open), tenant, names, *entries]
            keys.append(_tenants_key(day))
            closed += await self._connection.evaluate(_CLOSE, keys, args)
        return closed

    async def _hash_of_rows(self, key: str) -> list[UsageRow]:
        return [decode_row(text) async for _, text in self._fields(key)]

    async def _fields(self, key: str) -> AsyncIterator[tuple[str, str]]:
        """All of a hash, a part at a time: others are served in between."""
        cursor, seen = 0, set[str]()
        while True:
            read: Any = await self._connection.call(
                functools.partial(_scan, key=key, cursor=cursor)
            )
            cursor, found = read
            for field, value in found.items():
                # A scan may give a field twice.
                if field not in seen:
                    seen.add(field)
                    yield field, value
            if not cursor:
                return


def _open_row(text: str) -> UsageRow | None:
    """None for what is no row that could be booked to a day."""
    with contextlib.suppress(
        ValueError, TypeError, KeyError, AttributeError, ArithmeticError, OSError
    ):
        row = decode_row(text)
        if row.day and row.tenant:
            return row
    return None


def _scan(client: Redis, key: str, cursor: int) -> Awaitable[Any]:
    return client.hscan(key, cursor, count=_READ)


def _rows_key(day: str) -> str:
    return f"{_LEDGER}rows:{day}"


def _totals_key(day: str, tenant: str) -> str:
    return f"{_LEDGER}totals:{day}:{tenant}"


def _tenants_key(day: str) -> str:
    return f"{_LEDGER}tenants:{day}"


def _open_key(router_id: str) -> str:
    return f"{_LEDGER}open:{router_id}"


def _end_of(day: str, days_after: int) -> int:
    """Seconds since the epoch at which what belongs to a day need no longer be kept."""
    midnight = datetime.combine(date.fromisoformat(day), datetime.min.time(), UTC)
    return round(midnight.timestamp()) + (1 + days_after) * DAY_S


def _field(heading: Heading, name: str) -> str:
    """A field of a tenant's totals: what it is about as a line of JSON, and which count it is."""
    price = encode_price(heading.price) if heading.price else None
    return json.dumps([heading.model, price]) + "\n" + name


def _read_field(day: str, tenant: str, field: str) -> tuple[Heading, str]:
    about, _, name = field.partition("\n")
    model, price = json.loads(about)
    return Heading(day, tenant, model, decode_price(price) if price else None), name
