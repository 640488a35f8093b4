-- Extends the deadlines of running requests, and stores their usage so far as checkpoints. Concatenated after
-- reservation.lua.
-- KEYS: slots, then those of each reservation. ARGV: lease us, retention of an unsettled record ms, reservations...
--
-- A request that lapsed, or whose record Redis lost, runs again: what it holds counts, also above a limit. A settled
-- one stays settled.
local slots, lease_us, keep_ms, now = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), now_us()
local arg, key, r = 3, 2, nil
while arg <= #ARGV do
  r, arg, key = reservation_at(arg, key)
  local running = r.state == 'r'
  if not running and r.state ~= 'd' then
    r.began, r.count, r.checkpoint = r.admitted, #r.claims, largest(r.checkpoint, r.charged)
    update(r, 'r', largest(r.checkpoint, r.usage), r.charged, 0, now, keep_ms)
  elseif running and r.count == #r.claims then
    update(r, 'r', largest(r.checkpoint, r.usage), r.charged, r.count, now, keep_ms)
  end
  if r.state == 'r' then hold(slots, r, lease_us, keep_ms, now) end
end
return 1
