-- Ends or releases a record, and settles its request. One script, so that a result is charged once. Concatenated
-- after idem_common.lua and reservation.lua.
-- KEYS: head, log, index, bodies, sizes, then for a request with a reservation: slots and those of the reservation
-- ARGV: prefix of the heads, digest, owner, epoch, chunk, state (d or i), body us, most bytes of a record,
--       most bytes of a tenant, tombstone us, open us, then the reservation
-- Returns a word, or {the reservation's encoded claims} if they are not those given.
--
-- The request may be resumed for as long as its head is kept, so its charges are remembered for that time.
local head, log = KEYS[1], KEYS[2]
local limits = {
  body_us = tonumber(ARGV[7]), record_bytes = tonumber(ARGV[8]), tenant_bytes = tonumber(ARGV[9]),
  tombstone_us = tonumber(ARGV[10]), open_us = tonumber(ARGV[11]),
}
local now = now_us()
local answer = refused(head, ARGV[3], ARGV[4])
if answer then return answer end

if KEYS[6] then
  local others = settle(KEYS[6], reservation_at(12, 7), now, math.ceil(limits.tombstone_us / 1000) + 60000)
  if others then return {others} end
end
local kept = put(ARGV[1], ARGV[2], KEYS[4], KEYS[5], ARGV[5], limits, now, ARGV[6] == 'd')

local word, state = kept and 'kept' or 'too_large', kept and ARGV[6] or 'i'
if redis.call('HGET', head, 's') ~= 'x' then
  if state == 'i' and redis.call('EXISTS', log) == 0 then
    redis.call('DEL', head)
    redis.call('ZREM', KEYS[3], ARGV[2])
    return word
  end
  redis.call('HSET', head, 's', state)
end
redis.call('HDEL', head, 'l', 'w')
redis.call('HSET', head, 'o', '')
redis.call('PEXPIRE', head, math.ceil(limits.tombstone_us / 1000))
redis.call('ZADD', KEYS[3], int(now + limits.tombstone_us), ARGV[2])
redis.call('PEXPIRE', KEYS[3], math.ceil(limits.tombstone_us / 1000) + 60000)
return word
