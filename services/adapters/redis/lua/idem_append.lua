-- Appends chunks to the logs of records of one tenant and renews their leases.
-- KEYS: bodies, sizes, then head and log of each record
-- ARGV: prefix of the heads, lease us, body us, most bytes of a record, most bytes of a tenant, tombstone us,
--       open us, then digest, owner, epoch, chunk of each record
-- Returns one word per record.
local limits = {
  body_us = tonumber(ARGV[3]), record_bytes = tonumber(ARGV[4]), tenant_bytes = tonumber(ARGV[5]),
  tombstone_us = tonumber(ARGV[6]), open_us = tonumber(ARGV[7]),
}
local now = now_us()
local answers = {}
for at = 8, #ARGV, 4 do
  local head = ARGV[1] .. ARGV[at]
  local answer = refused(head, ARGV[at + 1], ARGV[at + 2])
  if not answer then
    redis.call('HSET', head, 'l', int(now + tonumber(ARGV[2])))
    if not put(ARGV[1], ARGV[at], KEYS[1], KEYS[2], ARGV[at + 3], limits, now) then
      answer = 'too_large'
    elseif tonumber(redis.call('HGET', head, 'w') or '0') > now then
      answer = 'watched'
    else
      answer = 'kept'
    end
  end
  answers[#answers + 1] = answer
end
return answers
