"""Random histories of a model fleet: late reports, overlapping streams, restarts, cancellations."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from services.core.records import Priority
from services.scheduler.fleet.view import FleetView
from services.scheduler.queue.flow_queue import FlowQueue
from tests.unit.scheduler.model import BLOCK, DIGEST, Fleet, ModelGateway, ModelWorker, place_spec
from tests.unit.scheduler.planted import (
    ForgetsOutstandingGrants,
    GivesBackTwice,
    HearsOldStreams,
    KeepsLapsedAdvances,
    KeepsWhatIsShared,
    LeansOften,
    LosesOnFullQueue,
    SettlesAllOnReport,
    SharesWhatIsCached,
    fleet_with,
)

PICK = st.integers(min_value=0, max_value=1 << 16)


class TermMachine(RuleBasedStateMachine):
    fleet_type: type[Fleet] = Fleet
    fleet: Fleet

    @initialize(seed=st.integers(0, 1000), blocks=st.lists(st.integers(4, 24), min_size=1, max_size=3))
    def begin(self, seed: int, blocks: list[int]) -> None:
        self.fleet = self.fleet_type(seed, tuple(blocks))

    def gateway(self, pick: int) -> ModelGateway:
        return self.fleet.gateways[pick % len(self.fleet.gateways)]

    def worker(self, pick: int) -> ModelWorker:
        return self.fleet.workers[pick % len(self.fleet.workers)]

    @rule(
        pick=PICK,
        prompt=st.integers(1, 300),
        output=st.integers(1, 100),
        priority=st.sampled_from(list(Priority)),
        ttl=st.sampled_from([0.0, 0.5, 5.0, 30.0]),
        age=st.floats(0, 5),
        excluded=st.sampled_from([(), (), (), ("w0",)]),
        tenant=st.sampled_from([("acme", 1.0), ("beta", 4.0), ("gamma", 1.0)]),
        left=st.sampled_from([None, None, 1.0, 20.0]),
        family=st.integers(0, 3),
    )
    def submit(
        self,
        pick: int,
        prompt: int,
        output: int,
        priority: Priority,
        ttl: float,
        age: float,
        excluded: tuple[str, ...],
        tenant: tuple[str, float],
        left: float | None,
        family: int,
    ) -> None:
        spec = place_spec(
            prompt_tokens=prompt,
            max_output_tokens=output,
            priority=priority,
            arrival_s=self.fleet.clock.now_s - age,
            queue_ttl_s=ttl,
            excluded_workers=excluded,
            tenant=tenant[0],
            weight=tenant[1],
            deadline_left_s=left,
            prefix_hashes=chain_of(family, prompt),
        )
        self.fleet.submit(self.gateway(pick), spec)

    @rule()
    def step(self) -> None:
        self.fleet.term.step()

    @rule(pick=PICK)
    def receive(self, pick: int) -> None:
        self.fleet.receive(self.gateway(pick))

    @rule(pick=PICK, which=PICK)
    def cancel(self, pick: int, which: int) -> None:
        """Of any placement ever made: queued, granted and unread, in hand, running, ended."""
        gateway = self.gateway(pick)
        if gateway.numbers:
            self.fleet.cancel(gateway, 1 + which % gateway.numbers)

    @rule(pick=PICK, which=PICK)
    def use(self, pick: int, which: int) -> None:
        gateway = self.gateway(pick)
        if gateway.held:
            self.fleet.use(gateway, which % len(gateway.held))

    @rule(pick=PICK, arrive=st.booleans())
    def use_all(self, pick: int, arrive: bool) -> None:
        """The usual course: what is granted starts, and arrives or is on its way."""
        gateway = self.gateway(pick)
        self.fleet.term.step()
        self.fleet.receive(gateway)
        while gateway.held:
            self.fleet.use(gateway, 0)
        while arrive and self.fleet.starts:
            self.fleet.arrive(0)

    @rule(which=PICK)
    def arrive(self, which: int) -> None:
        if self.fleet.starts:
            self.fleet.arrive(which % len(self.fleet.starts))

    @rule(pick=PICK)
    def report(self, pick: int) -> None:
        self.fleet.report(self.worker(pick))

    @rule(pick=PICK, which=PICK, answered=st.booleans())
    def deliver(self, pick: int, which: int, answered: bool) -> None:
        self.fleet.deliver(pick % len(self.fleet.workers), which, answered=answered)

    @rule(pick=PICK, which=PICK)
    def finish(self, pick: int, which: int) -> None:
        worker = self.worker(pick)
        if worker.running:
            self.fleet.finish(worker, which % len(worker.running))

    @rule(pick=PICK)
    def prefill(self, pick: int) -> None:
        self.worker(pick).prefill()

    @rule(pick=PICK)
    def evict(self, pick: int) -> None:
        self.worker(pick).evict()

    @rule(pick=PICK, break_first=st.booleans())
    def second_stream(self, pick: int, break_first: bool) -> None:
        self.fleet.open_stream(self.worker(pick), break_first=break_first)

    @rule(pick=PICK)
    def break_stream(self, pick: int) -> None:
        self.fleet.break_stream(self.worker(pick))

    @rule(pick=PICK, ready=st.booleans())
    def turn_ready(self, pick: int, ready: bool) -> None:
        self.worker(pick).ready = ready

    @rule(pick=PICK)
    def restart_worker(self, pick: int) -> None:
        self.fleet.restart(self.worker(pick))

    @rule(pick=PICK, cleanly=st.booleans())
    def reconnect(self, pick: int, cleanly: bool) -> None:
        self.fleet.reconnect(self.gateway(pick), cleanly=cleanly)

    @precondition(lambda self: self.fleet.term.epoch < 4)
    @rule()
    def new_leader(self) -> None:
        self.fleet.new_leader()

    @rule(seconds=st.floats(0.05, 3.0))
    def advance(self, seconds: float) -> None:
        self.fleet.advance(seconds)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.term.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            assert_settled(self.fleet)


def chain_of(family: int, prompt_tokens: int, *, common: int = 2) -> tuple[int, ...]:
    """Return a prompt's names: ``common`` blocks of its family, then its own. Family 0 has none."""
    if not family:
        return ()
    own = prompt_tokens % 7 + 1
    return tuple(
        1000 * family + place + (100 * own if place > common else 0)
        for place in range(1, prompt_tokens // 64 + 1)
    )


def assert_settled(fleet: Fleet) -> None:
    """Once everything ended, each placement ended once and all room is back."""
    fleet.settle()
    for gateway in fleet.gateways:
        assert not gateway.pending, "a placement was lost"
        assert set(gateway.ended) == set(range(1, gateway.numbers + 1))
    assert len(fleet.term.queue) == 0
    assert fleet.term.fleet.outstanding == 0
    assert fleet.term.queue.ledger.open_advances == 0, "a tenant is charged for nothing"
    for worker in fleet.workers:
        room = fleet.term.fleet.candidates(DIGEST)[worker.worker_id].kv_tokens_room
        assert room == worker.kv_blocks * BLOCK, "room leaked"
    fleet.term.check_integrity()


TermMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTerm = TermMachine.TestCase


def history(fleet: Fleet, seed: int, steps: int = 250, *, families: int = 0) -> None:
    """A busy fleet: most grants start soon, reports are late, streams overlap. All is settled then.

    ``families`` of prompts begin alike; caches fill and are evicted.
    """
    rng = Random(seed)
    actions: dict[str, float] = {
        "ask": 30,
        "use": 25,
        "arrive": 25,
        "report": 15,
        "deliver": 25,
        "finish": 8,
        "cancel": 6,
    }
    if families:
        actions |= {"prefill": 25, "evict": 6, "arrive": 8, "finish": 25}
    actions |= {"stream": 3, "time": 6, "reconnect": 1, "restart": 1, "leader": 0.3}
    for action in rng.choices(list(actions), list(actions.values()), k=steps):
        gateway, worker = rng.choice(fleet.gateways), rng.choice(fleet.workers)
        index = fleet.workers.index(worker)
        if action == "ask":
            blocks = rng.randint(1, 18 if families else 6)
            tokens = blocks * BLOCK - 1
            chain = chain_of(rng.randint(1, families), tokens) if families else ()
            spec = place_spec(
                prompt_tokens=tokens, max_output_tokens=1, queue_ttl_s=20.0, prefix_hashes=chain
            )
            fleet.submit(gateway, spec)
        elif action == "use":
            fleet.receive(gateway)
            while gateway.held:
                fleet.use(gateway, 0)
        elif action == "arrive" and fleet.starts:
            fleet.arrive(rng.randrange(len(fleet.starts)))
        elif action == "report":
            fleet.report(worker)
        elif action == "deliver":
            fleet.deliver(index, rng.randrange(3), answered=rng.random() < 0.7)
        elif action == "finish" and worker.running:
            fleet.finish(worker, rng.randrange(len(worker.running)))
        elif action == "prefill":
            worker.prefill()
        elif action == "evict":
            worker.evict()
        elif action == "cancel" and gateway.numbers:
            fleet.cancel(gateway, rng.randint(max(1, gateway.numbers - 8), gateway.numbers))
        elif action == "stream":
            fleet.open_stream(worker, break_first=rng.random() < 0.3)
        elif action == "time":
            fleet.advance(rng.uniform(0.05, 0.6))
        elif action == "reconnect":
            fleet.reconnect(gateway, cleanly=rng.random() < 0.5)
        elif action == "restart":
            fleet.restart(worker)
        elif action == "leader":
            fleet.new_leader()
        fleet.term.step()
        fleet.term.check_integrity()
    assert_settled(fleet)


@pytest.mark.parametrize("seed", range(25))
def test_random_history(seed: int) -> None:
    history(Fleet(seed, (10, 8)), seed)


@pytest.mark.parametrize("seed", range(25))
def test_random_history_of_prompts_that_begin_alike(seed: int) -> None:
    history(Fleet(seed, (24, 20)), seed, families=2)


@pytest.mark.parametrize(
    "planted",
    [KeepsWhatIsShared, LeansOften, SharesWhatIsCached, ForgetsOutstandingGrants],
    ids=lambda kind: kind.__name__,
)
def test_random_histories_catch_a_bug_of_sharing(planted: type[FleetView]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(200):
            history(fleet_with(planted)(seed, (24, 20)), seed, families=2)


@pytest.mark.parametrize(
    "planted",
    [
        ForgetsOutstandingGrants,
        SettlesAllOnReport,
        HearsOldStreams,
        GivesBackTwice,
        KeepsLapsedAdvances,
        LosesOnFullQueue,
    ],
    ids=lambda kind: kind.__name__,
)
def test_random_histories_catch_a_planted_bug(planted: type[FleetView] | type[FlowQueue]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(25):
            history(fleet_with(planted)(seed, (10, 8)), seed)
