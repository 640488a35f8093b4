-- Count a request against the rate and the concurrency at once, or against neither.
-- KEYS: rate (hash used, at), slots (zset request -> deadline us), settled (zset request -> forget at us)
-- ARGV: request id, requests per minute (0: none), max concurrency (0: none), lease us
-- Returns {outcome, wait us}; outcome 0 admitted, 1 rate exceeded, 2 concurrency exceeded.
--
-- The rate is a bucket of one minute's requests. A request weighs 60e6 units and the bucket drains
-- requests_per_minute units per microsecond, so that all arithmetic is on integers below 2^53.
--
-- The first write of an admission is one that Redis refuses when it is out of memory: then none is done.
local REQUEST = 60000000
local per_minute, max_slots, lease_us = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local ttl_ms = math.ceil(lease_us / 1000) + 1000

local after_now = string.format('(%d', now)
local held = redis.call('ZSCORE', KEYS[2], ARGV[1])
if held and tonumber(held) > now then
  redis.call('ZADD', KEYS[2], string.format('%d', now + lease_us), ARGV[1])
  redis.call('PEXPIRE', KEYS[2], ttl_ms)
  return {0, 0}
end

local used = 0
if per_minute > 0 then
  local bucket = redis.call('HMGET', KEYS[1], 'used', 'at')
  if bucket[1] then
    local elapsed = math.max(0, math.min(now - tonumber(bucket[2]), REQUEST))
    used = math.max(0, tonumber(bucket[1]) - elapsed * per_minute)
  end
  local over = used + REQUEST - per_minute * REQUEST
  if over > 0 then
    return {1, math.ceil(over / per_minute)}
  end
end

if max_slots > 0 and redis.call('ZCOUNT', KEYS[2], after_now, '+inf') >= max_slots then
  local first = redis.call('ZRANGEBYSCORE', KEYS[2], after_now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return {2, tonumber(first[2]) - now}
end

if per_minute > 0 then
  used = used + REQUEST
  redis.call('HSET', KEYS[1], 'used', string.format('%d', used), 'at', string.format('%d', now))
  redis.call('PEXPIRE', KEYS[1], math.ceil(used / per_minute / 1000) + 1000)
end
redis.call('ZADD', KEYS[2], string.format('%d', now + lease_us), ARGV[1])
redis.call('PEXPIRE', KEYS[2], ttl_ms)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%d', now))
redis.call('ZREM', KEYS[3], ARGV[1])
return {0, 0}
