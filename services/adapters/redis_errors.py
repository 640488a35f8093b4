"""What a call to Redis raises when Redis is away, whichever way the connection went."""

from __future__ import annotations

from typing import Final

import redis.exceptions

# RuntimeError: a write on a connection that was reset while it lay in the pool, by uvloop's transports.
AWAY: Final = (redis.exceptions.RedisError, OSError, TimeoutError, RuntimeError)
