-- Returns {settled, reserved} micro-dollars of each budget in its present period. Concatenated after meters.lua.
-- KEYS: budgets. ARGV: their kinds
local now, found = now_us(), {}
for i, key in ipairs(KEYS) do found[i] = {budget(key, period_of(ARGV[i], now))} end
return found
