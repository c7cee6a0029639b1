-- One exchange of one router about one tenant, atomic over all of its limits: the decision of
-- router/limit_decision.py, on this server's clock.
--
-- KEYS[1]  hash: at, rq, tk (time in ms, levels in 1/60000) and r:ROUTER (a leased account)
-- ARGV     router, lease in ms; requests and tokens per minute, concurrent requests and
--          encodes (0: no limit); the account (concurrent, encodes, requests, tokens, open
--          tokens); requests, tokens and open tokens as acknowledged last; lacking requests
--          and tokens; the statement's number; then six for each ask: requests, concurrent,
--          encodes, tokens needed, tokens wanted, 1 for a dry run
-- Returns  the time in ms, then four for each ask: tokens, refusing limit (0: granted), wait
--          in ms, what is left of the limit or, if granted, of tokens per minute
local UNITS, FULL_AFTER_MS, PLACE_WAIT_MS = 60000, 120000, 1000
local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min

local function arg(i) return tonumber(ARGV[i]) end
local function text(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + floor(tonumber(time[2]) / 1000)
local router, lease = ARGV[1], arg(2)
local limits = { arg(3), arg(4), arg(5), arg(6) }

local state, others = {}, {}
local stored = redis.call('HGETALL', KEYS[1])
for i = 1, #stored, 2 do
  if string.sub(stored[i], 1, 2) == 'r:' then
    local account = {}
    for number in string.gmatch(stored[i + 1], '%S+') do account[#account + 1] = tonumber(number) end
    others[string.sub(stored[i], 3)] = account
  else
    state[stored[i]] = tonumber(stored[i + 1])
  end
end

-- Overtaken by a later statement: nobody waits for an answer.
local mine = others[router]
if mine and mine[1] > now and arg(17) <= mine[7] then return { now } end

-- Refill; after a step back the clock counts from where it stands now.
local elapsed = min(max(now - (state.at or now), 0), FULL_AFTER_MS)
local function refilled(level, per_minute)
  if per_minute == 0 then return nil end
  local top = per_minute * UNITS
  if not level then return top end
  return min(max(level, -top) + elapsed * per_minute, top)
end
local levels = { refilled(state.rq, limits[1]), refilled(state.tk, limits[2]) }

local function charge(i, amount)
  if levels[i] then
    local top = limits[i] * UNITS
    levels[i] = max(-top, min(levels[i] - amount * UNITS, top))
  end
end

-- Drop whoever has been silent; what it reserved and did not use comes back.
local unused, gone, held, encodes = 0, {}, 0, 0
mine = nil
for name, account in pairs(others) do
  if account[1] <= now then
    unused = unused + account[6]
    gone[#gone + 1] = 'r:' .. name
  elseif name == router then
    mine = account
  else
    held, encodes = held + account[2], encodes + account[3]
    -- A clock that stepped back must not lengthen a lease.
    if account[1] > now + lease then
      account[1] = now + lease
      redis.call('HSET', KEYS[1], 'r:' .. name, table.concat({ text(account[1]), text(account[2]),
        text(account[3]), text(account[4]), text(account[5]), text(account[6]),
        text(account[7]) }, ' '))
    end
  end
end
charge(2, -unused)
if #gone > 0 then redis.call('HDEL', KEYS[1], unpack(gone)) end

-- Charge what this router charged since it was heard last.
local account = { arg(7), arg(8), arg(9), arg(10), arg(11) }
local requests_before = mine and mine[4] or arg(12)
local tokens_before = mine and mine[5] or arg(13) - arg(14)
charge(1, min(account[3] - requests_before, arg(15)))
charge(2, min(account[4] - tokens_before, arg(16)))

local function left(level) return floor(max(level, 0) / UNITS) end

local function decide(first)
  local ask = { arg(first), arg(first + 3), arg(first + 1), arg(first + 2) }
  local in_use = { false, false, held + account[1], encodes + account[2] }
  local limit, longest, rest = 0, 0, 0
  for i = 1, 4 do
    local wait, remains = 0, 0
    if limits[i] > 0 and ask[i] > 0 then
      if i <= 2 then
        wait = max(0, ceil((ask[i] * UNITS - levels[i]) / limits[i]))
        remains = left(levels[i])
      elseif in_use[i] + ask[i] > limits[i] then
        wait, remains = PLACE_WAIT_MS, max(0, limits[i] - in_use[i])
      end
    end
    if wait > longest then limit, longest, rest = i, wait, remains end
  end
  if limit > 0 then return 0, limit, longest, rest end
  local tokens = arg(first + 4)
  if levels[2] then tokens = min(tokens, left(levels[2])) end
  if arg(first + 5) == 0 then
    charge(1, ask[1])
    charge(2, tokens)
    account = { account[1] + ask[3], account[2] + ask[4], account[3] + ask[1],
      account[4] + tokens, account[5] + tokens }
  end
  return tokens, 0, 0, left(levels[2] or 0)
end

local reply = { now }
for first = 18, #ARGV, 6 do
  for _, number in ipairs({ decide(first) }) do reply[#reply + 1] = number end
end

local fields = { 'at', text(now), 'r:' .. router, table.concat({ text(now + lease),
  text(account[1]), text(account[2]), text(account[3]), text(account[4]), text(account[5]),
  text(arg(17)) }, ' ') }
for i, name in ipairs({ 'rq', 'tk' }) do
  if levels[i] then
    fields[#fields + 1] = name
    fields[#fields + 1] = text(levels[i])
  else
    redis.call('HDEL', KEYS[1], name)
  end
end
redis.call('HSET', KEYS[1], unpack(fields))
-- By then every bucket is full and every lease has run out: as if it had never been there.
redis.call('PEXPIRE', KEYS[1], max(FULL_AFTER_MS, lease))
return reply
