-- Shortens the retention of records whose settlements' responses have arrived. KEYS: records. ARGV: retention ms
for _, key in ipairs(KEYS) do
  if redis.call('HGET', key, 's') == 'd' then redis.call('PEXPIRE', key, ARGV[1]) end
end
return 1
