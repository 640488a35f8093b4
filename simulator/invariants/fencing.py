"""No grant on a worker that the scheduler has barred; no start under an invalid right."""

from __future__ import annotations

from typing import Final

from services.core.generation import FallbackGrant, PlaceSpec, StartSpec
from services.scheduler.fleet.worker import MAX_YIELDING_GRANTS
from services.scheduler.term import Term
from services.worker.streams.admission import FallbackRules
from simulator.fleet.assembly import SimFleet
from simulator.fleet.grant_watch import GrantListener
from simulator.fleet.invariant import Invariant

FENCED: Final = "fenced"
REPLAYED: Final = "grant-replayed"
ALONE: Final = "placed-alone"
_REMEMBERED: Final = 4096


class Fencing(GrantListener, Invariant):
    """``admitted`` remembers grants for as long as they could be used twice, by worker. ``alone`` counts the
    sequences that gateways placed without a leader."""

    def __init__(self, rules: FallbackRules | None = None) -> None:
        self._rules = rules if rules is not None else FallbackRules()
        self.alone = 0
        self._admitted: dict[str, dict[tuple[int, int, int], None]] = {}

    def watch(self, fleet: SimFleet) -> None:
        super().watch(fleet)
        fleet.grants.listeners.append(self)

    def granted(self, term: Term, spec: PlaceSpec, worker_id: str) -> None:
        held = term.fleet.candidates(spec.version_digest)[worker_id]
        wrong = [
            what
            for what, is_so in (
                ("does not take requests", not held.ready),
                ("drains", held.draining),
                ("is silent or honours another leader", not held.reporting),
                ("is ejected", self._fleet.grants.was_ejected),
                ("is excluded by the request", worker_id in spec.excluded_workers),
                ("is granted more than it has", held.kv_tokens_room < 0),
                ("has no sequence slot", _has_no_slot(term, worker_id, spec.version_digest)),
            )
            if is_so
        ]
        if wrong:
            self._add(FENCED, f"term {term.epoch} granted on {worker_id}, which {' and '.join(wrong)}")

    def started(self, worker_id: str, spec: StartSpec) -> None:
        grant, host = spec.grant, self._fleet.workers[worker_id].host
        if not host.takes(grant.version_digest):
            why = "it drains" if host.draining else "it takes no more of that version"
            self._add(FENCED, f"{worker_id} started a sequence although {why}")
        if isinstance(grant, FallbackGrant):
            self._started_alone(worker_id, grant)
            return
        books = host.grants
        if grant.incarnation != books.incarnation:
            self._add(FENCED, f"{worker_id} started under a grant of another life")
        if grant.epoch < books.epoch:
            self._add(FENCED, f"{worker_id} started under term {grant.epoch}, having heard {books.epoch}")
        key = grant.incarnation, grant.epoch, grant.sequence
        admitted = self._admitted.setdefault(worker_id, {})
        if key in admitted:
            self._add(REPLAYED, f"{worker_id} started twice under grant {grant.sequence} of {grant.epoch}")
        admitted[key] = None
        if len(admitted) > _REMEMBERED:
            del admitted[next(iter(admitted))]

    def _started_alone(self, worker_id: str, grant: FallbackGrant) -> None:
        """A start without a scheduler's grant is valid only on a worker long without a leader, within its
        credit, from a gateway whose last observed term is not older than the worker's."""
        self.alone += 1
        node = self._fleet.workers[worker_id]
        books, rules = node.host.grants, self._rules
        seen_s = max(node.born_s, node.worker.reporter.leader_seen_s)
        silent_s = node.process.clock.monotonic_s() - seen_s
        wrong: list[str] = []
        if grant.incarnation != books.incarnation:
            wrong.append("in another life")
        if grant.last_epoch < books.epoch:
            wrong.append(f"on a snapshot of term {grant.last_epoch}, having heard {books.epoch}")
        if silent_s < rules.after_s:
            wrong.append(f"{silent_s:.3f} s after it heard a leader")
        table = node.host.table(grant.version_digest)
        held = 0 if table is None else table.kv.fallback_blocks
        if table is None or held > table.limits.kv_blocks_total * rules.credit_ratio:
            wrong.append(f"with {held} blocks held so already")
        if wrong:
            self._add(ALONE, f"{worker_id} started what a gateway placed {' and '.join(wrong)}")


def _has_no_slot(term: Term, worker_id: str, digest: str) -> bool:
    """Whether more grants are on their way than the worker has slots, or others yield."""
    worker = next(state for state in term.fleet.states if state.worker_id == worker_id)
    pool = worker.pools[digest]
    free = pool.max_sequences - pool.running - pool.waiting
    yielded = MAX_YIELDING_GRANTS if pool.yields_to_rank else 0
    return worker.sums[digest].grants > max(free, yielded)
