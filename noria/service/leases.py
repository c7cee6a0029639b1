"""How leases stand in Redis: what whoever holds one and whoever looks for them share.

One sorted set for each kind: holders by the time at which their leases run out, in
milliseconds of Redis's own clock, so that no two clocks have to agree.
"""

WORKERS = "workers"

# KEYS: the set. ARGV: holder, time to live in ms.
RENEW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
redis.call('PEXPIREAT', KEYS[1], math.ceil(tonumber(last[2])))
return 1
"""

# KEYS: the set.
LIVE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')
"""


def leases_key(kind: str) -> str:
    return f"noria:leases:{kind}"
