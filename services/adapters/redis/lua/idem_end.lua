-- Ends or releases a record, releases the slot and charges the tokens not charged yet. One script, so that a
-- result is charged once. Concatenated after idem_common.lua, token_bucket.lua and usage.lua.
-- KEYS: head, log, index, bodies, sizes, slots, settled, usage, tokens
-- ARGV: prefix of the heads, digest, owner, epoch, chunk, state (d or i), body us, most bytes of a record,
--       most bytes of a tenant, tombstone us, request id or '', retention of the settlement us,
--       days of usage kept, prompt, output, cached tokens, reserved tokens and their rate per minute
-- Returns a word.
local head, log = KEYS[1], KEYS[2]
local limits = {
  body_us = tonumber(ARGV[7]), record_bytes = tonumber(ARGV[8]), tenant_bytes = tonumber(ARGV[9]),
  tombstone_us = tonumber(ARGV[10]),
}
local now = now_us()
local answer = refused(head, ARGV[3], ARGV[4])
if answer then return answer end

local kept = put(ARGV[1], ARGV[2], KEYS[4], KEYS[5], ARGV[5], limits, now)

if ARGV[11] ~= '' then
  redis.call('ZREM', KEYS[6], ARGV[11])
  redis.call('ZREMRANGEBYSCORE', KEYS[7], '-inf', int(now))
  local first = not redis.call('ZSCORE', KEYS[7], ARGV[11])
  redis.call('ZADD', KEYS[7], int(now + tonumber(ARGV[12])), ARGV[11])
  if redis.call('PTTL', KEYS[7]) < tonumber(ARGV[12]) / 1000 then -- other entries may have a longer retention
    redis.call('PEXPIRE', KEYS[7], math.ceil(tonumber(ARGV[12]) / 1000) + 1000)
  end
  count_record(head, ARGV[11], KEYS[8], now, tonumber(ARGV[13]), {ARGV[14], ARGV[15], ARGV[16]})
  if first then correct_tokens(KEYS[9], tonumber(ARGV[17]), ARGV[14] + ARGV[15], tonumber(ARGV[18])) end
end

if kept and ARGV[6] == 'i' and redis.call('EXISTS', log) == 0 then
  redis.call('DEL', head)
  redis.call('ZREM', KEYS[3], ARGV[2])
  return 'kept'
end
if kept then redis.call('HSET', head, 's', ARGV[6]) end
redis.call('HDEL', head, 'l', 'w')
redis.call('HSET', head, 'o', '')
redis.call('PEXPIRE', head, math.ceil(limits.tombstone_us / 1000))
redis.call('ZADD', KEYS[3], int(now + limits.tombstone_us), ARGV[2])
redis.call('PEXPIRE', KEYS[3], math.ceil(limits.tombstone_us / 1000) + 60000)
return kept and 'kept' or 'too_large'
