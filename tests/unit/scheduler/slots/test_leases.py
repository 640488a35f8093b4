"""The lease leases in random histories: what may be in flight on a worker never exceeds its slots."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.core.fixed_cost.slots import SlotLease, SlotReturn
from services.scheduler.slots.leases import LeaseTerms, RowWorker, VersionLeases

DIGEST = "sha256:" + "a" * 64
PARTIES = [("g0", "acme"), ("g1", "beta")]
PICK = st.integers(0, 1)


class LeaseMachine(RuleBasedStateMachine):
    """A leases, and gateways that use all that their last received lease allows. Messages may be delayed by
    the margin, and rows end when the machine says so."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.terms = LeaseTerms()
        self.leases = VersionLeases(DIGEST, 7, self.terms, itertools.count(1))
        self.workers = [RowWorker("w0", "a:1", 1, 8)]
        self.sent: dict[str, list[tuple[float, SlotLease]]] = {"g0": [], "g1": []}
        # By holder and worker: the lease, when it lapses, and rows in flight.
        self.held: dict[tuple[str, str, str], tuple[SlotLease, float]] = {}
        self.in_flight: dict[tuple[str, str, str], int] = {}

    @rule(pick=PICK, slots=st.sampled_from([0, 2, 8]))
    def put(self, pick: int, slots: int) -> None:
        holder, worker = PARTIES[pick], self.workers[0]
        self.leases.observe(self.workers, self.now_s)
        lease = self.leases.of(holder).get(worker.worker_id)
        has = 0 if lease is None else lease.slots
        most = has + self.leases.room_for(holder, worker)
        if min(slots, most) != has:
            self.leases.put(holder, worker, min(slots, most))

    @rule(arrives=st.booleans())
    def send(self, arrives: bool) -> None:
        for gateway, sent in self.sent.items():
            sent += [(self.now_s, lease) for lease in self.leases.take(gateway, 99, self.now_s)]
            if arrives:
                self.receive(gateway)

    @rule(gateway=st.sampled_from(["g0", "g1"]))
    def receive(self, gateway: str) -> None:
        for _, lease in self.sent[gateway]:
            key = gateway, lease.tenant, lease.worker_id
            self.held[key] = lease, self.now_s + lease.ttl_s
        self.sent[gateway].clear()

    @rule(pick=PICK)
    def start_rows(self, pick: int) -> None:
        """Fill a lease that has not lapsed."""
        live = [key for key, (_, until_s) in self.held.items() if self.now_s < until_s]
        if live:
            key = live[pick % len(live)]
            self.in_flight[key] = max(self.in_flight.get(key, 0), self.held[key][0].slots)

    @rule(pick=PICK)
    def end_rows(self, pick: int) -> None:
        """End the rows beyond a lease and return it."""
        if self.held:
            key = list(self.held)[pick % len(self.held)]
            gateway, tenant, worker_id = key
            lease = self.held[key][0]
            self.in_flight[key] = min(self.in_flight.get(key, 0), lease.slots)
            self.leases.returned(gateway, SlotReturn(worker_id, DIGEST, tenant, lease.number))

    @rule(seconds=st.sampled_from([0.4, 1.0, 2.5]))
    def wait(self, seconds: float) -> None:
        """Let time pass: messages arrive within the margin, rows under a lapsed lease end."""
        self.now_s += seconds
        for gateway, sent in self.sent.items():
            if sent and sent[0][0] + self.terms.margin_s <= self.now_s:
                self.receive(gateway)
        for key, (_, until_s) in self.held.items():
            if until_s <= self.now_s:
                self.in_flight[key] = 0
        self.leases.settle(self.now_s)
        self.leases.renew(self.now_s)

    @rule(gateway=st.sampled_from(["g0", "g1"]))
    def disconnect(self, gateway: str) -> None:
        """The stream breaks: what was sent is lost, what was received may be used until it lapses."""
        self.leases.disconnect(gateway)
        self.sent[gateway].clear()

    @invariant()
    def nothing_is_over_leased(self) -> None:
        self.leases.check_integrity()
        for worker in self.workers:
            held = sum(lease.held for lease in self.leases.on(worker.worker_id).values())
            assert held <= worker.row_slots
            usable = 0
            for key in {*self.held, *self.in_flight}:
                if key[2] == worker.worker_id:
                    lease, until_s = self.held[key]
                    allowed = lease.slots if self.now_s < until_s else 0
                    usable += max(allowed, self.in_flight.get(key, 0))
            assert usable <= worker.row_slots, f"{usable} rows may be in flight on {worker.worker_id}"


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


def machine_with_all_leased() -> LeaseMachine:
    """Return a machine where g0 received and fills all slots of the worker."""
    machine = LeaseMachine()
    machine.put(0, 8)
    machine.send(arrives=True)
    machine.start_rows(0)
    return machine


def lease_to_other(machine: LeaseMachine) -> int:
    """Lease what is free to g1, and check; return its slots."""
    machine.put(1, 8)
    machine.send(arrives=True)
    machine.nothing_is_over_leased()
    return machine.leases.slots_of(PARTIES[1])


def test_slots_are_free_when_the_gateway_returned_the_newest_lease() -> None:
    machine = machine_with_all_leased()
    machine.put(0, 2)
    machine.end_rows(0)  # it has not received the smaller lease: its return is of the one before
    assert lease_to_other(machine) == 0
    machine.receive("g0")
    machine.end_rows(0)
    assert lease_to_other(machine) == 6


def test_slots_of_a_silent_gateway_are_free_once_its_lease_has_lapsed() -> None:
    machine = LeaseMachine()
    machine.put(0, 8)
    machine.send(arrives=False)
    machine.wait(2.5)
    machine.receive("g0")  # late, within the margin
    machine.disconnect("g0")
    for _ in range(4):
        assert lease_to_other(machine) == 0
        machine.wait(0.4)
    machine.wait(1.0)
    assert lease_to_other(machine) == 8


def test_a_gateway_whose_stream_broke_returns_nothing_by_its_last_lease() -> None:
    machine = machine_with_all_leased()
    machine.disconnect("g0")
    machine.end_rows(0)
    assert lease_to_other(machine) == 0
