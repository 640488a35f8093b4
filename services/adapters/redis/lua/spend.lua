-- Counts work without a slot against a rate. KEYS: rate (hash used, at). ARGV: per minute
-- Returns 0 when it was counted, else the time to wait in us.
local per_minute, now = tonumber(ARGV[1]), now_us()
local used, wait = with_one_more(KEYS[1], per_minute, now)
if wait == 0 then keep_bucket(KEYS[1], used, per_minute, now) end
return wait
