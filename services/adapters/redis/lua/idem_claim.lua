-- Claims a record that is new or has no live owner.
-- KEYS: head, log, index (zset digest -> expiry us), bodies, sizes
-- ARGV: digest, fingerprint, owner, lease us, tombstone us, most keys
-- Returns {'owned', epoch, chunks}, {'full', wait us} or {state}.
local head, log, index = KEYS[1], KEYS[2], KEYS[3]
local lease_us, tombstone_us, most = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local now = now_us()
local state, before = 'gone', 0
local found = redis.call('HMGET', head, 'f', 'e')

if found[1] then
  if found[1] ~= ARGV[2] then return {'other'} end
  state = state_of(head, log, now)
  if state ~= 'free' then return {state} end
  before = tonumber(found[2])
else
  redis.call('ZREMRANGEBYSCORE', index, '-inf', int(now))
  if redis.call('ZCARD', index) >= most then
    local oldest = redis.call('ZRANGE', index, 0, 0, 'WITHSCORES')
    return {'full', (tonumber(oldest[2]) or now) - now}
  end
  redis.call('DEL', log)
end

-- At least the time, so that the epoch of a deleted record is not reused.
local epoch = int(math.max(before + 1, now))
local chunks = redis.call('LLEN', log)
if chunks == 0 then forget_size(KEYS[4], KEYS[5], ARGV[1]) end -- it lapsed: the next owner starts over
redis.call('HSET', head, 'f', ARGV[2], 'o', ARGV[3], 'e', epoch, 's', 'r', 'l', int(now + lease_us), 'n', chunks)
redis.call('PEXPIRE', head, math.ceil(tombstone_us / 1000))
redis.call('ZADD', index, int(now + tombstone_us), ARGV[1])
redis.call('PEXPIRE', index, math.ceil(tombstone_us / 1000) + 60000)
return {'owned', epoch, chunks}
