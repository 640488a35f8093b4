-- Shared by all scripts; concatenated before them.
local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- Return a number as the decimal text that Redis stores; tostring would round above 10^14.
local function int(value)
  return string.format('%d', value)
end
