-- Counts a request against the rate and the concurrency, or against neither. Concatenated after bucket.lua.
-- KEYS: rate (hash used, at), slots (zset request -> deadline us), settled (zset request -> expiry us)
-- ARGV: request id, requests per minute (0: none), max concurrency (0: none), lease us
-- Returns {outcome, wait us, units used of the rate or -1}; outcome 0 admitted, 1 rate exceeded, 2 concurrency
-- exceeded.
--
-- The first write of an admission is one that Redis rejects when it is out of memory: then nothing is written.
local per_minute, max_slots, lease_us = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_us()
local ttl_ms = math.ceil(lease_us / 1000) + 1000

local after_now = string.format('(%d', now)
local held = redis.call('ZSCORE', KEYS[2], ARGV[1])
if held and tonumber(held) > now then
  redis.call('ZADD', KEYS[2], string.format('%d', now + lease_us), ARGV[1])
  redis.call('PEXPIRE', KEYS[2], ttl_ms)
  return {0, 0, -1}
end

local used, wait = 0, 0
if per_minute > 0 then
  used, wait = with_one_more(KEYS[1], per_minute, now)
  if wait > 0 then return {1, wait, -1} end
end

if max_slots > 0 and redis.call('ZCOUNT', KEYS[2], after_now, '+inf') >= max_slots then
  local first = redis.call('ZRANGEBYSCORE', KEYS[2], after_now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return {2, tonumber(first[2]) - now, -1}
end

if per_minute > 0 then keep_bucket(KEYS[1], used, per_minute, now) end
redis.call('ZADD', KEYS[2], string.format('%d', now + lease_us), ARGV[1])
redis.call('PEXPIRE', KEYS[2], ttl_ms)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%d', now))
redis.call('ZREM', KEYS[3], ARGV[1])
return {0, 0, per_minute > 0 and used or -1}
