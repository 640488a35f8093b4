-- Releases the slot and counts the tokens, once per request. Concatenated after token_bucket.lua and
-- usage.lua.
-- KEYS: slots, settled, usage, tokens, and the head of its record for a request under an idempotency key
-- ARGV: request id, retention of the settlement us, the same once confirmed, days of usage kept,
--       prompt, output, cached tokens, reserved tokens and their rate per minute, then ids of the tenant's requests whose settlements are confirmed
-- Returns 1 when it counted, 0 when it had been counted before.
--
-- A settlement whose response was lost is sent again, perhaps much later, so its retention is long. Such entries
-- are few, because all others are confirmed soon.
local keep_us, confirmed_us, keep_days = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local totals = {ARGV[5], ARGV[6], ARGV[7]}
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%d', now))
for i = 10, #ARGV do
  redis.call('ZADD', KEYS[2], 'XX', string.format('%d', now + confirmed_us), ARGV[i])
end
local first = not redis.call('ZSCORE', KEYS[2], ARGV[1])
local counted = 1

if KEYS[5] and redis.call('EXISTS', KEYS[5]) == 1 and is_of(KEYS[5], ARGV[1]) then
  count_record(KEYS[5], ARGV[1], KEYS[3], now, keep_days, totals)
elseif first then
  count_usage(KEYS[3], now, keep_days, {}, totals)
else
  counted = 0
end
if first then correct_tokens(KEYS[4], tonumber(ARGV[8]), ARGV[5] + ARGV[6], tonumber(ARGV[9])) end
-- Recorded after counting: a command that fails on a damaged key ends the script before this.
redis.call('ZADD', KEYS[2], 'NX', string.format('%d', now + keep_us), ARGV[1])
redis.call('PEXPIRE', KEYS[2], math.ceil(keep_us / 1000) + 1000)
return counted
