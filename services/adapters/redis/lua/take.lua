-- Counts amounts against rates, all or none, without a request. Concatenated after meters.lua.
-- KEYS: a bucket per claim. ARGV: kind, limit and amount of each
-- Returns {0, 0, {}} when they were counted, else {number of the claim, time to wait in us, {units in each bucket}}.
local now = now_us()
for i, key in ipairs(KEYS) do
  local kind, limit, amount = ARGV[3 * i - 2], tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
  local wait = wait_of(kind, key, limit, amount, now, now)
  if wait > 0 then
    local units = {}
    for j, each in ipairs(KEYS) do units[j] = level(ARGV[3 * j - 2], each, tonumber(ARGV[3 * j - 1]), now) end
    return {i, wait, units}
  end
end
for i, key in ipairs(KEYS) do
  count(ARGV[3 * i - 2], key, tonumber(ARGV[3 * i - 1]), 0, tonumber(ARGV[3 * i]), now, now)
end
return {0, 0, {}}
