-- Reserves tokens against a rate, once per request. Concatenated after token_bucket.lua.
-- KEYS: tokens, mark of the request. ARGV: tokens, per minute
-- Returns {0, units used} when they are reserved, else {time to wait in ms, 0}.
--
-- A call whose response was lost is sent again within seconds. The mark shows that it was carried out.
local tokens, per_minute, now = tonumber(ARGV[1]), tonumber(ARGV[2]), now_ms()
if redis.call('EXISTS', KEYS[2]) == 1 then return {0, tokens_used(KEYS[1], now)} end
local used = tokens_used(KEYS[1], now) + tokens * TOKEN
local wait = math.ceil((used - per_minute * TOKEN) / per_minute)
if wait > 0 then return {wait, 0} end
redis.call('SET', KEYS[2], 1, 'PX', 10000)
keep_tokens(KEYS[1], used, per_minute, now)
return {0, used}
