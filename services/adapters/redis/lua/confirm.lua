-- Shortens the retention of settlements whose responses have arrived.
-- KEYS: settled. ARGV: retention us, request ids...
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', string.format('%d', now + tonumber(ARGV[1])), ARGV[i])
end
return 1
