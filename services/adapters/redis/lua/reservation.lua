-- The record of a request id; concatenated after meters.lua, before the scripts that use it.
-- hash s state (r running, l settled when it lapsed, d settled), e time of the admission in us, w its claims and
--   price in the limiter's encoding, n number of claims, p, o, c checkpoint (prompt, output, cached tokens),
--   xp, xo, xc tokens and xm micro-dollars charged so far, over all admissions of the id.
--
-- A running record has reserved, of each claim, the larger of the claim and what the checkpoint used, less what was
-- charged. `update` is the only place that changes a record, and it moves the meters with it: so a meter is the sum
-- of what records reserved and were charged, whatever the order of the calls.

-- Read one reservation from the arguments: id, admitted us, encoded claims, their number, price (input, cached,
-- output), usage (prompt, output, cached), then kind, limit and amount of each claim; and from the keys: record,
-- then one of each claim. Returns it and the positions after it.
local function reservation_at(arg, key)
  local r = {
    id = ARGV[arg], admitted = tonumber(ARGV[arg + 1]), encoded = ARGV[arg + 2],
    price = {tonumber(ARGV[arg + 4]), tonumber(ARGV[arg + 5]), tonumber(ARGV[arg + 6])},
    usage = {tonumber(ARGV[arg + 7]), tonumber(ARGV[arg + 8]), tonumber(ARGV[arg + 9])},
    record = KEYS[key], claims = {},
  }
  local n = tonumber(ARGV[arg + 3])
  for i = 1, n do
    local at = arg + 7 + 3 * i
    r.claims[i] = {
      key = KEYS[key + i], kind = ARGV[at], limit = tonumber(ARGV[at + 1]), amount = tonumber(ARGV[at + 2]),
    }
  end
  local found = redis.call('HMGET', r.record, 's', 'e', 'n', 'p', 'o', 'c', 'xp', 'xo', 'xc', 'xm')
  local function number(at) return tonumber(found[at] or '0') end
  r.state, r.began, r.count = found[1] or '', number(2), number(3)
  r.checkpoint, r.charged = {number(4), number(5), number(6)}, {number(7), number(8), number(9)}
  r.micros = number(10)
  return r, arg + 10 + 3 * n, key + 1 + n
end

local function largest(a, b)
  return {math.max(a[1], b[1]), math.max(a[2], b[2]), math.max(a[3], b[3])}
end

-- Price.cost_micros: prices are per million tokens; the sum is rounded up once.
local function cost(price, usage)
  local cached = math.min(usage[3], usage[1])
  local whole, part = 0, 0
  for i, tokens in ipairs({usage[1] - cached, cached, usage[2]}) do
    whole = whole + tokens * math.floor(price[i] / 1000000)
    part = part + tokens * (price[i] % 1000000)
  end
  local rest = math.fmod(part, 1000000)
  return whole + (part - rest) / 1000000 + (rest > 0 and 1 or 0)
end

local function used_of(kind, price, usage)
  if MICROS[kind] then return cost(price, usage) end
  if kind == 'tokens' then return usage[1] + usage[2] end
  return kind == 'input_tokens' and usage[1] or usage[2]
end

local function charged_of(r, kind)
  return MICROS[kind] and r.micros or used_of(kind, r.price, r.charged)
end

local function reserved_of(r, claim)
  local most = math.max(claim.amount, used_of(claim.kind, r.price, r.checkpoint))
  return math.max(0, most - charged_of(r, claim.kind))
end

local function counted(claim)
  return claim.kind ~= 'concurrency' and claim.kind ~= 'requests'
end

-- Move the record to a state, a checkpoint and charges. `counted_claims`: how many of its claims the meters contain.
-- Returns the units in each claim's bucket, -1 where it has none or did not change.
local function update(r, state, checkpoint, charged, counted_claims, now, keep_ms)
  local before, paid, units = {}, {}, {}
  for i, claim in ipairs(r.claims) do
    if counted(claim) then
      redis.call('HLEN', claim.key) -- fails on a damaged key before anything is written
      before[i] = i <= counted_claims and reserved_of(r, claim) or 0
      paid[i] = charged_of(r, claim.kind)
    end
  end
  r.state, r.checkpoint, r.charged = state, checkpoint, charged
  r.micros = math.max(r.micros, cost(r.price, charged))
  redis.call(
    'HSET', r.record, 's', state, 'e', int(r.began), 'w', r.encoded, 'n', r.count,
    'p', int(checkpoint[1]), 'o', int(checkpoint[2]), 'c', int(checkpoint[3]),
    'xp', int(charged[1]), 'xo', int(charged[2]), 'xc', int(charged[3]), 'xm', int(r.micros))
  if state == 'd' then redis.call('HDEL', r.record, 'w', 'n', 'p', 'o', 'c') end
  if redis.call('PTTL', r.record) < keep_ms then redis.call('PEXPIRE', r.record, keep_ms) end
  for i, claim in ipairs(r.claims) do
    units[i] = -1
    if counted(claim) then
      local more = (state == 'r' and reserved_of(r, claim) or 0) - before[i]
      local due = math.max(0, charged_of(r, claim.kind) - paid[i])
      if more ~= 0 or due ~= 0 then
        units[i] = count(claim.kind, claim.key, claim.limit, more, due, now, r.began)
      end
    end
  end
  return units
end

-- The tenant's slots keep a lapsed request until it is settled; those of a key or user only while they run.
-- `extend` adds no slot of a key or user: the claims given may not be those of the record.
local function hold(slots, r, lease_us, keep_ms, now, extend)
  local deadline = int(now + lease_us)
  redis.call('ZADD', slots, deadline, r.id)
  redis.call('PEXPIRE', slots, keep_ms)
  for _, claim in ipairs(r.claims) do
    if claim.kind == 'concurrency' and claim.key ~= slots then
      redis.call('ZADD', claim.key, extend and 'XX' or 'CH', deadline, r.id)
      redis.call('ZREMRANGEBYSCORE', claim.key, '-inf', int(now))
      redis.call('PEXPIRE', claim.key, math.ceil(lease_us / 1000) + 1000)
    end
  end
end

local function leave(slots, r)
  redis.call('ZREM', slots, r.id)
  for _, claim in ipairs(r.claims) do
    if claim.kind == 'concurrency' and claim.key ~= slots then redis.call('ZREM', claim.key, r.id) end
  end
end

-- Settle the reservation with its usage. Returns its encoded claims instead if the record has others, so that the
-- caller repeats the call with those: the response to a reservation may have been lost.
local function settle(slots, r, now, keep_ms)
  local running = r.state == 'r'
  if running and r.count ~= #r.claims then return redis.call('HGET', r.record, 'w') end
  local charged, counted_claims = largest(r.usage, r.charged), running and r.count or 0
  if running and r.admitted > 0 and r.admitted < r.began then -- of an earlier admission, while a later one runs
    r.encoded = redis.call('HGET', r.record, 'w')
    update(r, 'r', r.checkpoint, charged, counted_claims, now, keep_ms)
    return false
  end
  if not running then r.began = r.admitted end
  update(r, 'd', r.checkpoint, charged, counted_claims, now, keep_ms)
  leave(slots, r)
  return false
end
