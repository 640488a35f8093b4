"""How fast a tenant's output leaves this gateway: token buckets of the tenant and of each stream. Pure.

What leaves is credit for a worker, or an answer that is complete. Streams that wait share what the tenant's
bucket has max-min, at least a token each, those that waited longest first. An answer leaves whole: what it
takes beyond the bucket delays the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.core.records import Tenant

BURST_S: Final = 1.0  # a bucket holds the tokens of so much time, and one
_MAX_SHARE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class EgressRates:
    """Tokens per second of a tenant at one gateway, and of each of its streams. 0: no limit."""

    tenant: float = 0.0
    stream: float = 0.0

    @property
    def burst(self) -> float:
        """The most that the tenant's bucket holds."""
        return _burst(self.tenant)


def egress_rates(tenant: Tenant, gateways: int) -> EgressRates | None:
    """Return the rates at one of ``gateways`` that share the tenant's; None without a limit."""
    if not (tenant.egress_tokens_per_second or tenant.stream_tokens_per_second):
        return None
    share = tenant.egress_tokens_per_second / max(1, gateways)
    return EgressRates(share, float(tenant.stream_tokens_per_second))


def _burst(rate: float) -> float:
    # One token more, so that a bucket of few tokens earns while a whole one waits for its turn.
    return 1.0 + rate * BURST_S if rate else math.inf


class EgressBucket:
    """Tokens that may leave. It begins full; below 0 it has a debt."""

    __slots__ = ("_filled_s", "level")

    def __init__(self) -> None:
        self.level = math.inf
        self._filled_s = 0.0

    def fill(self, rate: float, now_s: float) -> None:
        """Add what the time since the last call earned at ``rate``, which may differ each time."""
        earned = rate * (now_s - self._filled_s) if rate else math.inf
        self.level = min(self.level + earned, _burst(rate))
        self._filled_s = now_s


@dataclass(slots=True, eq=False)
class EgressWait:
    """Output that waits for the rates. Its owner changes ``wanted``; ``give`` receives what may leave."""

    bucket: EgressBucket  # the bucket of its stream
    give: Callable[[int], None]
    whole: bool = False  # whether it leaves at once, as an answer does
    wanted: int = 0
    since_s: float = 0.0  # start of the wait, or the time at which something left last


class TenantEgress:
    """The output of one tenant that waits. Single writer: the gateway's event loop."""

    def __init__(self) -> None:
        self.bucket = EgressBucket()
        self.waits: dict[EgressWait, None] = {}  # waits, the one that received tokens longest ago first
        self.held_s = 0.0  # time that all of them waited

    def rests(self, rates: EgressRates) -> bool:
        """Whether nothing waits and the bucket is full, as that of a new object is."""
        return not self.waits and self.bucket.level >= rates.burst

    def due(self, rates: EgressRates, now_s: float) -> dict[EgressWait, int]:
        """Take from the buckets, and return, what leaves now of each wait."""
        self.bucket.fill(rates.tenant, now_s)
        for wait in self.waits:
            wait.bucket.fill(rates.stream, now_s)
        found: dict[EgressWait, int] = {}
        sharing = list(self.waits)
        while sharing and self.bucket.level >= 1:
            share = max(1, int(min(self.bucket.level, _MAX_SHARE)) // len(sharing))
            sharing = [wait for wait in sharing if self._take(wait, share, found)]
        for wait in found:
            del self.waits[wait]
            self.held_s += now_s - wait.since_s
            if wait.wanted:
                wait.since_s = now_s
                self.waits[wait] = None
        return found

    def _take(self, wait: EgressWait, share: int, found: dict[EgressWait, int]) -> bool:
        """Take up to ``share`` tokens for a wait; return whether it takes more."""
        room = min(self.bucket.level, wait.bucket.level)
        if room < 1:
            return False
        tokens = wait.wanted if wait.whole else int(min(room, share, wait.wanted))
        self.bucket.level -= tokens
        wait.bucket.level -= tokens
        wait.wanted -= tokens
        found[wait] = found.pop(wait, 0) + tokens  # last, so that its turn is after all others
        return wait.wanted > 0
