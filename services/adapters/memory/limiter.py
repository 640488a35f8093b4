"""Quotas in this process: the same rules as the Redis scripts, by the injected clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from services.adapters.memory.meters import Budget, RequestBucket, Times, TokenBucket, new_meter
from services.adapters.quotas.quota import (
    LAPSED_AT_ONCE,
    LAPSED_BATCH,
    SETTLED_KEEP_S,
    largest,
    limited,
    most,
    period_of,
    rate_state,
    rejection,
    tightest,
    unclaimed,
    used_of,
)
from services.core.generation import Usage
from services.core.limits import TOKEN_RATES, Claim, Limit, LimitKind, Price, Scope
from services.ports.clock import Clock
from services.ports.limiter import NO_PRICE, Reservation, Spent

_MAX_METERS: Final = 10_000  # of one tenant
_NOTHING: Final = Usage(0, 0)
_WHOLE: Final = (Scope.TENANT, "")  # the slots of all requests of a tenant


class _State(Enum):
    RUNNING = auto()
    LAPSED = auto()  # settled with its checkpoint, because it was not renewed
    SETTLED = auto()


@dataclass(slots=True)
class _Record:
    """One request id. ``claims`` are counted while it is RUNNING. ``charged`` outlives its admissions."""

    state: _State
    admitted_us: int
    claims: tuple[Claim, ...] = ()
    price: Price = NO_PRICE
    checkpoint: Usage = _NOTHING
    charged: Usage = _NOTHING
    charged_micros: int = 0

    @property
    def counted(self) -> tuple[Claim, ...]:
        """The claims of tokens and budgets."""
        return tuple(claim for claim in self.claims if claim.limit.kind is not LimitKind.CONCURRENCY)

    def charged_of(self, limit: Limit) -> int:
        """Return what was charged to the request of this kind of limit."""
        if limit.kind in TOKEN_RATES:
            return used_of(limit.kind, self.charged, self.price)
        return self.charged_micros

    def reserved(self, claim: Claim) -> int:
        """Return what the running request has reserved: what it claimed or used, less what was charged."""
        used = used_of(claim.limit.kind, self.checkpoint, self.price)
        return max(0, max(claim.amount, used) - self.charged_of(claim.limit))


@dataclass(slots=True)
class _Tenant:
    """``slots`` map requests to their deadlines, by scope, in the order of deadlines."""

    work: RequestBucket = field(default_factory=RequestBucket)
    meters: OrderedDict[tuple[LimitKind, Scope, str], RequestBucket | TokenBucket | Budget] = field(
        default_factory=OrderedDict
    )
    slots: dict[tuple[Scope, str], dict[str, int]] = field(default_factory=dict)
    records: dict[str, _Record] = field(default_factory=dict)
    ended: OrderedDict[str, int] = field(default_factory=OrderedDict)  # until when a record is kept

    def meter(self, limit: Limit) -> RequestBucket | TokenBucket | Budget:
        key = (limit.kind, limit.scope, limit.name)
        if key not in self.meters:
            self.meters[key] = new_meter(limit.kind)
            if len(self.meters) > _MAX_METERS:
                self.meters.popitem(last=False)
        self.meters.move_to_end(key)
        return self.meters[key]

    def deadline_us(self, request_id: str) -> int:
        return self.slots.get(_WHOLE, {}).get(request_id, 0)


class MemoryLimiter:
    """``Limiter`` in one event loop. Beyond ``max_tenants`` the tenant idle for longest is dropped."""

    def __init__(
        self,
        clock: Clock,
        *,
        lease_s: float = 60.0,
        local: bool = False,
        max_tenants: int = 100_000,
        settled_keep_s: float = SETTLED_KEEP_S,
    ) -> None:
        """``local`` marks the reservations as made without the shared store. ``settled_keep_s``: for how long
        the charges of a settled request are remembered."""
        self._clock = clock
        self._lease_us = round(lease_s * 1e6)
        self._local = local
        self._max_tenants = max_tenants
        self._settled_keep_us = round(settled_keep_s * 1e6)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    async def admit(self, tenant_id: str, request_id: str, limits: Sequence[Limit]) -> Reservation:
        tenant, now_us = self._tenant(tenant_id), self._now_us()
        record = tenant.records.get(request_id)
        if record is not None and record.state is _State.RUNNING:
            if tenant.deadline_us(request_id) > now_us:
                self._hold(tenant, request_id, record.claims)
                return Reservation(
                    tenant_id, request_id, self._local, record.claims, record.price, record.admitted_us
                )
            self._end(tenant, request_id, record, record.checkpoint, _State.LAPSED)
        self._settle_lapsed(tenant, LAPSED_AT_ONCE)
        claims = limited(Claim(limit) for limit in limits)
        admitted_us = 0 if self._local else round(self._clock.unix_s() * 1e6)
        times = self._times(admitted_us)
        for claim in claims:
            if (wait_us := self._wait_us(tenant, claim, times)) > 0:
                raise rejection(claim, wait_us / 1e6)
        rates = [
            rate_state(claim.limit, tenant.meter(claim.limit).count(claim.limit, claim.amount, 0, times))
            for claim in claims
            if claim.limit.kind is LimitKind.REQUESTS
        ]
        slots = tuple(claim for claim in claims if claim.limit.kind is LimitKind.CONCURRENCY)
        self._begin(tenant, request_id, _Record(_State.RUNNING, admitted_us, slots))
        return Reservation(
            tenant_id, request_id, self._local, slots, admitted_us=admitted_us, request_rate=tightest(rates)
        )

    async def reserve(self, reservation: Reservation, claims: Sequence[Claim], price: Price) -> Reservation:
        claims = limited(unclaimed(reservation, claims))
        if not claims:
            return reservation
        tenant, request_id = self._tenant(reservation.tenant_id), reservation.request_id
        record = tenant.records.get(request_id)
        if record is None or record.state is not _State.RUNNING:
            record = _Record(_State.RUNNING, reservation.admitted_us, reservation.claims)
            self._begin(tenant, request_id, record)
        reserved = replace(reservation, claims=reservation.claims + claims, price=price)
        if record.claims == reserved.claims:  # the answer of an earlier call was lost
            return reserved
        record.price = price
        times = self._times(record.admitted_us)
        self._require_room(tenant, record, claims, times)
        record.claims = reserved.claims
        rates = []
        for claim in claims:
            used = tenant.meter(claim.limit).count(claim.limit, record.reserved(claim), 0, times)
            if claim.limit.kind in TOKEN_RATES:
                rates.append(rate_state(claim.limit, used))
        return replace(reserved, token_rate=tightest(rates))

    async def spend(self, tenant_id: str, per_minute: int) -> None:
        limit = Limit(LimitKind.REQUESTS, per_minute)
        if per_minute > 0:
            tenant, times = self._tenant(tenant_id), self._times(0)
            if (wait_us := tenant.work.wait_us(limit, 1, times)) > 0:
                raise rejection(Claim(limit), wait_us / 1e6)
            tenant.work.count(limit, 1, 0, times)

    async def take(self, tenant_id: str, claims: Sequence[Claim]) -> None:
        tenant, times = self._tenant(tenant_id), self._times(0)
        for claim in claims:
            if (wait_us := tenant.meter(claim.limit).wait_us(claim.limit, claim.amount, times)) > 0:
                raise rejection(claim, wait_us / 1e6)
        for claim in claims:
            tenant.meter(claim.limit).count(claim.limit, 0, claim.amount, times)

    async def renew(self, running: Sequence[tuple[Reservation, Usage]]) -> None:
        for reservation, usage in running:
            tenant, request_id = self._tenant(reservation.tenant_id), reservation.request_id
            record = tenant.records.get(request_id)
            if record is None or record.state is _State.LAPSED:
                # What it holds counts again, also above a limit: the request does run.
                record = _record(_State.RUNNING, reservation)
                self._begin(tenant, request_id, record)
                self._raise(tenant, record, usage, dict.fromkeys(record.claims, 0))
            elif record.state is _State.RUNNING:
                self._hold(tenant, request_id, record.claims)
                self._raise(tenant, record, usage)

    async def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> None:
        tenant, request_id = self._tenant(reservation.tenant_id), reservation.request_id
        record = tenant.records.setdefault(request_id, _record(_State.LAPSED, reservation))
        if record.state is _State.RUNNING and 0 < reservation.admitted_us < record.admitted_us:
            self._charge(tenant, record, usage, {})  # of an earlier admission, while a later one runs
            return
        self._end(tenant, request_id, record, usage, _State.SETTLED)
        self._forget(tenant)

    async def checkpoint(self, tenant_id: str, request_id: str, usage: Usage) -> None:
        tenant = self._tenant(tenant_id)
        record = tenant.records.get(request_id)
        if record is None or record.state is _State.SETTLED:
            return
        if record.state is _State.LAPSED:
            self._charge(tenant, record, usage, {})
        else:
            self._raise(tenant, record, usage)

    async def settle_lapsed(self, tenant_id: str) -> int:
        return self._settle_lapsed(self._tenant(tenant_id), LAPSED_BATCH)

    async def spent(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[Spent, ...]:
        tenant, now_s = self._tenant(tenant_id), self._clock.unix_s()
        found = []
        for limit in limits:
            budget = tenant.meter(limit)
            assert isinstance(budget, Budget), "only budgets are spent"
            period = period_of(limit.kind, now_s)
            found.append(Spent(limit, budget.settled[period], budget.reserved[period]))
        return tuple(found)

    async def concurrency(self, tenant_id: str) -> int:
        return self.held(tenant_id)

    def held(self, tenant_id: str) -> int:
        """Return the value of ``concurrency`` without awaiting."""
        tenant = self._tenants.get(tenant_id)
        return 0 if tenant is None else self._live(tenant, _WHOLE, self._now_us())

    # --- the life of a record ----------------------------------------------------------------------

    def _begin(self, tenant: _Tenant, request_id: str, record: _Record) -> None:
        """Start an admission. What earlier admissions of the id were charged stays charged."""
        before = tenant.records.get(request_id)
        if before is not None:
            record.charged, record.charged_micros = before.charged, before.charged_micros
            record.checkpoint = before.charged
        tenant.records[request_id] = record
        tenant.ended.pop(request_id, None)
        self._hold(tenant, request_id, record.claims)

    def _end(self, tenant: _Tenant, request_id: str, record: _Record, usage: Usage, state: _State) -> None:
        """Settle a record, once."""
        for scope in list(tenant.slots):
            tenant.slots[scope].pop(request_id, None)
            if not tenant.slots[scope]:
                del tenant.slots[scope]
        released = {}
        if record.state is _State.RUNNING:
            released = {claim: record.reserved(claim) for claim in record.counted}
        record.state = state
        self._charge(tenant, record, usage, released)
        tenant.ended.pop(request_id, None)
        tenant.ended[request_id] = self._now_us() + self._settled_keep_us

    def _charge(self, tenant: _Tenant, record: _Record, usage: Usage, released: dict[Claim, int]) -> None:
        """Charge what exceeds the earlier charges, in place of what was reserved."""
        usage = largest(usage, record.charged)
        times = self._times(record.admitted_us)
        for claim in record.counted:
            due = max(0, used_of(claim.limit.kind, usage, record.price) - record.charged_of(claim.limit))
            _count(tenant, claim, -released.get(claim, 0), due, times)
        record.charged = usage
        record.charged_micros = max(record.charged_micros, record.price.cost_micros(usage))

    def _raise(
        self, tenant: _Tenant, record: _Record, usage: Usage, before: dict[Claim, int] | None = None
    ) -> None:
        """Raise the checkpoint, and what the request has reserved where it used more than ``before``."""
        if before is None:
            before = {claim: record.reserved(claim) for claim in record.counted}
        record.checkpoint = largest(record.checkpoint, usage)
        times = self._times(record.admitted_us)
        for claim in record.counted:
            _count(tenant, claim, record.reserved(claim) - before[claim], 0, times)

    def _settle_lapsed(self, tenant: _Tenant, at_most: int) -> int:
        now_us, settled = self._now_us(), 0
        slots = tenant.slots.get(_WHOLE, {})
        while slots and settled < at_most and slots[request_id := next(iter(slots))] <= now_us:
            record = tenant.records[request_id]
            self._end(tenant, request_id, record, record.checkpoint, _State.LAPSED)
            settled += 1
        self._forget(tenant)
        return settled

    def _forget(self, tenant: _Tenant) -> None:
        now_us = self._now_us()
        while tenant.ended and next(iter(tenant.ended.values())) <= now_us:
            request_id, _ = tenant.ended.popitem(last=False)
            del tenant.records[request_id]

    # --- what limits count -------------------------------------------------------------------------

    def _require_room(self, tenant: _Tenant, record: _Record, claims: Sequence[Claim], times: Times) -> None:
        """Raises when a limit has no room, although no lapsed reservation holds any."""
        while True:
            for claim in claims:
                wait_us = tenant.meter(claim.limit).wait_us(claim.limit, record.reserved(claim), times)
                if wait_us > 0:
                    break
            else:
                return
            if not self._settle_lapsed(tenant, LAPSED_BATCH):
                raise rejection(claim, wait_us / 1e6)

    def _wait_us(self, tenant: _Tenant, claim: Claim, times: Times) -> int:
        limit = claim.limit
        if limit.kind is not LimitKind.CONCURRENCY:
            return tenant.meter(limit).wait_us(limit, claim.amount, times)
        scope = (limit.scope, limit.name)
        if self._live(tenant, scope, times.now_us) < most(limit):
            return 0
        return next(at for at in tenant.slots[scope].values() if at > times.now_us) - times.now_us

    def _live(self, tenant: _Tenant, scope: tuple[Scope, str], now_us: int) -> int:
        slots = tenant.slots.get(scope, {})
        lapsed = 0
        for deadline_us in slots.values():
            if deadline_us > now_us:
                break
            lapsed += 1
        return len(slots) - lapsed

    def _hold(self, tenant: _Tenant, request_id: str, claims: Sequence[Claim]) -> None:
        """Add the slots or extend their deadlines. Leases are equal, so they stay in order of deadlines."""
        held = [
            (claim.limit.scope, claim.limit.name)
            for claim in claims
            if claim.limit.kind is LimitKind.CONCURRENCY and claim.limit.scope is not Scope.TENANT
        ]
        for scope in (_WHOLE, *held):
            slots = tenant.slots.setdefault(scope, {})
            slots.pop(request_id, None)
            slots[request_id] = self._now_us() + self._lease_us

    def _tenant(self, tenant_id: str) -> _Tenant:
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        self._tenants.move_to_end(tenant_id)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)
        return tenant

    def _times(self, admitted_us: int) -> Times:
        return Times(self._now_us(), self._clock.unix_s(), admitted_us / 1e6)

    def _now_us(self) -> int:
        return round(self._clock.monotonic_s() * 1e6)


def _record(state: _State, reservation: Reservation) -> _Record:
    return _Record(state, reservation.admitted_us, reservation.claims, reservation.price)


def _count(tenant: _Tenant, claim: Claim, reserved: int, settled: int, times: Times) -> None:
    if reserved or settled:
        tenant.meter(claim.limit).count(claim.limit, reserved, settled, times)
