-- Counts work without a slot against a rate. Concatenated after meters.lua. KEYS: rate. ARGV: per minute
-- Returns 0 when it was counted, else the time to wait in us.
local per_minute, now = tonumber(ARGV[1]), now_us()
local wait = wait_of('requests', KEYS[1], per_minute, 1, now, now)
if wait == 0 then count('requests', KEYS[1], per_minute, 0, 1, now, now) end
return wait
