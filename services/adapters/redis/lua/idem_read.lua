-- Reads a part of a log. KEYS: head, log. ARGV: first chunk, chunks, watch us (0: do not notify the owner)
-- Returns {state, chunks, length of the log}.
local now = now_us()
local state = state_of(KEYS[1], KEYS[2], now)
if state == 'gone' or state == 'expired' then return {state, {}, 0} end
local watch_us = tonumber(ARGV[3])
if state == 'running' and watch_us > 0 then
  -- At most one write per half of that time, because a reader polls many times a second.
  if tonumber(redis.call('HGET', KEYS[1], 'w') or '0') < now + watch_us / 2 then
    redis.call('HSET', KEYS[1], 'w', int(now + watch_us))
  end
end
local first = tonumber(ARGV[1])
return {state, redis.call('LRANGE', KEYS[2], first, first + tonumber(ARGV[2]) - 1), redis.call('LLEN', KEYS[2])}
