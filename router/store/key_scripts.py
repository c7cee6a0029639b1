"""The Lua that changes keys and tenants in Redis, each change whole or not at all.

All names share the tag {keys}, and so a slot of a cluster:

tenants    hash: name -> JSON
keys       hash: id -> JSON
ids        hash: tenant -> ids of its keys, oldest first, separated by spaces
changed    sorted set: `t:NAME` and `k:ID` by the version at which they last changed
meta       hash: `epoch` (random, made with the first change), `version` (counts changes),
           `floor` (what changed before it may be missing in `changed`)
audit      stream: who changed what

Times are milliseconds of Redis's own clock. Tenants are never decoded here, since cjson
makes an empty list an object.
"""

from router.store.base import PREFIX
from router.store.redis_connection import Script

NAMES = tuple(
    f"{PREFIX}{{keys}}:{part}" for part in ("tenants", "keys", "ids", "changed", "meta", "audit")
)
# Entries of `changed`; whoever has seen less than the oldest of them reads everything.
_MAX_CHANGED = 10_000

_COMMON = (
    """
local TENANTS, KEYS_, IDS, CHANGED, META, AUDIT = unpack(KEYS)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function is_live(key)
  return not key.revoked_ms and (not key.expires_ms or key.expires_ms > now)
end

local function key_of(id)
  local text = redis.call('HGET', KEYS_, id)
  return text and cjson.decode(text)
end

local function ids_of(tenant)
  local ids = {}
  for id in string.gmatch(redis.call('HGET', IDS, tenant) or '', '%S+') do
    table.insert(ids, id)
  end
  return ids
end

local function live_of(tenant)
  local live = {}
  for _, id in ipairs(ids_of(tenant)) do
    local key = key_of(id)
    if key and is_live(key) then table.insert(live, id) end
  end
  return live
end

local function touch(member)
  local version = redis.call('HINCRBY', META, 'version', 1)
  redis.call('ZADD', CHANGED, version, member)
  local surplus = redis.call('ZCARD', CHANGED) - """
    + str(_MAX_CHANGED)
    + """
  if surplus > 0 then
    local gone = redis.call('ZPOPMIN', CHANGED, surplus)
    redis.call('HSET', META, 'floor', gone[#gone])
  end
end

local function put(id, key)
  local text = cjson.encode(key)
  redis.call('HSET', KEYS_, id, text)
  touch('k:' .. id)
  return text
end

local function put_tenant(name, text, epoch)
  redis.call('HSETNX', META, 'epoch', epoch)
  redis.call('HSET', TENANTS, name, text)
  touch('t:' .. name)
end

local function note(by, action, tenant, id, max)
  redis.call('XADD', AUDIT, 'MAXLEN', '~', max, '*', 'at_ms', now, 'by', by,
             'action', action, 'tenant', tenant, 'key_id', id)
end

local function add(tenant, id, sha256, label, lasts_ms, max_void)
  local before, ids, void = ids_of(tenant), {}, -max_void
  for _, each in ipairs(before) do
    local key = key_of(each)
    if not (key and is_live(key)) then void = void + 1 end
  end
  for _, each in ipairs(before) do
    local key = key_of(each)
    if void > 0 and not (key and is_live(key)) then
      void = void - 1
      redis.call('HDEL', KEYS_, each)
      touch('k:' .. each)
    else
      table.insert(ids, each)
    end
  end
  table.insert(ids, id)
  redis.call('HSET', IDS, tenant, table.concat(ids, ' '))
  local key = {key_id = id, sha256 = sha256, tenant = tenant, label = label, created_ms = now}
  if lasts_ms ~= '' then key.expires_ms = now + tonumber(lasts_ms) end
  return put(id, key)
end
"""
)


def _script(body: str) -> Script:
    return Script(_COMMON + body)


# ARGV: epoch and version seen. Gives epoch, version, 1 if all follows, then flat lists of
# tenants and of keys, name and JSON in turns; an empty JSON: gone.
NEWS = _script("""
local seen_epoch, seen = ARGV[1], tonumber(ARGV[2])
local epoch = redis.call('HGET', META, 'epoch') or ''
local version = tonumber(redis.call('HGET', META, 'version') or '0')
local floor = tonumber(redis.call('HGET', META, 'floor') or '0')
if epoch ~= seen_epoch or version < seen or seen < floor then
  return {epoch, version, 1, redis.call('HGETALL', TENANTS), redis.call('HGETALL', KEYS_)}
end
local tenants, keys = {}, {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', CHANGED, '(' .. seen, '+inf')) do
  local name, hash, list = string.sub(member, 3), KEYS_, keys
  if string.sub(member, 1, 2) == 't:' then hash, list = TENANTS, tenants end
  table.insert(list, name)
  table.insert(list, redis.call('HGET', hash, name) or '')
end
return {epoch, version, 0, tenants, keys}
""")

# ARGV: epoch, name, JSON, by, length of the account.
SET_TENANT = _script("""
put_tenant(ARGV[2], ARGV[3], ARGV[1])
note(ARGV[4], 'set_tenant', ARGV[2], '', ARGV[5])
return {'ok', '', now}
""")

# ARGV: tenant, id, sha256, label, lasts ms or '', by, length of the account, most live, most void.
CREATE = _script("""
if redis.call('HEXISTS', TENANTS, ARGV[1]) == 0 then return {'no_tenant'} end
if redis.call('HEXISTS', KEYS_, ARGV[2]) == 1 then return {'exists'} end
local live = live_of(ARGV[1])
if #live >= tonumber(ARGV[8]) then return {'too_many', unpack(live)} end
local text = add(ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[9]))
note(ARGV[6], 'create', ARGV[1], ARGV[2], ARGV[7])
return {'ok', text, now}
""")

# ARGV: epoch, tenant, its JSON, id, sha256, label, lasts ms or '', length of the account,
# most void.
CREATE_FIRST = _script("""
local tenants = redis.call('HGETALL', TENANTS)
for i = 1, #tenants, 2 do
  local ok, tenant = pcall(cjson.decode, tenants[i + 1])
  if ok and tenant.admin and #live_of(tenants[i]) > 0 then return {'exists'} end
end
if redis.call('HEXISTS', KEYS_, ARGV[4]) == 1 then return {'exists'} end
put_tenant(ARGV[2], ARGV[3], ARGV[1])
local text = add(ARGV[2], ARGV[4], ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[9]))
note('', 'init', ARGV[2], ARGV[4], ARGV[8])
return {'ok', text, now}
""")

# ARGV: id, by, length of the account.
REVOKE = _script("""
local key = key_of(ARGV[1])
if not key then return {'no_key'} end
if key.revoked_ms then return {'same', cjson.encode(key)} end
key.revoked_ms = now
local text = put(ARGV[1], key)
note(ARGV[2], 'revoke', key.tenant, ARGV[1], ARGV[3])
return {'ok', text, now}
""")

# ARGV: id, ms until then or '', by, length of the account, most live.
EXPIRE = _script("""
local key = key_of(ARGV[1])
if not key then return {'no_key'} end
if key.revoked_ms then return {'same', cjson.encode(key)} end
if not is_live(key) and ARGV[2] ~= '0' then
  local live = live_of(key.tenant)
  if #live >= tonumber(ARGV[5]) then return {'too_many', key.tenant, unpack(live)} end
end
key.expires_ms = nil
if ARGV[2] ~= '' then key.expires_ms = now + tonumber(ARGV[2]) end
local text = put(ARGV[1], key)
note(ARGV[3], 'expire', key.tenant, ARGV[1], ARGV[4])
return {'ok', text, now}
""")
