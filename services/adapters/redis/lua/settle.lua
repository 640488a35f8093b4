-- Settles a request, once for any number of calls. Concatenated after reservation.lua.
-- KEYS: slots, those of the reservation, then records of the tenant's requests whose settlements are confirmed
-- ARGV: how, retention of the record ms, the same once confirmed, then the reservation
--   how: 'settle' with its usage; 'lapse' with its checkpoint, if it is not renewed in time; 'checkpoint' raises the
--   checkpoint of a running request, and charges a lapsed one the difference
-- Returns 1 when it did, 0 when there was nothing to do, or the record's encoded claims if they are not those given.
--
-- A settlement whose response was lost is sent again, perhaps much later, so its retention is long. Such records
-- are few, because all others are confirmed soon.
local slots, keep_ms, now = KEYS[1], tonumber(ARGV[2]), now_us()
local r, _, next_key = reservation_at(4, 2)
for i = next_key, #KEYS do
  if redis.call('HGET', KEYS[i], 's') == 'd' then redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
end
if ARGV[1] == 'settle' then return settle(slots, r, now, keep_ms) or 1 end

if r.state == 'r' and r.count ~= #r.claims then return redis.call('HGET', r.record, 'w') end
if ARGV[1] == 'lapse' then
  local deadline = redis.call('ZSCORE', slots, r.id)
  if deadline and tonumber(deadline) > now then return 0 end
  if r.state == 'r' then
    update(r, 'l', r.checkpoint, largest(r.checkpoint, r.charged), r.count, now, keep_ms)
  end
  leave(slots, r)
  return 1
end
if r.state == 'r' then
  update(r, 'r', largest(r.checkpoint, r.usage), r.charged, r.count, now, keep_ms)
  return 1
elseif r.state == 'l' then
  update(r, 'l', r.checkpoint, largest(r.usage, r.charged), 0, now, keep_ms)
  return 1
end
return 0
