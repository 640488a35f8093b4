-- Returns requests that were not renewed in time and are not settled. Concatenated after common.lua.
-- KEYS: slots. ARGV: how many
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', int(now_us()), 'LIMIT', 0, ARGV[1])
