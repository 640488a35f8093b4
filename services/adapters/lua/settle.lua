-- Give the slot back and count the tokens, once per request.
-- KEYS: slots, settled, usage (hash "<day>:<what>" -> count)
-- ARGV: request id, us until the settlement is forgotten, days of usage kept, prompt, output, cached tokens
-- Returns 1 when it counted, 0 when it had been counted before.
local keep_us, keep_days = tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%d', now))
if redis.call('ZADD', KEYS[2], 'NX', string.format('%d', now + keep_us), ARGV[1]) == 0 then
  return 0
end
redis.call('PEXPIRE', KEYS[2], math.ceil(keep_us / 1000) + 1000)

local day = math.floor(now / 86400000000)
if redis.call('HINCRBY', KEYS[3], day .. ':requests', 1) == 1 then
  for _, name in ipairs(redis.call('HKEYS', KEYS[3])) do
    if tonumber(string.match(name, '^%d+')) <= day - keep_days then
      redis.call('HDEL', KEYS[3], name)
    end
  end
end
redis.call('HINCRBY', KEYS[3], day .. ':prompt_tokens', ARGV[4])
redis.call('HINCRBY', KEYS[3], day .. ':output_tokens', ARGV[5])
redis.call('HINCRBY', KEYS[3], day .. ':cached_tokens', ARGV[6])
redis.call('EXPIRE', KEYS[3], (keep_days + 1) * 86400)
return 1
