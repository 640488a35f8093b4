"""Redis's limits as a model: the same rules as the Lua scripts, by the injected clock."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Final

from services.adapters.quotas.local_shares import WHOLE, TenantCounts
from services.adapters.quotas.quota import (
    LAPSED_AT_ONCE,
    LAPSED_BATCH,
    SETTLED_KEEP_S,
    limited,
    most,
    rate_state,
    rejection,
    tightest,
    unclaimed,
    used_of,
)
from services.core.errors import OverQuota
from services.core.generation import Usage
from services.core.limits import BUDGETS, TOKEN_RATES, Claim, Limit, LimitKind, Price, Scope
from services.ports.clock import Clock
from services.ports.limiter import NO_PRICE, Later, Reservation, Spent

_KEPT_PERIODS: Final = 40
_DAY_S: Final = 86_400
_LAPSED_KEEP_S: Final = 7 * 86_400.0
_NOTHING: Final = Usage(0, 0)


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

    def remember(self, before: _Record | None) -> None:
        """Take over what an earlier admission of the id was charged."""
        if before is not None:
            self.charged, self.charged_micros = before.charged, before.charged_micros
            self.checkpoint = before.charged

    def charged_of(self, limit: Limit) -> int:
        """Return what was charged to the request of this kind of limit."""
        if limit.kind in TOKEN_RATES:
            return used_of(limit.kind, self.charged, self.price)
        return self.charged_micros

    def reserved(self, claim: Claim) -> int:
        """Return what the request reserves while it runs: what it claimed or used, less what was charged."""
        used = used_of(claim.limit.kind, self.checkpoint, self.price)
        return max(0, max(claim.amount, used) - self.charged_of(claim.limit))


@dataclass(slots=True)
class _Budget:
    """Micro-dollars by period, which is that of the admission: settled, and reserved by running requests."""

    settled: Counter[int] = field(default_factory=Counter)
    reserved: Counter[int] = field(default_factory=Counter)

    def wait_us(self, limit: Limit, amount: int, admitted_us: int, unix_s: float) -> int:
        """Return the time until ``amount`` more fits; 0 if it fits now."""
        period = period_of(limit.kind, admitted_us / 1e6)
        if self.settled[period] + self.reserved[period] + amount <= most(limit):
            return 0
        return max(1, round((period_end_s(limit.kind, admitted_us / 1e6) - unix_s) * 1e6))

    def count(self, limit: Limit, reserved: int, settled: int, admitted_us: int) -> None:
        """Count these amounts more, or fewer."""
        period = period_of(limit.kind, admitted_us / 1e6)
        self.reserved[period] = max(0, self.reserved[period] + reserved)
        self.settled[period] += settled
        for old in [old for old in self.settled if old < period - _KEPT_PERIODS]:
            del self.settled[old], self.reserved[old]


@dataclass(slots=True)
class _Tenant(TenantCounts):
    budgets: dict[tuple[LimitKind, Scope, str], _Budget] = field(default_factory=dict)
    records: dict[str, _Record] = field(default_factory=dict)
    # By the time for which records are kept: requests, and when they are dropped.
    ended: dict[int, OrderedDict[str, int]] = field(default_factory=dict)

    def budget(self, limit: Limit) -> _Budget:
        return self.budgets.setdefault(_named(limit), _Budget())

    def kept(self, request_id: str) -> None:
        """Keep a record until it ends again."""
        for ended in self.ended.values():
            ended.pop(request_id, None)

    def deadline_us(self, request_id: str) -> int:
        return self.slots.get(WHOLE, {}).get(request_id, 0)


class MemoryLimiter:
    """Model of ``RedisLimiter``."""

    def __init__(
        self,
        clock: Clock,
        *,
        lease_s: float = 60.0,
        settled_keep_s: float = SETTLED_KEEP_S,
    ) -> None:
        """``settled_keep_s``: for how long the charges of a settled request are remembered."""
        self._clock = clock
        self._lease_us = round(lease_s * 1e6)
        self._settled_keep_us = round(settled_keep_s * 1e6)
        self._tenants: defaultdict[str, _Tenant] = defaultdict(_Tenant)

    async def admit(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[Claim] = (),
        price: Price = NO_PRICE,
    ) -> Reservation:
        tenant, now_us = self._tenants[tenant_id], self._now_us()
        held = tenant.records.get(request_id)
        if held is not None and held.state is _State.RUNNING:
            if tenant.deadline_us(request_id) > now_us:
                known = {_named(limit) for limit in limits if limit.limit > 0}
                self._hold(tenant, request_id, [each for each in held.claims if _named(each.limit) in known])
                return Reservation(
                    tenant_id, request_id, claims=held.claims, price=held.price, admitted_us=held.admitted_us
                )
            self._lapse(tenant, request_id, held)
        due = limited(Claim(limit) for limit in limits)
        slots = tuple(claim for claim in due if claim.limit.kind is LimitKind.CONCURRENCY)
        admitted_us = round(self._clock.unix_s() * 1e6)
        record = _Record(_State.LAPSED, admitted_us)
        if (over := self._first_over(tenant, record, due)) is not None:
            raise rejection(*over, tenant.states(due, self._now_us()))
        rates = [
            rate_state(claim.limit, tenant.meter(claim.limit).count(claim.limit, claim.amount, now_us))
            for claim in due
            if claim.limit.kind is LimitKind.REQUESTS
        ]
        self._begin(tenant, request_id, record, slots, NO_PRICE)
        self._settle_lapsed(tenant, LAPSED_AT_ONCE)
        admitted = Reservation(
            tenant_id, request_id, claims=slots, admitted_us=admitted_us, request_rate=tightest(rates)
        )
        if claims:
            with suppress(OverQuota):
                return await self.reserve(admitted, claims, price)
        return admitted

    async def reserve(self, reservation: Reservation, claims: Sequence[Claim], price: Price) -> Reservation:
        claims = limited(unclaimed(reservation, claims))
        if not claims:
            return reservation
        tenant = self._tenants[reservation.tenant_id]
        wanted = replace(reservation, claims=reservation.claims + claims, price=price)
        while (over := self._try_reserve(tenant, wanted, len(reservation.claims))) is not None:
            # A lapsed reservation must not take the room of a request.
            if not self._settle_lapsed(tenant, LAPSED_BATCH):
                raise rejection(*over, tenant.states(wanted.claims, self._now_us()))
        return replace(
            wanted, token_rate=tightest(rate for _, rate in tenant.states(wanted.claims, self._now_us()))
        )

    async def take(self, tenant_id: str, claims: Sequence[Claim]) -> None:
        self._tenants[tenant_id].take(claims, self._now_us())

    async def renew(self, running: Sequence[tuple[Reservation, Usage]]) -> None:
        for reservation, usage in running:
            tenant, request_id = self._tenants[reservation.tenant_id], reservation.request_id
            record = tenant.records.get(request_id)
            if record is None or record.state is _State.LAPSED:
                # What it holds counts again, also above a limit: the request does run.
                lapsed, record = record, _Record(_State.LAPSED, reservation.admitted_us)
                record.remember(lapsed)
                self._begin(tenant, request_id, record, reservation.claims, reservation.price)
                self._change(tenant, record, checkpoint=usage)
            elif record.state is _State.RUNNING:
                self._hold(tenant, request_id, record.claims)
                self._change(tenant, record, checkpoint=usage)

    def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> Awaitable[None]:
        return Later(self.settle_now, reservation, usage)

    async def settle_now(self, reservation: Reservation, usage: Usage) -> None:
        self.settle_for(self._settled_keep_us / 1e6, reservation, usage)

    def settle_for(self, keep_s: float, reservation: Reservation, usage: Usage) -> None:
        """The same, with a time for which the charges are remembered."""
        tenant, request_id = self._tenants[reservation.tenant_id], reservation.request_id
        record = tenant.records.get(request_id)
        if record is None or record.state is not _State.RUNNING:
            ended, record = record, _Record(_State.LAPSED, reservation.admitted_us)
            record.remember(ended)
            record.claims, record.price = reservation.claims, reservation.price
        elif 0 < reservation.admitted_us < record.admitted_us:  # of an earlier admission; a later one runs
            self._change(tenant, record, charge=usage)
            return
        self._end(tenant, request_id, record, usage, _State.SETTLED, keep_s)
        self._forget(tenant)

    async def checkpoint(self, tenant_id: str, request_id: str, usage: Usage) -> None:
        tenant = self._tenants[tenant_id]
        record = tenant.records.get(request_id)
        if record is not None and record.state is _State.RUNNING:
            self._change(tenant, record, checkpoint=usage)
        elif record is not None and record.state is _State.LAPSED:
            self._change(tenant, record, charge=usage)

    def _try_reserve(self, tenant: _Tenant, wanted: Reservation, held: int) -> tuple[Claim, float] | None:
        """Reserve the claims after the first ``held``, or return the first that is over and its wait."""
        record = tenant.records.get(wanted.request_id)
        if record is None or record.state is not _State.RUNNING:
            ended, record, held = record, _Record(_State.LAPSED, wanted.admitted_us), 0
            record.remember(ended)
        elif len(record.claims) == len(wanted.claims):
            return None  # the answer of an earlier call was lost
        over = self._first_over(tenant, replace(record, price=wanted.price), wanted.claims[held:])
        if over is None:
            self._begin(tenant, wanted.request_id, record, wanted.claims, wanted.price)
        return over

    async def settle_lapsed(self, tenant_id: str) -> int:
        return self._settle_lapsed(self._tenants[tenant_id], LAPSED_BATCH)

    async def spent(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[Spent, ...]:
        tenant, now_s = self._tenants[tenant_id], self._clock.unix_s()
        found = []
        for limit in limits:
            budget = tenant.budget(limit)
            period = period_of(limit.kind, now_s)
            found.append(Spent(limit, budget.settled[period], budget.reserved[period]))
        return tuple(found)

    async def concurrency(self, tenant_id: str) -> int:
        return self.held(tenant_id)

    def held(self, tenant_id: str) -> int:
        """Return the value of ``concurrency`` without awaiting."""
        tenant = self._tenants.get(tenant_id)
        return 0 if tenant is None else tenant.live(WHOLE, self._now_us())

    # --- the life of a record ----------------------------------------------------------------------

    def _begin(
        self, tenant: _Tenant, request_id: str, record: _Record, claims: tuple[Claim, ...], price: Price
    ) -> None:
        """Run the record with these claims. What earlier admissions were charged stays charged."""
        if record.state is not _State.RUNNING:
            record.remember(tenant.records.get(request_id))
        tenant.records[request_id] = record
        tenant.kept(request_id)
        self._hold(tenant, request_id, claims)
        self._change(tenant, record, _State.RUNNING, claims=claims, price=price)

    def _end(
        self,
        tenant: _Tenant,
        request_id: str,
        record: _Record,
        usage: Usage,
        state: _State,
        keep_s: float,
    ) -> None:
        tenant.release(request_id)
        tenant.records[request_id] = record
        self._change(tenant, record, state, charge=usage)
        tenant.kept(request_id)
        keep_us = round(keep_s * 1e6)
        tenant.ended.setdefault(keep_us, OrderedDict())[request_id] = self._now_us() + keep_us

    def _change(
        self,
        tenant: _Tenant,
        record: _Record,
        state: _State | None = None,
        *,
        claims: tuple[Claim, ...] | None = None,
        price: Price | None = None,
        checkpoint: Usage = _NOTHING,
        charge: Usage = _NOTHING,
    ) -> None:
        """Change a record, and the meters with it: the only place that does either.

        So a meter is the sum of what records reserved and were charged, whatever the order of the calls.
        """
        record.price = record.price if price is None else price
        counted = record.claims if record.state is _State.RUNNING else ()
        before = {claim: record.reserved(claim) for claim in counted}
        record.claims = record.claims if claims is None else claims
        paid = {claim: record.charged_of(claim.limit) for claim in record.claims}
        record.state = record.state if state is None else state
        record.checkpoint = largest(record.checkpoint, checkpoint)
        record.charged = largest(record.charged, charge)
        record.charged_micros = max(record.charged_micros, record.price.cost_micros(record.charged))
        for claim in record.claims:
            after = record.reserved(claim) if record.state is _State.RUNNING else 0
            more, due = after - before.get(claim, 0), record.charged_of(claim.limit) - paid[claim]
            if claim.limit.kind in BUDGETS and (more or due):
                tenant.budget(claim.limit).count(claim.limit, more, due, record.admitted_us)
            elif claim.limit.kind in TOKEN_RATES and (more or due):
                tenant.meter(claim.limit).count(claim.limit, more + due, self._now_us())

    def _lapse(self, tenant: _Tenant, request_id: str, record: _Record) -> None:
        self._end(tenant, request_id, record, record.checkpoint, _State.LAPSED, _LAPSED_KEEP_S)

    def _settle_lapsed(self, tenant: _Tenant, at_most: int) -> int:
        now_us, settled = self._now_us(), 0
        while settled < at_most and (request_id := tenant.next_lapsed(now_us)):
            self._lapse(tenant, request_id, tenant.records[request_id])
            settled += 1
        self._forget(tenant)
        return settled

    def _forget(self, tenant: _Tenant) -> None:
        now_us = self._now_us()
        for ended in tenant.ended.values():
            while ended and next(iter(ended.values())) <= now_us:
                request_id, _ = ended.popitem(last=False)
                del tenant.records[request_id]

    # --- what limits count -------------------------------------------------------------------------

    def _first_over(
        self, tenant: _Tenant, record: _Record, claims: Sequence[Claim]
    ) -> tuple[Claim, float] | None:
        """Return the first claim without room, and the time in seconds until it has; None if all have."""
        now_us = self._now_us()
        for claim in claims:
            limit = claim.limit
            if limit.kind in BUDGETS:
                wait_us = tenant.budget(limit).wait_us(
                    limit, record.reserved(claim), record.admitted_us, self._clock.unix_s()
                )
            else:
                amount = record.reserved(claim) if limit.kind in TOKEN_RATES else claim.amount
                wait_us = tenant.wait_us(Claim(limit, amount), now_us)
            if wait_us > 0:
                return claim, wait_us / 1e6
        return None

    def _hold(self, tenant: _Tenant, request_id: str, claims: Sequence[Claim]) -> None:
        tenant.hold(request_id, claims, self._now_us() + self._lease_us)

    def _now_us(self) -> int:
        return round(self._clock.monotonic_s() * 1e6)


def _named(limit: Limit) -> tuple[LimitKind, Scope, str]:
    """Return what identifies a limit while its number changes."""
    return limit.kind, limit.scope, limit.name


def largest(left: Usage, right: Usage) -> Usage:
    """Return the element-wise maximum."""
    return Usage(
        max(left.prompt_tokens, right.prompt_tokens),
        max(left.output_tokens, right.output_tokens),
        max(left.cached_tokens, right.cached_tokens),
    )


def period_of(kind: LimitKind, unix_s: float) -> int:
    """Return the number of the budget's day or month (UTC)."""
    if kind is LimitKind.DAY_MICROS:
        return int(unix_s // _DAY_S)
    day = datetime.fromtimestamp(unix_s, UTC)
    return day.year * 12 + day.month - 1


def period_end_s(kind: LimitKind, unix_s: float) -> float:
    """Return the Unix time at which the budget's day or month ends."""
    period = period_of(kind, unix_s) + 1
    if kind is LimitKind.DAY_MICROS:
        return float(period * _DAY_S)
    return datetime(period // 12, period % 12 + 1, 1, tzinfo=UTC).timestamp()
