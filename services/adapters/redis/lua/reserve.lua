-- Reserves all claims of a request or none. Concatenated after reservation.lua.
-- KEYS: slots, then those of the reservation
-- ARGV: 'admit' or 'reserve', lease us, retention of an unsettled record ms, how many of the claims an earlier
--       call reserved, most lapsed requests to return, then the reservation
-- Returns {'ok', admitted us, {units in each claim's bucket}, {lapsed requests}},
--   {'held', admitted us, encoded claims} for a request that was admitted and runs,
--   {'lapsed'} for one that has to be settled with its checkpoint before it is admitted again, or
--   {'over', number of the claim, time to wait in us, {lapsed requests}, {units in each claim's bucket}}.
--
-- A call whose response was lost is sent again: the record shows that it was carried out. The first write is one
-- that Redis rejects when it is out of memory: then nothing is written.
local slots, lease_us, keep_ms = KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local before, now = tonumber(ARGV[4]), now_us()
local r = reservation_at(6, 2)
local running = r.state == 'r'

local function levels(r, units, now)
  for i, claim in ipairs(r.claims) do
    if claim.kind ~= 'concurrency' and not MICROS[claim.kind] and (units[i] or -1) < 0 then
      units[i] = level(claim.kind, claim.key, claim.limit, now)
    end
    units[i] = units[i] or -1
  end
  return units
end

local lapsed = redis.call('ZRANGEBYSCORE', slots, '-inf', int(now), 'LIMIT', 0, ARGV[5])

if ARGV[1] == 'admit' then
  if running then
    local deadline = redis.call('ZSCORE', slots, r.id)
    if not deadline or tonumber(deadline) <= now then return {'lapsed'} end
    hold(slots, r, lease_us, keep_ms, now, true)
    return {'held', r.began, redis.call('HGET', r.record, 'w')}
  end
  r.began = now
elseif not running then
  r.began, before = r.admitted, 0
elseif r.count == #r.claims then
  return {'ok', r.began, levels(r, {}, now), lapsed}
end

if not running then r.checkpoint = r.charged end
for i = before + 1, #r.claims do
  local claim = r.claims[i]
  local amount = counted(claim) and reserved_of(r, claim) or claim.amount
  local wait = wait_of(claim.kind, claim.key, claim.limit, amount, now, r.began)
  if wait > 0 then return {'over', i, wait, lapsed, levels(r, {}, now)} end
end

r.count = 0
for _, claim in ipairs(r.claims) do
  if claim.kind ~= 'requests' then r.count = r.count + 1 end
end
local units = update(r, 'r', r.checkpoint, r.charged, before, now, keep_ms)
for i, claim in ipairs(r.claims) do
  if claim.kind == 'requests' then
    units[i] = count(claim.kind, claim.key, claim.limit, 0, claim.amount, now, r.began)
  end
end
hold(slots, r, lease_us, keep_ms, now)
return {'ok', r.began, levels(r, units, now), lapsed}
