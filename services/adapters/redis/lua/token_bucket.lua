-- Shared by the scripts that count tokens against a rate; concatenated before them.
-- A bucket has room for one minute's tokens. A token weighs 60000 units and the bucket drains per_minute units per
-- millisecond, so that all arithmetic is on integers below 2^53.
-- KEY: hash used (units at the time `at`), at (ms), rate (tokens per minute that it drains with)
local TOKEN = 60000

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Return the units in the bucket now.
local function tokens_used(key, now)
  local found = redis.call('HMGET', key, 'used', 'at', 'rate')
  if not found[1] then return 0 end
  if now < tonumber(found[2]) then -- the clock was set back: the bucket drains from now
    redis.call('HSET', key, 'at', string.format('%d', now))
  end
  return math.max(0, tonumber(found[1]) - math.max(0, now - tonumber(found[2])) * tonumber(found[3]))
end

local function keep_tokens(key, used, per_minute, now)
  redis.call('HSET', key, 'used', string.format('%d', used), 'at', string.format('%d', now), 'rate', per_minute)
  redis.call('PEXPIRE', key, math.ceil(used / per_minute) + 1000)
end

-- Replace the reserved tokens of an ended request by those that it used.
local function correct_tokens(key, reserved, actual, per_minute)
  if per_minute <= 0 or reserved == actual then return end
  local now = now_ms()
  local used = math.max(0, tokens_used(key, now) + (actual - reserved) * TOKEN)
  keep_tokens(key, used, per_minute, now)
end
