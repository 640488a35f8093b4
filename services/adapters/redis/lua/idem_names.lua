-- Returns the records of a tenant that are deleted first. KEYS: index. ARGV: most of them
return redis.call('ZRANGE', KEYS[1], 0, ARGV[1] - 1)
