"""Service ledger: the service of tenants, from grants and reports. Counters of every pool and open advances.

A grant charges its expected cost in advance. The advance ends with the first of: its worker reports that the
sequence ended there, the gateway returns the grant, the grant expires unseen, the sequence is granted again,
its worker starts another incarnation, or ``max_age_s``. Reports charge the tokens produced; an open advance
on the same worker pays for them first. So between two reports a tenant's counter is the reported service plus
the rest of its open advances, without double counting, and after the last report it is the reported service.

A term starts with an empty ledger. Each worker's first report contains the counters that it received from the
last leader, and the floor at that time; the highest counter of a tenant applies. Service reported since is
charged in addition.

Single writer: the task of the scheduler's service. Time is an argument, in monotonic seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.core.fleet import (
    MAX_COUNTER_TOKENS,
    ReportSnapshot,
    SequenceUsage,
    TenantCounter,
    TenantTokens,
)
from services.core.generation import Grant, PlaceSpec
from services.core.output_quantile import OutputPolicy, OutputQuantiles
from services.core.records import Priority
from services.scheduler.policy.queue.fairness import FairShares, HeldShares, ServiceWeights
from services.scheduler.policy.queue.length import is_long

MAX_ADVANCES: Final = 262_144
MAX_POOLS: Final = 1024
MAX_WORKERS: Final = 16_384
LOWEST: Final = min(Priority, key=lambda priority: priority.rank)
_NOTHING_HELD: Final[Mapping[str, int]] = {}
_MAX_BROKEN_OFF: Final = 8192  # sequences that left a worker unfinished and were not submitted again yet

Shares = dict[Priority, FairShares]


@dataclass(frozen=True, slots=True)
class LedgerPolicy:
    """Settings of the ledger.

    ``hold_s``: a grant that no report contains expires after it. ``max_age_s``: age at which an advance ends;
    later output of its sequence is charged as it is reported. ``await_s``: time after a worker restored
    counters within which gateways submit again what waited in the earlier term.
    """

    weights: ServiceWeights = field(default_factory=ServiceWeights)
    outputs: OutputPolicy = field(default_factory=OutputPolicy)
    hold_s: float = 5.0
    max_age_s: float = 300.0
    await_s: float = 5.0


@dataclass(slots=True, eq=False)
class Advance:
    """An open advance of one grant."""

    tenant: str
    digest: str
    priority: Priority
    worker_id: str
    number: int  # sequence number of the grant
    request: tuple[str, int]
    prompt_tokens: int
    predicted_tokens: int
    long_tokens: int  # KV of a long prompt and its output; 0 for a short one
    budget_tokens: int  # KV of a tenant that has a budget; 0 for others
    virtual: float  # amount charged in advance
    given_s: float
    seen: bool = False  # a report contains the grant
    open: bool = True


@dataclass(slots=True, eq=False)
class _Worker:
    incarnation: int
    has_reported: bool = False
    advances: dict[int, Advance] = field(default_factory=dict)


class ServiceLedger:
    """The counters of all pools of a term."""

    def __init__(self, policy: LedgerPolicy) -> None:
        self.policy = policy
        self.outputs = OutputQuantiles(policy.outputs)
        self._pools: dict[str, Shares] = {}
        self._workers: dict[str, _Worker] = {}
        self._requests: dict[tuple[str, int], Advance] = {}
        self._unseen: deque[Advance] = deque()
        self._by_age: deque[Advance] = deque()
        self._long: dict[tuple[str, str], int] = {}
        # KV of tenants that have budgets: by version and tenant, and by worker.
        self._budgeted: dict[tuple[str, str], Counter[str]] = {}
        # Sequences that each tenant holds, of a class and those above it.
        self._held: dict[str, dict[Priority, HeldShares]] = {}
        self._broken_off: dict[tuple[str, int], None] = {}
        self._awaits = False  # gateways of an earlier leader may still submit again
        self._await_until_s: float | None = None

    @property
    def open_advances(self) -> int:
        return sum(len(worker.advances) for worker in self._workers.values())

    def shares(self, digest: str) -> Shares:
        """Return the counters of a version's classes."""
        found = self._pools.get(digest)
        if found is None:
            if len(self._pools) >= MAX_POOLS:
                self._forget_pools()
            found = self._pools[digest] = {priority: FairShares() for priority in Priority}
        return found

    def pools(self) -> Iterator[tuple[str, Shares]]:
        yield from self._pools.items()

    def long_tokens(self, digest: str, tenant: str) -> int:
        """Return the KV, in tokens, that granted long prompts of the tenant hold in the pool."""
        return self._long.get((digest, tenant), 0)

    def budget_tokens(self, digest: str, tenant: str) -> Mapping[str, int]:
        """Return the KV, in tokens, that grants of a tenant with a budget hold on each worker."""
        return self._budgeted.get((digest, tenant), _NOTHING_HELD)

    def over_share(self, digest: str, priority: Priority, tenant: str) -> bool:
        """Return whether a waiting tenant exceeds its share, so that others are placed first."""
        held = self._held.get(digest)
        if held is None:
            return False
        account = self.shares(digest)[priority].find(tenant)
        return account is not None and held[priority].over_share(tenant, account.waiting)

    def is_below_share(self, digest: str, tenant: str, weight: float) -> bool:
        """Return whether a tenant may get one more sequence at the expense of others."""
        held = self._held.get(digest)
        return held is not None and held[LOWEST].is_below(tenant, weight)

    # --- grants -----------------------------------------------------------------------------------

    def submitted(self, spec: PlaceSpec) -> None:
        """Count a submitted placement. One that left a worker unfinished and excludes no worker was
        preempted."""
        request = spec.request_id, spec.choice
        if request in self._broken_off:
            del self._broken_off[request]
            if not spec.excluded_workers:
                self.outputs.note_preempted(spec.version_digest)

    def cost(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> float:
        """Return the cost in weighted tokens."""
        return self.policy.weights.cost(prompt_tokens, output_tokens, cached_tokens=cached_tokens)

    def granted(
        self, grant: Grant, spec: PlaceSpec, *, predicted_tokens: int, cost_tokens: float, now_s: float
    ) -> None:
        """Charge the grant in advance. The tenant still waits, at least with the granted placement."""
        request = spec.request_id, spec.choice
        if (earlier := self._requests.get(request)) is not None:
            self._close(earlier)
        shares = self.shares(spec.version_digest)[spec.priority]
        account = shares.find(spec.tenant_id)
        assert account is not None, "a tenant without a counter was granted"
        long_tokens = spec.prompt_tokens + predicted_tokens if is_long(spec.prompt_tokens) else 0
        advance = Advance(
            tenant=spec.tenant_id,
            digest=spec.version_digest,
            priority=spec.priority,
            worker_id=grant.worker_id,
            number=grant.sequence,
            request=request,
            prompt_tokens=spec.prompt_tokens,
            predicted_tokens=predicted_tokens,
            long_tokens=long_tokens,
            budget_tokens=spec.prompt_tokens + predicted_tokens if spec.kv_share else 0,
            virtual=shares.advance(account, cost_tokens, grant.worker_id),
            given_s=now_s,
        )
        self._worker(grant.worker_id, grant.incarnation).advances[grant.sequence] = advance
        self._requests[request] = advance
        self._hold(advance, account.weight or 1.0)
        self._unseen.append(advance)
        self._by_age.append(advance)
        if long_tokens:
            key = spec.version_digest, spec.tenant_id
            self._long[key] = self._long.get(key, 0) + long_tokens
        if advance.budget_tokens:
            held = self._budgeted.setdefault((spec.version_digest, spec.tenant_id), Counter())
            held[grant.worker_id] += advance.budget_tokens
        while len(self._by_age) > MAX_ADVANCES:
            self._close(self._by_age.popleft())

    def returned(self, grant: Grant) -> None:
        """End the advance of a grant that its gateway returned before any worker saw it."""
        worker = self._workers.get(grant.worker_id)
        advance = None if worker is None else worker.advances.get(grant.sequence)
        if advance is not None:
            self._close(advance)

    def expire(self, now_s: float) -> None:
        """End the advances of expired grants and those that are too old."""
        while self._unseen and self._is_past(self._unseen[0], now_s - self.policy.hold_s, seen=True):
            advance = self._unseen.popleft()
            if not advance.seen:
                self._close(advance)
        while self._by_age and self._is_past(self._by_age[0], now_s - self.policy.max_age_s, seen=False):
            self._close(self._by_age.popleft())
        if self._awaits and self._await_until_s is None:
            self._await_until_s = now_s + self.policy.await_s
        if self._await_until_s is not None and now_s >= self._await_until_s:
            self._awaits, self._await_until_s = False, None
            for shares in self._pools.values():
                for found in shares.values():
                    found.stop_waiting()

    # --- reports ----------------------------------------------------------------------------------

    def report(self, snapshot: ReportSnapshot) -> tuple[TenantCounter, ...]:
        """Apply a report; return the counters of its tenants, for the worker to store.

        The caller has removed deltas that were applied before (``Term``).
        """
        worker = self._worker(snapshot.worker_id, snapshot.incarnation)
        if not worker.has_reported:
            worker.has_reported = True
            self._restore(snapshot.counters)
        for number in snapshot.grants_seen:
            if (advance := worker.advances.get(number)) is not None:
                advance.seen = True
        for use in snapshot.tenants:
            self._charge(use, snapshot.worker_id)
        for digest, priority in dict.fromkeys((use.digest, use.priority) for use in snapshot.tenants):
            self.shares(digest)[priority].raise_floor()  # the next leader starts its tenants from it
        counters = [counter for use in snapshot.tenants if (counter := self._counter(use))]
        for last in snapshot.usage:
            self._left(last, snapshot.worker_id)
        return tuple(counters)

    def check_integrity(self) -> None:
        """Raise AssertionError when counters and open advances disagree."""
        tabs: dict[tuple[str, Priority, str, str], int] = {}
        long: dict[tuple[str, str], int] = {}
        budgeted: dict[tuple[str, str], Counter[str]] = {}
        for worker_id, worker in self._workers.items():
            for advance in worker.advances.values():
                assert advance.open
                assert advance.worker_id == worker_id
                key = advance.digest, advance.priority, advance.tenant, worker_id
                tabs[key] = tabs.get(key, 0) + 1
                if advance.budget_tokens:
                    held_here = budgeted.setdefault((advance.digest, advance.tenant), Counter())
                    held_here[worker_id] += advance.budget_tokens
                if advance.long_tokens:
                    name = advance.digest, advance.tenant
                    long[name] = long.get(name, 0) + advance.long_tokens
        assert budgeted == self._budgeted, "KV of a tenant with a budget leaked"
        assert long == self._long, "tokens of long prompts leaked"
        for classes in self._held.values():
            for held in classes.values():
                held.check_integrity()
        assert sum(found[LOWEST].sequences for found in self._held.values()) == self.open_advances
        for digest, shares in self._pools.items():
            for priority, found in shares.items():
                found.check_integrity()
                for account in found.accounts():
                    for worker_id, tab in account.tabs.items():
                        count = tabs.pop((digest, priority, account.tenant, worker_id), 0)
                        assert tab.advances == count, "a tab and its advances disagree"
        assert not tabs, "an advance has no tab"

    # --- inside -----------------------------------------------------------------------------------

    def _worker(self, worker_id: str, incarnation: int) -> _Worker:
        worker = self._workers.get(worker_id)
        if worker is None:
            if len(self._workers) >= MAX_WORKERS:
                for name in [name for name, found in self._workers.items() if not found.advances]:
                    del self._workers[name]
            worker = self._workers[worker_id] = _Worker(incarnation)
        elif incarnation > worker.incarnation:
            for advance in list(worker.advances.values()):
                self._close(advance)
            worker.incarnation = incarnation
        return worker

    def _charge(self, use: TenantTokens, worker_id: str) -> None:
        cost = self.policy.weights.cost(use.prefill, use.output, cached_tokens=use.cached)
        cost += use.device_us / 1e3  # The counters of a fixed-cost version are in device milliseconds.
        if cost > 0.0:
            self.shares(use.digest)[use.priority].charge(use.tenant, cost, worker_id)

    def _counter(self, use: TenantTokens) -> TenantCounter | None:
        """Return what the next leader starts the tenant from, None without any service."""
        shares = self.shares(use.digest)[use.priority]
        account = shares.find(use.tenant)
        if account is None or account.base + account.served <= 0.0:
            return None
        served = min(MAX_COUNTER_TOKENS, shares.exported_counter(account))
        floor = min(MAX_COUNTER_TOKENS, shares.floor)
        return TenantCounter(use.tenant, use.digest, use.priority, served, floor)

    def _left(self, last: SequenceUsage, worker_id: str) -> None:
        """End the advance of a sequence that left the worker; its use was charged by this report or
        earlier."""
        request = last.request_id, last.choice
        advance = self._requests.get(request)
        mine = advance is not None and advance.worker_id == worker_id
        if last.ended and not last.output_tokens:
            pass  # it ended with its prefill, as requested: no output to predict others by
        elif last.ended:
            predicted = advance.predicted_tokens if advance is not None and mine else None
            self.outputs.note(last.tenant, last.digest, last.output_tokens, predicted_tokens=predicted)
        elif last.output_tokens:
            self._broken_off[request] = None
            if len(self._broken_off) > _MAX_BROKEN_OFF:
                del self._broken_off[next(iter(self._broken_off))]
        if advance is not None and mine:
            earlier = max(0, advance.prompt_tokens - last.prompt_tokens)  # output of earlier runs
            output = max(0, last.output_tokens - earlier)
            prefilled = advance.prompt_tokens if output or last.ended else 0
            self._close(advance, used_tokens=self.cost(prefilled, output, last.cached_tokens))

    def _close(self, advance: Advance, *, used_tokens: float = 0.0) -> None:
        if not advance.open:
            return
        advance.open = False
        self._workers[advance.worker_id].advances.pop(advance.number, None)
        if self._requests.get(advance.request) is advance:
            del self._requests[advance.request]
        shares = self._pools[advance.digest][advance.priority]
        shares.close(advance.tenant, advance.worker_id, advance.virtual, used_tokens=used_tokens)
        self._release_held(advance)
        if advance.budget_tokens:
            held = self._budgeted[advance.digest, advance.tenant]
            held[advance.worker_id] -= advance.budget_tokens
            if not held[advance.worker_id]:
                del held[advance.worker_id]
            if not held:
                del self._budgeted[advance.digest, advance.tenant]
        if advance.long_tokens:
            key = advance.digest, advance.tenant
            self._long[key] -= advance.long_tokens
            if not self._long[key]:
                del self._long[key]

    def _hold(self, advance: Advance, weight: float) -> None:
        classes = self._held.get(advance.digest)
        if classes is None:
            classes = self._held[advance.digest] = {priority: HeldShares() for priority in Priority}
        for priority, held in classes.items():
            if priority.rank <= advance.priority.rank:
                held.take(advance.tenant, weight)

    def _release_held(self, advance: Advance) -> None:
        classes = self._held[advance.digest]
        for priority, held in classes.items():
            if priority.rank <= advance.priority.rank:
                held.release(advance.tenant)
        if not len(classes[LOWEST]):
            del self._held[advance.digest]

    def _is_past(self, advance: Advance, since_s: float, *, seen: bool) -> bool:
        return not advance.open or (seen and advance.seen) or advance.given_s <= since_s

    def _restore(self, counters: Sequence[TenantCounter]) -> None:
        self._awaits = self._awaits or bool(counters)
        # So that few of them raise the floor.
        for counter in sorted(counters, key=lambda found: -found.floor_tokens):
            shares = self.shares(counter.digest)[counter.priority]
            shares.restore(counter.tenant, counter.virtual_tokens, floor=counter.floor_tokens)

    def _forget_pools(self) -> None:
        """Remove the pools without waiting placements and grants."""
        idle = [
            digest for digest, shares in self._pools.items() if all(found.idle for found in shares.values())
        ]
        for digest in idle:
            del self._pools[digest]
