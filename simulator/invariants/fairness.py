"""Tenants that both wait all the time get equal service, up to the bound that the policy derives.

Two counts, each by tenant and class, in weighted tokens over weight, and each made without the scheduler's
counters: what was granted, at each grant, a sequence counted with what it turns out to cost; and what
workers computed, as they charge it, cached prompt tokens as cached. Two tenants of a class are compared from
when both wait until one of them has nothing waiting; a failover begins all anew.

The bounds follow from what was observed: the largest sequence, the most that one tenant had in flight,
and the largest sum of errors of its advances, each over its weight.

The bounds are what the scheduler's counters promise (docs/architecture/fairness.md); no decision uses them.

    | W_a / w_a  -  W_b / w_b |   <=   2 * (D + (L + 3 * (E + U) + F) / w + F / w)   +   n * U / w

``W`` is the weighted service of tenants ``a`` and ``b`` in the interval, ``w_a`` and ``w_b`` their weights,
``w`` the smaller one. ``D`` is ``window_tokens``, ``L`` ``sequence_tokens``, ``F`` ``in_flight_tokens``,
``E`` ``estimate_tokens``, ``U`` ``unreported_tokens``, ``n`` ``failovers``. Derivation, with ``V`` the
counter and ``Y`` the counter with exact charges:

1. Counters differ from the truth by unreported tokens and wrong advances: ``|V - Y| <= e = (E + U) / w``.
2. A grant goes to a tenant near the minimum ``m(s)`` of the waiting counters: ``V_a(s) <= m(s) + D``. So
   until its next grant ``Y_a <= m(s) + D + L / w + e``.
3. No waiting tenant is far below: it had ``V >= m(s)`` at ``s``, or was lifted later at least to the floor,
   which is at least ``m(s) - F / w``. So ``Y >= m(s) - F / w - e``.
4. Therefore ``|Y_a - Y_b| <= D + (L + F) / w + 3 * e``; the third ``e`` covers lifted tenants. This is
   ``granted_bound``, for ``E + U > 0``.
5. Service equals ``Y`` less what sequences in flight still lack, 0 to ``F / w``. An interval has two ends:
   twice the sum.
6. A failover loses at most ``U / w``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.core.fleet import SequenceUsage
from services.core.generation import PlaceSpec, StartSpec
from services.core.records import Priority
from services.scheduler.policy.queue.fairness import ServiceWeights
from services.scheduler.term import Term
from simulator.fleet.assembly import SimFleet
from simulator.fleet.clients.client import said_tokens
from simulator.fleet.grant_watch import ComputedTokens, GrantListener
from simulator.fleet.invariant import Invariant


def granted_bound(
    *,
    sequence_tokens: float,
    estimate_tokens: float,
    window_tokens: float,
    weight: float,
    in_flight_tokens: float = 0.0,
) -> float:
    """Return the most that is granted to one tenant beyond what is granted to another that waits as well,
    over their weights, sequences counted with what they turn out to cost.

    All in weighted tokens: ``sequence_tokens`` of the largest sequence, ``estimate_tokens`` by which the
    advances of what is in flight, together, may differ from that, ``in_flight_tokens`` all that is granted
    and not finished, which counts only where estimates may be wrong. ``window_tokens``: how far ahead a
    tenant may be that goes past one without room, over weight as the counters are. ``weight``: the smaller.
    """
    below = in_flight_tokens if estimate_tokens > 0.0 else 0.0
    return window_tokens + (sequence_tokens + 3.0 * estimate_tokens + below) / weight


def service_bound(
    *,
    sequence_tokens: float,
    in_flight_tokens: float,
    window_tokens: float,
    weight: float,
    estimate_tokens: float | None = None,
    unreported_tokens: float = 0.0,
    failovers: int = 0,
) -> float:
    """Return the most by which the service of two tenants differs, over their weights, in any interval in
    which both always had something waiting, in the same class, that may use the same workers.

    The other parameters are those of ``granted_bound``. ``in_flight_tokens`` is the cost of everything
    granted and not finished at one time (slots times the largest sequence at most), ``unreported_tokens``
    what workers produce for one tenant between two reports. Estimates are off by all of what is in flight at
    most, which is the default. Each of ``failovers`` of the leader in the interval loses one report's worth
    of a counter.
    """
    wrong = in_flight_tokens if estimate_tokens is None else estimate_tokens
    apart = granted_bound(
        sequence_tokens=sequence_tokens,
        estimate_tokens=wrong + unreported_tokens,
        window_tokens=window_tokens,
        weight=weight,
        in_flight_tokens=in_flight_tokens,
    )
    return 2.0 * (apart + in_flight_tokens / weight) + failovers * unreported_tokens / weight


FAIRNESS: Final = "fairness"
_WEIGHTS: Final = ServiceWeights()
_ROUNDING: Final = 1e-6
_Request = tuple[str, int]


@dataclass(slots=True)
class _Tenant:
    """One tenant in one class: how much of it waits; in weighted tokens over its weight, its service, what it
    has in flight, and by how much the advances of that are wrong."""

    weight: float
    waiting: int = 0
    granted: float = 0.0
    produced: float = 0.0
    in_flight: float = 0.0
    wrong: float = 0.0


@dataclass(slots=True)
class _Flight:
    """A sequence that was granted and has not ended. ``cost`` is what it turns out to, as far as is known;
    ``wrong`` by how much the advance for it differs from that. ``produced`` tokens it had before."""

    tenant: _Tenant
    prompt_tokens: int
    advance: float
    cost: float
    wrong: float = 0.0
    produced: int = 0

    def costs(self, tokens: float) -> None:
        """From now on it is known to cost so much."""
        tenant, wrong = self.tenant, abs(self.advance - tokens)
        tenant.granted += (tokens - self.cost) / tenant.weight
        tenant.in_flight += (tokens - self.cost) / tenant.weight
        tenant.wrong += (wrong - self.wrong) / tenant.weight
        self.cost, self.wrong = tokens, wrong

    def land(self) -> None:
        """It is no longer in flight; what it cost stays granted."""
        self.tenant.in_flight -= self.cost / self.tenant.weight
        self.tenant.wrong -= self.wrong / self.tenant.weight


@dataclass(slots=True)
class _Range:
    """The extremes of the difference of two tenants since both wait."""

    low: float
    high: float

    def widen(self, value: float) -> float:
        self.low, self.high = min(self.low, value), max(self.high, value)
        return self.high - self.low


@dataclass(slots=True)
class _Seen:
    """The most that was seen so far of any tenant, in weighted tokens over its weight."""

    sequence: float = 0.0
    in_flight: float = 0.0
    wrong: float = 0.0


@dataclass(slots=True)
class _Pair:
    granted: _Range
    produced: _Range


@dataclass(slots=True)
class _Class:
    tenants: dict[str, _Tenant]
    pairs: dict[tuple[str, str], _Pair] = field(default_factory=dict)


class FairnessInvariant(GrantListener, Invariant):
    """``compared`` counts comparisons; ``widest`` is the largest difference seen, over its bound."""

    def __init__(self, *, predictable: bool = False) -> None:
        """``predictable``: the scheduler's predictions never change and no prompt begins like another, so
        that by how much an advance is wrong is known. Else, and after a failover, it may be all of it."""
        self._predictable = predictable
        self._classes: dict[Priority, _Class] = {}
        self._flights: dict[_Request, _Flight] = {}
        self._seen = _Seen()
        self._terms = 0
        self.widest = 0.0
        self.compared = 0

    def watch(self, fleet: SimFleet) -> None:
        self._fleet = fleet
        tenants = fleet.spec.tenants
        self._classes = {
            priority: _Class({tenant.name: _Tenant(tenant.weight) for tenant in tenants})
            for priority in Priority
        }
        self._window = fleet.spec.term.order.window_tokens(fleet.spec.workers)
        fleet.grants.listeners.append(self)

    # --- the scheduler ----------------------------------------------------------------------------

    def term_began(self, term: Term) -> None:
        self._terms += 1
        for found in self._classes.values():
            found.pairs.clear()
            for tenant in found.tenants.values():
                tenant.waiting = 0

    def entered(self, spec: PlaceSpec) -> None:
        self._classes[spec.priority].tenants[spec.tenant_id].waiting += 1

    def left(self, spec: PlaceSpec) -> None:
        found, name = self._classes[spec.priority], spec.tenant_id
        tenant = found.tenants[name]
        tenant.waiting -= 1
        if tenant.waiting <= 0:
            for pair in [pair for pair in found.pairs if name in pair]:
                del found.pairs[pair]

    def granted(self, term: Term, spec: PlaceSpec, worker_id: str) -> None:
        """Count it with what the client allows, until its start reports its cost."""
        request = spec.request_id, spec.choice
        tenant = self._classes[spec.priority].tenants[spec.tenant_id]
        if request in self._flights:  # The earlier flight came to nothing, or was broken off.
            earlier = self._flights.pop(request)
            earlier.costs(0.0)
            earlier.land()
        predicted = term.queue.ledger.outputs.predict(spec.tenant_id, spec.version_digest)
        advance = _WEIGHTS.cost(spec.prompt_tokens, max(1, min(spec.max_output_tokens, predicted)))
        flight = self._flights[request] = _Flight(tenant, spec.prompt_tokens, advance, 0.0)
        self._set_cost(flight, _WEIGHTS.cost(spec.prompt_tokens, spec.max_output_tokens))
        self._compare(spec.priority, spec.tenant_id)

    # --- workers ----------------------------------------------------------------------------------

    def started(self, worker_id: str, spec: StartSpec) -> None:
        generation = spec.generation
        request = generation.request_id, spec.choice
        flight = self._flights.get(request)
        if flight is None:  # its gateway placed it: nothing was charged ahead
            tenant = self._classes[generation.priority].tenants[spec.tenant_id]
            flight = self._flights[request] = _Flight(tenant, spec.prefill_tokens, 0.0, 0.0)
        flight.produced = len(spec.produced_ids)
        most = min(said_tokens(generation.sampling.seed), generation.limits.max_tokens)
        self._set_cost(flight, _WEIGHTS.cost(spec.prefill_tokens, most - flight.produced))

    def produced(self, worker_id: str, tenant: str, priority: Priority, work: ComputedTokens) -> None:
        found = self._classes[priority].tenants[tenant]
        cost = _WEIGHTS.cost(work.prompt, work.output, cached_tokens=work.cached)
        found.produced += cost / found.weight
        self._compare(priority, tenant)

    def ended(self, worker_id: str, usage: SequenceUsage) -> None:
        request = usage.request_id, usage.choice
        if request in self._flights:
            flight = self._flights.pop(request)
            output = max(0, usage.output_tokens - flight.produced)
            prompt = flight.prompt_tokens if output else 0
            flight.costs(_WEIGHTS.cost(prompt, output, cached_tokens=usage.cached_tokens))
            flight.land()

    # --- inside -----------------------------------------------------------------------------------

    def _set_cost(self, flight: _Flight, tokens: float) -> None:
        flight.costs(tokens)
        seen, tenant = self._seen, flight.tenant
        seen.sequence = max(seen.sequence, tokens / tenant.weight)
        seen.in_flight = max(seen.in_flight, tenant.in_flight)
        seen.wrong = max(seen.wrong, tenant.wrong)

    def bounds(self) -> tuple[float, float]:
        """Return the largest difference of two tenants in any interval: in what is granted, and in
        what is computed."""
        seen = self._seen
        known = self._predictable and self._terms <= 1
        wrong = seen.wrong if known else seen.in_flight
        wrong = wrong if wrong > _ROUNDING else 0.0
        granted = granted_bound(
            sequence_tokens=seen.sequence,
            estimate_tokens=wrong,
            window_tokens=self._window,
            weight=1.0,
            in_flight_tokens=seen.in_flight,
        )
        produced = service_bound(
            sequence_tokens=seen.sequence,
            estimate_tokens=wrong,
            in_flight_tokens=seen.in_flight,
            window_tokens=self._window,
            weight=1.0,
            unreported_tokens=seen.in_flight,
        )
        return 2.0 * granted, produced  # an interval has two ends

    def _compare(self, priority: Priority, name: str) -> None:
        """Compare a tenant, whose service just grew, with all that wait as well."""
        found = self._classes[priority]
        one = found.tenants[name]
        if one.waiting <= 0:
            return
        most_granted, most_produced = self.bounds()
        for other_name, other in found.tenants.items():
            if other is one or other.waiting <= 0:
                continue
            granted, produced = one.granted - other.granted, one.produced - other.produced
            key = (name, other_name)
            if name > other_name:
                key, granted, produced = (other_name, name), -granted, -produced
            pair = found.pairs.get(key)
            if pair is None:
                found.pairs[key] = _Pair(_Range(granted, granted), _Range(produced, produced))
                continue
            self.compared += 1
            self._judge(key, "granted", pair.granted.widen(granted), most_granted)
            self._judge(key, "computed", pair.produced.widen(produced), most_produced)

    def _judge(self, pair: tuple[str, str], what: str, apart: float, most: float) -> None:
        self.widest = max(self.widest, apart / most)
        self._fleet.violations.expect(
            apart <= most,
            FAIRNESS,
            lambda: f"{' and '.join(pair)}: {apart:.0f} weighted tokens apart {what}, {most:.0f} allowed",
        )
