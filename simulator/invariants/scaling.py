"""Replicas stay within their bounds, one control plane decides, a held request ends, and a need is ordered
once."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from services.core.records import ASSIGNMENTS, NODE_ORDERS, SCALED, Assignment, load
from services.core.scaling import NodeOrder, OrderState, Scaled
from services.ports.store import Delete, Operation, Put
from simulator.fleet.assembly import STORE, SimFleet
from simulator.fleet.clients.client import RequestRecord
from simulator.fleet.clients.session import SimSession
from simulator.fleet.invariant import Invariant
from simulator.fleet.nodes.node_provider import NodeFault
from simulator.fleet.rollout_watch import AppliedWrite, RolloutListener
from simulator.fleet.spec import MODEL, ScalingSpec

BOUNDS: Final = "scaled-bounds"
DECIDER: Final = "one-decider"
HELD: Final = "held-one-end"
ORDERS: Final = "one-order"
_SETTLE_S: Final = 20.0  # time without a fault of the control plane until assignments follow
_SEEN_S: Final = 12.0  # time until a leader has observed that a worker came or went
_LATE_S: Final = 3.0


class Decisions(RolloutListener, Invariant):
    """Checks every write of a control plane, and that assignments follow.

    ``decided`` counts decisions and ``orders`` orders, so that a test can check that there were some.
    """

    def __init__(self, spec: ScalingSpec) -> None:
        self._bounds = spec.bounds
        self.decided = 0
        self.decisions: dict[int, None] = {}  # numbers of replicas that were decided
        self.orders: dict[str, OrderState] = {}
        self._nodes: dict[str, str] = {}  # nodes of the orders
        self._epoch = 0
        self._wanted: int | None = None
        self._assigned: dict[str, None] = {}
        self._missing: deque[tuple[float, int]] = deque()
        self._within_s = 0.0  # when the assignments were within the bounds, or could not be
        self._reported = False

    @property
    def node_faults(self) -> Counter[NodeFault]:
        """Failures of the provider."""
        return self._fleet.provider.faults

    def watch(self, fleet: SimFleet) -> None:
        super().watch(fleet)
        self._wanted = fleet.spec.replicas
        self._missing.append((fleet.loop.now_s, fleet.spec.replicas))  # no worker had registered before
        assert fleet.plane is not None, "a fleet that started has a leading control plane"
        for key, held in fleet.plane.informer.view.items():
            if isinstance(held.record, Assignment) and held.record.versions:
                self._assigned[key.removeprefix(ASSIGNMENTS)] = None
        fleet.routes.listeners.append(self)

    def written(self, written: AppliedWrite) -> None:
        keys = [one.key for one in written.operations]
        if not any(key.startswith((SCALED, NODE_ORDERS, ASSIGNMENTS)) for key in keys):
            return
        leader, life = written.leader, f"{written.writer}/{written.life}"
        if leader is None or leader.leader_id != life:
            who = "nobody" if leader is None else leader.leader_id
            self._add(DECIDER, f"{life} wrote {', '.join(keys)} while {who} led")
        for one in written.operations:
            self._apply(one)

    def sample(self, fleet: SimFleet) -> None:
        now_s = fleet.loop.now_s
        present = self._present()
        self._missing.append((now_s, (self._wanted or 0) - len(present)))
        while self._missing[0][0] < now_s - _SEEN_S:
            self._missing.popleft()
        assigned = sum(name in self._assigned for name in present)
        least = min(self._bounds.min_replicas, len(present))
        acts = fleet.plane is not None and fleet.processes[STORE].running
        if not acts or least <= assigned <= self._bounds.max_replicas:
            self._within_s = now_s
        elif now_s - self._within_s > _SETTLE_S and not self._reported:
            self._reported = True
            self._add(BOUNDS, f"{assigned} replicas are assigned to {len(present)} workers")

    def _apply(self, operation: Operation) -> None:
        key = operation.key
        if key.startswith(SCALED) and isinstance(operation, Put):
            self._decision(load(operation.value, Scaled))
        elif key.startswith(ASSIGNMENTS):
            worker = key.removeprefix(ASSIGNMENTS)
            self._assigned.pop(worker, None)
            if isinstance(operation, Put) and load(operation.value, Assignment).versions:
                self._assigned[worker] = None
        elif key.startswith(NODE_ORDERS):
            name = key.removeprefix(NODE_ORDERS)
            if isinstance(operation, Delete):
                self.orders.pop(name, None)
            elif isinstance(operation, Put):
                self._order(load(operation.value, NodeOrder))

    def _decision(self, decision: Scaled) -> None:
        self.decided += 1
        self.decisions[decision.replicas] = None
        self._wanted = decision.replicas
        least, most = self._bounds.min_replicas, self._bounds.max_replicas
        if not least <= decision.replicas <= most:
            self._add(BOUNDS, f"{decision.replicas} replicas were decided, {least} to {most} are allowed")
        if decision.epoch < self._epoch:
            self._add(DECIDER, f"a decision of epoch {decision.epoch} follows one of {self._epoch}")
        self._epoch = decision.epoch

    def _order(self, order: NodeOrder) -> None:
        before = self.orders.get(order.order_id)
        open_ = sum(state is OrderState.ORDERED for state in self.orders.values())
        if before is None and order.state is OrderState.ORDERED:
            self.sample(self._fleet)
            missing = max(count for _, count in self._missing)
            if open_ >= missing:
                self._add(ORDERS, f"order {open_ + 1} is made, {missing} replicas lack a node")
        if before in (OrderState.RELEASED, OrderState.FAILED) and order.state is not before:
            self._add(ORDERS, f"an order that was {before} is {order.state}")
        self.orders[order.order_id], self._nodes[order.order_id] = order.state, order.node

    def _present(self) -> list[str]:
        """Return the workers that run and do not leave. A frozen one is lost to the plane before long."""
        leaving = {
            self._nodes[name] for name, state in self.orders.items() if state is not OrderState.RUNNING
        }
        workers = self._fleet.workers.items()
        return [
            name
            for name, node in workers
            if node.process.running and not node.host.draining and name not in leaving
        ]


class HeldRequests(Invariant):
    """A request that waits for the first replica has an end: by its deadline, or within the time that its
    gateway may hold it. That it has no second one is checked for every request (``clients.session.ONCE``).

    ``held`` counts such requests, and ``woken`` those of them that were answered.
    """

    def __init__(self) -> None:
        self.held = 0
        self.woken = 0
        self._since_s: dict[tuple[int, int], float] = {}
        self._hold_s = Scaled(MODEL, 0).hold_s
        self._sampled_s = 0.0  # time of the last sample
        self._frozen_s: dict[str, tuple[float, float]] = {}  # begin and end of a gateway's last freeze

    def sample(self, fleet: SimFleet) -> None:
        now_s, serves = fleet.loop.now_s, any(one.serving for one in fleet.workers.values())
        for name, gateway in fleet.gateways.items():
            if not gateway.process.running:
                began_s, seen_s = self._frozen_s.get(name, (now_s, now_s))
                self._frozen_s[name] = began_s if seen_s == self._sampled_s else now_s, now_s
        for number, session in fleet.clients.present.items():
            attempt = number, session.record.attempts
            if not serves and session.gateway and not session.record.output_tokens:
                self.held += attempt not in self._since_s
                self._since_s.setdefault(attempt, now_s)
                self._hold_s = max(self._hold_s, fleet.scaled.hold_s)
            if attempt in self._since_s:
                self._judge(session, self._since_s[attempt])
        self._sampled_s = now_s

    def closed(self, record: RequestRecord) -> None:
        """A client's request ended."""
        if (record.number, record.attempts) in self._since_s:
            self.woken += record.finished

    def _judge(self, session: SimSession, since_s: float) -> None:
        """Compare the wait with what is allowed: from the end of a freeze, if it began during that one."""
        record, request, now_s = session.record, session.request, self._fleet.loop.now_s
        if not session.gateway:
            return
        longest_s = self._hold_s + self._fleet.spec.gateway.queue_ttl_s
        if request.deadline_s is not None:
            longest_s = request.deadline_s
        elif record.output_tokens:
            return
        froze_s, ran_s = self._frozen_s.get(session.gateway, (0.0, 0.0))
        began_s = max(since_s, ran_s) if since_s >= froze_s else since_s
        if now_s > max(began_s + longest_s, ran_s) + _LATE_S:
            waited_s = now_s - since_s
            text = f"request {record.number} waits for {waited_s:.1f} s, {longest_s:g} s are allowed"
            self._add(HELD, text)
            self._since_s[record.number, record.attempts] = float("inf")
