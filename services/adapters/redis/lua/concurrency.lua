-- Returns the number of requests that hold a slot now. Concatenated after common.lua. KEYS: slots
return redis.call('ZCOUNT', KEYS[1], '(' .. int(now_us()), '+inf')
