-- Shared by the scripts that count tokens; concatenated before them.
-- Count the totals (prompt, output, cached) minus the tokens already charged to the same request, under today.
-- The first charge also counts the request. usage: hash "<day>:<what>" -> count
-- Returns the tokens charged to the request by now.
local function count_usage(usage, now, keep_days, charged, totals)
  local day, sums = math.floor(now / 86400000000), {}
  if not charged[1] and redis.call('HINCRBY', usage, day .. ':requests', 1) == 1 then
    for _, name in ipairs(redis.call('HKEYS', usage)) do
      if tonumber(string.match(name, '^%d+')) <= day - keep_days then redis.call('HDEL', usage, name) end
    end
  end
  for i, what in ipairs({'prompt', 'output', 'cached'}) do
    local before, total = tonumber(charged[i] or '0'), tonumber(totals[i])
    sums[i] = string.format('%d', math.max(total, before))
    redis.call('HINCRBY', usage, day .. ':' .. what .. '_tokens', string.format('%d', math.max(0, total - before)))
  end
  redis.call('EXPIRE', usage, (keep_days + 1) * 86400)
  return sums
end

-- Whether the head of a record has the charges of this request or of none. A new request may use the same key.
local function is_of(head, request_id)
  local charged = redis.call('HGET', head, 'cr')
  return not charged or charged == request_id
end

-- The same for a request under an idempotency key: its record's head stores the charged tokens.
local function count_record(head, request_id, usage, now, keep_days, totals)
  local charged = is_of(head, request_id) and redis.call('HMGET', head, 'cp', 'co', 'cc') or {}
  local sums = count_usage(usage, now, keep_days, charged, totals)
  redis.call('HSET', head, 'cr', request_id, 'cp', sums[1], 'co', sums[2], 'cc', sums[3])
end
