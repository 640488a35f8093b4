-- Shared by the scripts of idempotency records; concatenated after common.lua. Keys: see redis/idempotency.py.
-- Head of a record: f fingerprint, o owner, e epoch, s state (r running, i idle, d ended, x log dropped),
-- l lease deadline us, w watched until us, n chunks that the log must have.

-- A record is a tombstone when it has ended without a log, or when its log was dropped.
local function state_of(head, log, now)
  local found = redis.call('HMGET', head, 's', 'l')
  if not found[1] then return 'gone' end
  if found[1] == 'x' then return 'expired' end
  if found[1] == 'd' then
    if redis.call('EXISTS', log) == 1 then return 'ended' end
    return 'expired'
  end
  if found[1] == 'r' and tonumber(found[2]) > now then return 'running' end
  return 'free'
end

-- Remove the size of a body; the field '' contains the sum.
local function forget_size(bodies, sizes, digest)
  local size = tonumber(redis.call('HGET', sizes, digest) or '0')
  redis.call('ZREM', bodies, digest)
  redis.call('HDEL', sizes, digest)
  if size > 0 then redis.call('HINCRBY', sizes, '', -size) end
end

local function forget_lapsed(bodies, sizes, now)
  for _, digest in ipairs(redis.call('ZRANGEBYSCORE', bodies, '-inf', int(now), 'LIMIT', 0, 64)) do
    forget_size(bodies, sizes, digest)
  end
end

-- Drop the logs of records that no gateway runs, the oldest first, until there is room; not of open ones that
-- were written after kept_us. Of EXAMINED records in idempotency_rules.py at most: a script blocks its node.
-- Their heads share the tenant's hash tag, so they are on the node where this script runs.
local function make_room(prefix, bodies, sizes, wanted, limits, now)
  local most, kept_us = limits.tenant_bytes, now - limits.open_us
  if tonumber(redis.call('HGET', sizes, '') or '0') + wanted <= most then return end
  local kept = 0
  for _ = 1, 64 do
    local found = redis.call('ZRANGE', bodies, kept, kept + 63, 'WITHSCORES')
    if #found == 0 then return end
    for at = 1, #found, 2 do
      local digest, head = found[at], prefix .. found[at]
      local state = state_of(head, head .. ':log', now)
      if state == 'running' or (state == 'free' and found[at + 1] - limits.body_us > kept_us) then
        kept = kept + 1
      else
        redis.call('DEL', head .. ':log')
        forget_size(bodies, sizes, digest)
        if tonumber(redis.call('HGET', sizes, '') or '0') + wanted <= most then return end
      end
    end
  end
end

-- Append a chunk to a log. Returns whether the record still has its log. The log is dropped when there is no
-- room, or when chunks of it lapsed meanwhile: a log with a hole is not replayed. Where open records are kept,
-- a chunk without room leaves the log as it is, and one that ends the record has room.
-- limits: body us, most bytes of a record, most bytes of a tenant, tombstone us, open us
local function put(prefix, digest, bodies, sizes, chunk, limits, now, ends)
  local head, log = prefix .. digest, prefix .. digest .. ':log'
  if redis.call('HGET', head, 's') == 'x' then return false end
  if #chunk == 0 then return true end
  forget_lapsed(bodies, sizes, now)
  make_room(prefix, bodies, sizes, #chunk, limits, now)
  local own = tonumber(redis.call('HGET', sizes, digest) or '0')
  local all = tonumber(redis.call('HGET', sizes, '') or '0')
  local lost = redis.call('LLEN', log) ~= tonumber(redis.call('HGET', head, 'n') or '0')
  local full = own + #chunk > limits.record_bytes
  if not (ends and limits.open_us > 0) then full = full or all + #chunk > limits.tenant_bytes end
  if full and not lost and limits.open_us > 0 then return false end
  if lost or full then
    redis.call('DEL', log)
    forget_size(bodies, sizes, digest)
    redis.call('HSET', head, 's', 'x')
    return false
  end
  redis.call('RPUSH', log, chunk)
  redis.call('HINCRBY', head, 'n', 1)
  redis.call('PEXPIRE', log, math.ceil(limits.body_us / 1000))
  redis.call('ZADD', bodies, int(now + limits.body_us), digest)
  redis.call('HINCRBY', sizes, digest, #chunk)
  redis.call('HINCRBY', sizes, '', #chunk)
  local keep_ms = math.ceil(limits.tombstone_us / 1000) + 60000
  redis.call('PEXPIRE', bodies, keep_ms)
  redis.call('PEXPIRE', sizes, keep_ms)
  return true
end

-- Returns nil if the caller is the owner under the record's epoch, else 'gone' or 'fenced'.
local function refused(head, owner, epoch)
  local found = redis.call('HMGET', head, 'o', 'e')
  if not found[2] then return 'gone' end
  if found[1] ~= owner or found[2] ~= epoch then return 'fenced' end
  return nil
end
