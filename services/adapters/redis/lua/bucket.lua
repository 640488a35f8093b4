-- Shared by the scripts that count against a rate; concatenated before them.
-- A rate is a bucket of one minute's requests. A request weighs 60e6 units and the bucket drains
-- per_minute units per microsecond, so that all arithmetic is on integers below 2^53.
local REQUEST = 60000000

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- Return the bucket's content with one more request, and the time until it fits, in us; 0 if it fits now.
local function with_one_more(key, per_minute, now)
  local used, bucket = 0, redis.call('HMGET', key, 'used', 'at')
  if bucket[1] then
    local elapsed = math.max(0, math.min(now - tonumber(bucket[2]), REQUEST))
    if now < tonumber(bucket[2]) then -- the clock was set back: the bucket drains from now
      redis.call('HSET', key, 'at', string.format('%d', now))
      redis.call('PEXPIRE', key, 61000)
    end
    used = math.max(0, tonumber(bucket[1]) - elapsed * per_minute)
  end
  used = used + REQUEST
  return used, math.max(0, math.ceil((used - per_minute * REQUEST) / per_minute))
end

local function keep_bucket(key, used, per_minute, now)
  redis.call('HSET', key, 'used', string.format('%d', used), 'at', string.format('%d', now))
  redis.call('PEXPIRE', key, math.ceil(used / per_minute / 1000) + 1000)
end
