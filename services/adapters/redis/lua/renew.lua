-- Extends the deadlines of running requests. A slot that lapsed meanwhile is held again, unless the request was
-- settled.
-- KEYS: slots, settled. ARGV: lease us, request ids...
local lease_us = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local deadline = string.format('%d', now + lease_us)
local renewed = 0
for i = 2, #ARGV do
  if not redis.call('ZSCORE', KEYS[2], ARGV[i]) then
    redis.call('ZADD', KEYS[1], deadline, ARGV[i])
    renewed = renewed + 1
  end
end
if renewed > 0 then
  redis.call('PEXPIRE', KEYS[1], math.ceil(lease_us / 1000) + 1000)
end
return renewed
