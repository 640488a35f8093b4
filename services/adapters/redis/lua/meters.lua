-- What limits count; concatenated after common.lua, before the scripts that use it.
--
-- requests: hash used, at (us). A bucket of one minute's requests; a request weighs 60e6 units, and the bucket
--   drains `limit` units per microsecond.
-- tokens, input_tokens, output_tokens: hash used, at (ms), rate. The same; a token weighs 60000 units, and the
--   bucket drains `rate` units per millisecond.
-- concurrency: zset request -> deadline us
-- month_micros, day_micros: hash "<period>:s" settled and "<period>:r" reserved micro-dollars. A period is the
--   calendar month (year * 12 + month - 1) or day (since 1970), UTC, of the request's admission.
-- All arithmetic is on integers below 2^53.
local REQUEST, TOKEN, DAY_US = 60000000, 60000, 86400000000
local MICROS = {month_micros = true, day_micros = true}
local BUDGET_KEEP_MS, KEPT_PERIODS = 40 * 86400000, 9

local function month_of(day)
  local z = day + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local mp = math.floor((5 * (doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))) + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  return (yoe + era * 400 + (month <= 2 and 1 or 0)) * 12 + month - 1
end

local function first_day_of(month)
  local m = month % 12 + 1
  local y = math.floor(month / 12) - (m <= 2 and 1 or 0)
  local era = math.floor(y / 400)
  local yoe = y - era * 400
  local doy = math.floor((153 * (m > 2 and m - 3 or m + 9) + 2) / 5)
  return era * 146097 + yoe * 365 + math.floor(yoe / 4) - math.floor(yoe / 100) + doy - 719468
end

local function period_of(kind, us)
  local day = math.floor(us / DAY_US)
  return kind == 'day_micros' and day or month_of(day)
end

local function period_end_us(kind, us)
  local period = period_of(kind, us) + 1
  return (kind == 'day_micros' and period or first_day_of(period)) * DAY_US
end

local function budget(key, period)
  local found = redis.call('HMGET', key, int(period) .. ':s', int(period) .. ':r')
  return tonumber(found[1] or '0'), tonumber(found[2] or '0')
end

-- Return the units in a bucket of requests or tokens now.
local function level(kind, key, limit, now)
  local found = redis.call('HMGET', key, 'used', 'at', 'rate')
  if not found[1] then return 0 end
  local us = kind == 'requests'
  local passed = (us and now or math.floor(now / 1000)) - tonumber(found[2])
  if passed < 0 then -- the clock was set back: the bucket drains from now
    redis.call('HSET', key, 'at', int(us and now or math.floor(now / 1000)))
    redis.call('PEXPIRE', key, 61000)
    passed = 0
  end
  if us then return math.max(0, tonumber(found[1]) - math.min(passed, REQUEST) * limit) end
  return math.max(0, tonumber(found[1]) - passed * tonumber(found[3]))
end

-- Return the time in us until the amount fits; 0 if it fits now.
local function wait_of(kind, key, limit, amount, now, admitted)
  if kind == 'concurrency' then
    local after_now = '(' .. int(now)
    if redis.call('ZCOUNT', key, after_now, '+inf') < limit then return 0 end
    local first = redis.call('ZRANGEBYSCORE', key, after_now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    return tonumber(first[2]) - now
  elseif MICROS[kind] then
    local settled, reserved = budget(key, period_of(kind, admitted))
    if settled + reserved + amount <= limit then return 0 end
    return math.max(1, period_end_us(kind, admitted) - now)
  end
  local unit = kind == 'requests' and REQUEST or TOKEN
  local over = level(kind, key, limit, now) + (amount - limit) * unit
  return math.max(0, math.ceil(over / limit)) * (kind == 'requests' and 1 or 1000)
end

-- Count these amounts more, or fewer. Returns the units in a bucket.
local function count(kind, key, limit, reserved, settled, now, admitted)
  if MICROS[kind] then
    local period = period_of(kind, admitted)
    local _, before = budget(key, period)
    redis.call('HSET', key, int(period) .. ':r', int(math.max(0, before + reserved)))
    redis.call('HINCRBY', key, int(period) .. ':s', int(settled))
    redis.call('PEXPIRE', key, BUDGET_KEEP_MS)
    if redis.call('HLEN', key) > 4 * KEPT_PERIODS then
      for _, name in ipairs(redis.call('HKEYS', key)) do
        if tonumber(string.match(name, '^%d+')) < period - KEPT_PERIODS then redis.call('HDEL', key, name) end
      end
    end
    return 0
  elseif kind == 'requests' then
    local used = level(kind, key, limit, now) + (reserved + settled) * REQUEST
    redis.call('HSET', key, 'used', int(used), 'at', int(now))
    redis.call('PEXPIRE', key, math.ceil(used / limit / 1000) + 1000)
    return used
  end
  local used = math.max(0, level(kind, key, limit, now) + (reserved + settled) * TOKEN)
  redis.call('HSET', key, 'used', int(used), 'at', int(math.floor(now / 1000)), 'rate', int(limit))
  redis.call('PEXPIRE', key, math.ceil(used / limit) + 1000)
  return used
end
