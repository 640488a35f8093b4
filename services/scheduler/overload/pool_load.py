"""Load of the leader's pools: waiting placements, token rates, and the placements to shed.

Implements the flow queue's gate: the queue calls it before a placement enters, and for each that enters or
leaves; worker reports provide the tokens computed. Single writer: the task that owns the queue. Time is an
argument, in monotonic seconds.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from services.core.errors import (
    DeadlineUnmeetable,
    FairwayError,
    OverCommitment,
    Overloaded,
    VersionFailing,
    retry_in,
)
from services.core.estimates.capacity import RequestMix, mix_of
from services.core.estimates.pool_load import ClassLoad
from services.core.fleet import PoolPressure, SequenceUsage, TenantTokens
from services.core.generation import PlaceSpec
from services.core.records import Priority
from services.scheduler.policy.overload.pressure import (
    MAX_WAIT_S,
    ArrivalRate,
    Backlog,
    TokenRate,
    pressure_ratio,
    wait_s,
)
from services.scheduler.policy.overload.rates import TenantRates
from services.scheduler.policy.overload.shedding import (
    Hopeless,
    OfferedPlacement,
    Shed,
    SheddingOrder,
    SheddingPolicy,
    ShedRank,
    Take,
    Verdict,
    judge,
    retry_after_s,
    spread_s,
)
from services.scheduler.queue.waiting import UNSETTLED, QueuedPlacement, Unsettled

MAX_PRESSURES: Final = 1024  # pools in one frame to a gateway
_SATURATED_S: Final = 20.0  # time of waiting work after which the measured rate is what the workers can do
_MIX_REQUESTS: Final = 128  # requests that ended last, of which a pool's mix is made

Victim = tuple[QueuedPlacement, FairwayError]
_Class = tuple[str, Priority]


@dataclass(frozen=True, slots=True)
class _Waits:
    """A placement in the queue, with the facts that shedding uses."""

    item: QueuedPlacement
    rank: ShedRank
    retried: bool
    work: float  # tokens that it is expected to compute

    @property
    def number(self) -> int:
        return self.item.number


@dataclass(slots=True)
class PoolWork:
    """Work of one pool since the term began: what arrived, what waits, and what requests that ended took.

    A request that is shed counts as arrived at its first attempt, because it is demand too.
    """

    target_s: Callable[[Priority], float]  # target of a class without an objective
    # By the deployment that requests name, empty for rows, and class.
    arrived: dict[_Class, float] = field(default_factory=dict)
    waiting: dict[_Class, float] = field(default_factory=dict)
    targets: dict[_Class, float] = field(default_factory=dict)  # targets of the last arrivals
    queued: Counter[tuple[str, str]] = field(default_factory=Counter)  # placements by deployment, node group
    waits_since_s: float = math.inf  # time since which a placement has waited
    measured_rate: float | None = None  # tokens per second of one worker, while work has waited for long
    # Prompt, cached and output tokens of requests that ended, and their mean output.
    ended: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_MIX_REQUESTS))
    mean_output_tokens: float | None = None

    def end(self, use: SequenceUsage) -> None:
        """Learn what a request took."""
        self.ended.append((use.prompt_tokens, min(use.cached_tokens, use.prompt_tokens), use.output_tokens))
        mean = self.mean_output_tokens
        self.mean_output_tokens = (
            use.output_tokens if mean is None else mean + (use.output_tokens - mean) / _MIX_REQUESTS
        )

    def arrive(self, spec: PlaceSpec, tokens: float, target_s: float) -> None:
        """Count a placement that was submitted for the first time."""
        key = spec.model, spec.priority
        self.arrived[key] = self.arrived.get(key, 0.0) + tokens
        self.targets[key] = target_s

    def tokens(self, spec: PlaceSpec, predicted_tokens: int) -> float:
        """Return the tokens of a request: its prompt and the mean output, the predicted one before any."""
        mean = self.mean_output_tokens
        output = predicted_tokens if mean is None else min(spec.max_output_tokens, mean)
        return spec.prompt_tokens + output

    @property
    def mix(self) -> RequestMix | None:
        """The mix of the requests that ended lately; None without any that produced tokens."""
        return mix_of(self.ended) if any(output for _, _, output in self.ended) else None

    @property
    def request_tokens(self) -> float:
        """Prompt and output tokens of the mean request."""
        return sum(prompt + output for prompt, _, output in self.ended) / max(1, len(self.ended)) or 1.0

    @property
    def classes(self) -> tuple[ClassLoad, ...]:
        """The classes that had an arrival."""
        return tuple(
            ClassLoad(
                priority,
                self.targets.get((deployment, priority), self.target_s(priority)),
                self.waiting.get((deployment, priority), 0.0),
                arrived,
                deployment=deployment,
            )
            for (deployment, priority), arrived in self.arrived.items()
        )


@dataclass(slots=True, eq=False)
class _Pool:
    work: PoolWork
    backlog: Backlog = field(default_factory=Backlog)
    order: SheddingOrder[_Waits] = field(default_factory=SheddingOrder)
    of_tenant: dict[str, SheddingOrder[_Waits]] = field(default_factory=dict)
    rate: TokenRate = field(default_factory=TokenRate)
    # Weights other than 1 of the tenants that wait.
    weights: dict[str, float] = field(default_factory=dict)
    arrivals: dict[Priority, ArrivalRate] = field(
        default_factory=lambda: {priority: ArrivalRate() for priority in Priority}
    )
    model: str = ""

    def arriving_above(self, priority: Priority, now_s: float) -> float:
        """Return the tokens per second that arrive in higher classes."""
        above = (found for other, found in self.arrivals.items() if other.rank > priority.rank)
        return sum(found.tokens_per_s(now_s) for found in above)


class Overload:
    """Implements ``queue.waiting.QueueGate``. ``serving`` returns how many workers of a version take requests
    now; ``failing_s`` returns how long a version rejects requests, None when it accepts this one."""

    def __init__(
        self,
        policy: SheddingPolicy,
        rng: Random,
        serving: Callable[[str], int],
        *,
        failing_s: Callable[[str, float], float | None] = lambda _digest, _now_s: None,
    ) -> None:
        self.policy: Final = policy
        self._rng = rng
        self._serving = serving
        self._failing_s = failing_s
        self._pools: dict[str, _Pool] = {}
        self._waits: dict[int, _Waits] = {}
        self._victims: dict[int, Victim] = {}
        self._tenants = TenantRates()

    # --- observations -----------------------------------------------------------------------------

    def worked(self, tenants: Iterable[TenantTokens], now_s: float) -> None:
        """Count the tokens that a worker computed."""
        done: dict[str, int] = {}
        for use in tenants:
            tokens = use.prefill + use.output
            done[use.digest] = done.get(use.digest, 0) + tokens
            self._tenants.note(use.tenant, tokens, now_s)
        for digest, tokens in done.items():
            pool = self._pool(digest)
            pool.rate.note(tokens, now_s, workers=self._serving(digest), waits=len(pool.order) > 0)
        for use in tenants:
            if use.rows:
                arrived = self._pool(use.digest).work.arrived
                arrived["", use.priority] = arrived.get(("", use.priority), 0.0) + use.rows

    def ended(self, usage: Iterable[SequenceUsage]) -> None:
        """Learn what requests took that ended."""
        for one in usage:
            if one.ended and one.output_tokens:
                self._pool(one.digest).work.end(one)

    def entered(self, item: QueuedPlacement, now_s: float) -> None:
        """Count a placement that entered the queue."""
        pool = self._pool(item.spec.version_digest)
        arrival = self._arrival(item.spec, now_s)
        work = pool.work.tokens(item.spec, item.predicted_tokens)
        waits = _Waits(item, arrival.rank, arrival.attempt > 0, work)
        pool.work.arrive(item.spec, work, self._target_s(item.spec))
        key = item.spec.model, item.priority
        pool.work.waiting[key] = pool.work.waiting.get(key, 0.0) + work
        pool.work.queued[item.spec.model, item.spec.node_group] += 1
        self._waits[item.number] = waits
        if not len(pool.order):
            pool.work.waits_since_s = now_s
        pool.order.add(waits)
        mine = pool.of_tenant.get(item.tenant)
        if mine is None:
            mine = pool.of_tenant[item.tenant] = SheddingOrder()
        mine.add(waits)
        pool.backlog.add(item.priority, item.tenant, item.demand.reserved_tokens, self._target_s(item.spec))
        pool.arrivals[item.priority].note(item.demand.reserved_tokens, now_s)
        pool.model = item.spec.model
        pool.weights.pop(item.tenant, None)
        if item.weight != 1.0:
            pool.weights[item.tenant] = item.weight

    def left(self, item: QueuedPlacement, now_s: float) -> None:
        """Count a placement that left the queue, for any reason."""
        waits = self._waits.pop(item.number)
        self._victims.pop(item.number, None)
        pool = self._pools[item.spec.version_digest]
        pool.order.discard(waits)
        pool.of_tenant[item.tenant].discard(waits)
        if not len(pool.of_tenant[item.tenant]):
            del pool.of_tenant[item.tenant]
        pool.work.waiting[item.spec.model, item.priority] -= waits.work
        pool.work.queued[item.spec.model, item.spec.node_group] -= 1
        if not len(pool.order):
            pool.work.waiting.clear()  # what rounding left
            pool.work.queued.clear()
            pool.work.waits_since_s = math.inf
        tokens, target_s = item.demand.reserved_tokens, self._target_s(item.spec)
        pool.backlog.remove(item.priority, item.tenant, tokens, target_s)
        if not pool.backlog.holds(item.tenant):
            pool.weights.pop(item.tenant, None)

    def keep(self, digests: Collection[str]) -> None:
        """Remove the versions that have neither a worker nor a queue; ``digests`` have a worker."""
        for digest in [digest for digest in self._pools if digest not in digests]:
            if not len(self._pools[digest].order):
                del self._pools[digest]

    # --- decisions --------------------------------------------------------------------------------

    def admit(
        self, spec: PlaceSpec, predicted_tokens: int, now_s: float, *, settled: bool = True
    ) -> FairwayError | Unsettled | None:
        """Return why the placement may not wait, None when it may; another may then be shed for it."""
        later_s = None if spec.begun else self._failing_s(spec.version_digest, now_s)
        if later_s is not None:
            return _failing(spec, spread_s(later_s, self.policy, self._rng))
        arrival, tokens = self._arrival(spec, now_s), spec.prompt_tokens + predicted_tokens
        verdict = self._judge(spec, arrival, tokens, now_s)
        if not settled and not isinstance(verdict, Take):
            return UNSETTLED
        match verdict:
            case Hopeless(found_s, limit_s, later_s):
                return _unmeetable(spec, found_s, limit_s, later_s)
            case Shed(found_s, limit_s, later_s, claims):
                victim = self._pools[spec.version_digest].order.victim_for(
                    arrival.rank, retried=arrival.attempt > 0
                )
                if victim is None:
                    if not spec.attempt:
                        work = self._pool(spec.version_digest).work
                        work.arrive(spec, work.tokens(spec, predicted_tokens), self._target_s(spec))
                    return _shed_error(spec, arrival.rank, spec.priority, found_s, limit_s, later_s)
                if claims:
                    error = self._error_of(victim, spec.priority, found_s, limit_s)
                    self._victims[victim.number] = victim.item, error
        return None

    def take_victims(self) -> tuple[Victim, ...]:
        """Return and clear the waiting placements that are refused for others."""
        victims, self._victims = tuple(self._victims.values()), {}
        return victims

    def overdue(self, digest: str, now_s: float) -> Victim | None:
        """Return a placement to shed because the queue exceeds its targets, None when there is none.

        This happens when the first throughput is measured after a burst was admitted, or when workers
        disconnected.
        """
        pool = self._pools.get(digest)
        victim = None if pool is None else pool.order.first()
        rate = None if pool is None else self._rate(digest, pool)
        if pool is None or victim is None or rate is None or not self.policy.enabled:
            return None
        for priority in Priority:
            if not pool.backlog.waits(priority):
                continue
            limit_s = min(pool.backlog.target_of(priority), victim.item.spec.queue_ttl_s)
            found_s = pool.backlog.total(priority) / rate
            if found_s > limit_s * self.policy.overdue_ratio:
                stated_s = self.wait_s(digest, priority, now_s) or found_s
                return victim.item, self._error_of(victim, priority, min(MAX_WAIT_S, stated_s), limit_s)
        return None

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions that have state here."""
        return tuple(self._pools)

    def displaced(self, spec: PlaceSpec, now_s: float, *, own: bool = False) -> Victim | None:
        """Return the placement that leaves a full queue for this one, None when this one is shed first.

        ``own``: only placements of the same tenant.
        """
        pool = self._pools.get(spec.version_digest)
        order = None if pool is None else pool.of_tenant.get(spec.tenant_id) if own else pool.order
        if pool is None or order is None:
            return None
        arrival = self._arrival(spec, now_s)
        victim = order.victim_for(arrival.rank, retried=arrival.attempt > 0)
        if victim is None:
            return None
        found_s = self.wait_s(spec.version_digest, victim.item.priority, now_s)
        found_s = self.policy.min_retry_after_s if found_s is None else min(MAX_WAIT_S, found_s)
        return victim.item, self._error_of(victim, victim.item.priority, found_s, 0.0)

    def work(self, digest: str, now_s: float) -> PoolWork:
        """Return the work of a pool as of now. Read only."""
        pool = self._pools.get(digest)
        if pool is None:
            return PoolWork(self.policy.targets.of)
        saturated = now_s - pool.work.waits_since_s >= _SATURATED_S
        pool.work.measured_rate = pool.rate.tokens_per_s(1) if saturated else None
        return pool.work

    def wait_s(self, digest: str, priority: Priority, now_s: float) -> float | None:
        """Return the predicted wait behind all of the class and of higher ones, None before it is known."""
        pool = self._pools.get(digest)
        if pool is None:
            return None
        rate, above = self._rate(digest, pool), pool.arriving_above(priority, now_s)
        return wait_s(pool.backlog.total(priority), rate, arriving_tokens_per_s=above)

    def pressure(self, digest: str) -> PoolPressure:
        """Return the pressure on the pool; the wait is that of a standard request."""
        pool = self._pools.get(digest)
        if pool is None:
            return PoolPressure(digest, 0.0, 0.0)
        rate = self._rate(digest, pool)
        found_s = wait_s(pool.backlog.total(Priority.STANDARD), rate)
        ratio = pressure_ratio(pool.backlog, rate)
        return PoolPressure(digest, ratio, 0.0 if found_s is None else min(MAX_WAIT_S, found_s))

    def pressures(self) -> tuple[PoolPressure, ...]:
        """Return the pools with any pressure or wait, the highest pressure first."""
        found = [self.pressure(digest) for digest in self._pools]
        pressed = [one for one in found if one.pressure_ratio > 0.0 or one.predicted_wait_s > 0.0]
        pressed.sort(key=lambda one: (-one.pressure_ratio, one.digest))
        return tuple(pressed[:MAX_PRESSURES])

    def pressure_by_model(self) -> dict[str, float]:
        """Return the highest pressure among each model's versions."""
        found: dict[str, float] = {}
        for digest, pool in self._pools.items():
            if pool.model:
                ratio = self.pressure(digest).pressure_ratio
                found[pool.model] = max(ratio, found.get(pool.model, 0.0))
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError when a placement is in one index only."""
        assert sum(len(pool.order) for pool in self._pools.values()) == len(self._waits)
        for digest, pool in self._pools.items():
            mine = [one.item for one in self._waits.values() if one.item.spec.version_digest == digest]
            assert len(pool.order) == len(mine) == sum(map(len, pool.of_tenant.values()))
            tokens = sum(item.demand.reserved_tokens for item in mine)
            assert abs(pool.backlog.total(Priority.BATCH) - tokens) < 1e-3, "tokens leaked"

    # --- inside -----------------------------------------------------------------------------------

    def _arrival(self, spec: PlaceSpec, now_s: float) -> OfferedPlacement:
        committed = spec.committed_tokens_per_minute
        return OfferedPlacement(
            priority=spec.priority,
            over_quota=spec.over_quota or self._tenants.is_over(spec.tenant_id, committed, now_s),
            attempt=spec.attempt,
            begun=spec.begun,
            queue_ttl_s=spec.queue_ttl_s,
            deadline_left_s=spec.deadline_left_s,
            ttft_target_s=spec.ttft_target_s,
        )

    def _judge(self, spec: PlaceSpec, arrival: OfferedPlacement, tokens: int, now_s: float) -> Verdict:
        pool = self._pools.get(spec.version_digest)
        if pool is None or not len(pool.order):
            return Take()
        rate = self._rate(spec.version_digest, pool)
        if rate is None:
            return Take()
        ahead = pool.backlog.ahead_of(
            spec.priority, spec.tenant_id, tokens, pool.weights, weight=spec.tenant_weight
        )
        found_s = wait_s(ahead, rate, arriving_tokens_per_s=pool.arriving_above(spec.priority, now_s))
        return judge(arrival, found_s, self.policy, self._rng)

    def _error_of(self, victim: _Waits, full: Priority, found_s: float, limit_s: float) -> FairwayError:
        spec = victim.item.spec
        later_s = retry_after_s(found_s, limit_s, spec.attempt, self.policy, self._rng)
        return _shed_error(spec, victim.rank, full, found_s, limit_s, later_s)

    def _target_s(self, spec: PlaceSpec) -> float:
        return self.policy.targets.of(spec.priority, spec.ttft_target_s)

    def _rate(self, digest: str, pool: _Pool) -> float | None:
        return pool.rate.tokens_per_s(self._serving(digest))

    def _pool(self, digest: str) -> _Pool:
        pool = self._pools.get(digest)
        if pool is None:
            pool = self._pools[digest] = _Pool(PoolWork(self.policy.targets.of))
        return pool


def _shed_error(
    spec: PlaceSpec, rank: ShedRank, full: Priority, wait_s: float, limit_s: float, later_s: float
) -> FairwayError:
    """Return the refusal. ``full``: the class whose wait is too long; ``limit_s`` 0: whatever the wait."""
    limit = f", longer than {limit_s:.3g} s" if limit_s else ""
    what = (
        f"{spec.model} is overloaded: the {full.value} queue is full, "
        f"the predicted wait is {wait_s:.3g} s{limit}"
    )
    found = {
        "model": spec.model,
        "class": full.value,
        "wait_s": f"{wait_s:.6g}",
        "limit_s": f"{limit_s:.6g}",
    }
    if rank is ShedRank.OVER_QUOTA:
        return OverCommitment(
            f"{what}, and the tenant uses more than its committed rate; {retry_in(later_s)}",
            retry_after_s=later_s,
            **found,
        )
    return Overloaded(
        f"{what}, and {rank.name.lower()} requests are rejected first; {retry_in(later_s)}",
        retry_after_s=later_s,
        **found,
    )


def _unmeetable(spec: PlaceSpec, wait_s: float, limit_s: float, later_s: float) -> DeadlineUnmeetable:
    return DeadlineUnmeetable(
        f"{spec.model} would begin it in {wait_s:.3g} s, after its deadline in {limit_s:.3g} s; allow more "
        f"time, or {retry_in(later_s)}",
        retry_after_s=later_s,
        model=spec.model,
        wait_s=f"{wait_s:.3f}",
    )


def _failing(spec: PlaceSpec, later_s: float) -> VersionFailing:
    return VersionFailing(
        f"most requests for {spec.model} end with the loss of their worker; only a few are admitted, to test "
        f"whether this continues: {retry_in(later_s)}",
        retry_after_s=later_s,
        model=spec.model,
    )
