"""Limits and rejections that all stores of idempotency records share."""

from __future__ import annotations

from typing import Final

from services.core.errors import IdempotencyKeysExceeded
from services.ports.idempotency import RecordLimits

WATCH_S: Final = 2.0
READ_CHUNKS: Final = 256
# Of one tenant's records, the oldest that a write examines for room; 64 rounds of 64 in the script.
EXAMINED: Final = 4096


def keys_exceeded(limits: RecordLimits, wait_s: float) -> IdempotencyKeysExceeded:
    return IdempotencyKeysExceeded(
        f"{limits.max_tenant_keys} idempotency keys of this tenant are remembered, the most; "
        "send it without a key, or later",
        retry_after_s=max(wait_s, 0.001),
        limit=limits.max_tenant_keys,
    )
