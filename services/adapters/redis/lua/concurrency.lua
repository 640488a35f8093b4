-- Returns the number of requests that hold a slot now. KEYS: slots
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
return redis.call('ZCOUNT', KEYS[1], string.format('(%d', now), '+inf')
