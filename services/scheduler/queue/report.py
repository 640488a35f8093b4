"""Queue report for operators. Reads a term's state between two of its turns and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from services.core.decisions import ClassWait, PoolQueue, QueueShare
from services.core.fleet import TenantCounter
from services.core.records import Priority
from services.scheduler.fleet.view import FleetView, PoolLevels
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.queue.waiting import QueuedPlacement

MAX_SHARES: Final = 100  # per pool
_MAX_WAIT_S: Final = 3600.0  # the maximum age of an arrival


@dataclass(frozen=True, slots=True)
class Now:
    """One instant by both clocks."""

    monotonic_s: float
    unix_s: float


@dataclass(slots=True)
class _Sum:
    queued: int = 0
    prompt_tokens: int = 0
    oldest_wait_s: float = 0.0

    def add(self, item: QueuedPlacement, wait_s: float) -> None:
        self.queued += 1
        self.prompt_tokens += item.spec.prompt_tokens
        self.oldest_wait_s = max(self.oldest_wait_s, wait_s)


def pools_of(queue: FlowQueue, fleet: FleetView, now: Now, *, tenant: str = "") -> list[PoolQueue]:
    """Return every pool with a worker or a queue, by digest; only the shares of ``tenant`` if it is given."""
    waiting, levels = queue.waiting.by_version(), fleet.levels_by_version()
    return [
        _pool(
            digest,
            waiting.get(digest, ()),
            levels.get(digest, PoolLevels()),
            lambda priority, digest=digest: queue.waiting.predicted_wait_s(  # type: ignore[misc]
                digest, priority, now.monotonic_s
            ),
            now,
            tenant,
        )
        for digest in sorted({*waiting, *levels})
    ]


def _pool(
    digest: str,
    items: Iterable[QueuedPlacement],
    levels: PoolLevels,
    predicted_s: Callable[[Priority], float | None],
    now: Now,
    tenant: str,
) -> PoolQueue:
    total = _Sum()
    sums: dict[tuple[str, Priority], _Sum] = {}
    waiting: set[Priority] = set()
    for item in items:
        waiting.add(item.spec.priority)
        wait_s = _wait_s(item, now)
        total.add(item, wait_s)
        if not tenant or item.spec.tenant_id == tenant:
            sums.setdefault((item.spec.tenant_id, item.spec.priority), _Sum()).add(item, wait_s)
    shares = _shares(sums)
    waits = tuple(ClassWait(each, predicted_s(each)) for each in reversed([*Priority]) if each in waiting)
    return PoolQueue(
        version_digest=digest,
        queued=total.queued,
        queued_prompt_tokens=total.prompt_tokens,
        oldest_wait_s=total.oldest_wait_s,
        predicted_wait_s=waits[-1].predicted_wait_s if waits else predicted_s(Priority.INTERACTIVE),
        **asdict(levels),
        shares=shares[:MAX_SHARES],
        shares_left_off=max(0, len(shares) - MAX_SHARES),
        waits=waits,
    )


def counters_of(queue: FlowQueue, digest: str, *, tenant: str = "") -> tuple[TenantCounter, ...]:
    """Return the counters of a pool's tenants, the largest first; only those of ``tenant`` if it is given."""
    shares = dict(queue.ledger.pools()).get(digest, {})
    found = [
        TenantCounter(account.tenant, digest, priority, account.value)
        for priority, fair in shares.items()
        for account in fair.accounts()
        if account.tenant == tenant or not tenant
    ]
    found.sort(key=lambda counter: (-counter.virtual_tokens, counter.tenant, -counter.priority.rank))
    return tuple(found[:MAX_SHARES])


def counter_gaps(queue: FlowQueue) -> dict[tuple[str, Priority], float]:
    """Return the spread of the counters of waiting tenants by model and class, in weighted tokens over
    weight. A model with several queued versions has the widest spread of these."""
    found: dict[tuple[str, Priority], float] = {}
    for digest, shares in queue.ledger.pools():
        item = next(queue.waiting.of_version(digest), None)
        if item is None:
            continue
        for priority, fair in shares.items():
            key = item.spec.model, priority
            found[key] = max(found.get(key, 0.0), fair.gap())
    return found


def _shares(sums: Mapping[tuple[str, Priority], _Sum]) -> tuple[QueueShare, ...]:
    found = [
        QueueShare(tenant, priority, one.queued, one.prompt_tokens, one.oldest_wait_s)
        for (tenant, priority), one in sums.items()
    ]
    found.sort(key=lambda share: (-share.queued, share.tenant, -share.priority.rank))
    return tuple(found)


def _wait_s(item: QueuedPlacement, now: Now) -> float:
    """Return the time since the request reached its gateway, within a plausible range."""
    here_s = max(0.0, now.monotonic_s - item.queued_s)
    return max(here_s, min(_MAX_WAIT_S, now.unix_s - item.spec.arrival_unix_us / 1e6))
