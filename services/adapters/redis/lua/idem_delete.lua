-- Deletes a record in any state. KEYS: head, log, index, bodies, sizes. ARGV: digest
-- Returns 1 if there was one.
forget_size(KEYS[4], KEYS[5], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[2])
return redis.call('DEL', KEYS[1])
