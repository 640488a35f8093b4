"""When memory is short: lower priorities yield, nothing moves to and fro, and what does not fit says why.

The fleet here is the production planner, the production plan of the agents and the production ledger; only
engines and the store are left out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.controlplane.policy.assign import DropAssignment, PutAssignment, Unplaced, plan
from services.controlplane.policy.memory import MemoryView, needs_of, no_memory
from services.core.errors import DoesNotFit
from services.core.records import (
    AssignedVersion,
    Assignment,
    Deployment,
    LoadedVersion,
    Meta,
    Node,
    Priority,
    VersionState,
    Worker,
)
from services.worker.memory_ledger import MemoryLedger
from services.worker.policy import lifecycle
from services.worker.policy.lifecycle import (
    CancelRemoval,
    Discard,
    DrainVersion,
    Fetch,
    LoadVersion,
    Slot,
    VersionPhase,
    wanted,
)

MIB = 2**20
KV_WISH = 64 * MIB
KV_LEAST = 16 * MIB


def deployment(name: str, priority: Priority = Priority.STANDARD, replicas: int = 1) -> Deployment:
    return Deployment(Meta(name), "m", "v", "sha256:" + name, replicas, priority=priority)


@dataclass
class Agent:
    """A worker whose engines load at once. ``weights`` is what each version's weights take, by digest."""

    worker_id: str
    total: int
    weights: dict[str, int]
    rng: random.Random
    slots: dict[str, Slot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = MemoryLedger(self.total)

    def tick(self, assignment: Assignment) -> int:
        """Act once on the assignment; return how many actions there were."""
        actions = lifecycle.plan(
            wanted(assignment.versions), list(self.slots.values()), 0.0, free_bytes=self.ledger.free_bytes
        )
        for action in actions:
            self.act(action)
        self.ledger.check_integrity()
        return len(actions)

    def act(self, action: lifecycle.Action) -> None:
        match action:
            case Fetch(version):
                self.slots[version.version_digest] = Slot(
                    version, VersionPhase.FETCHED, has_files=True, unbooked=True
                )
            case LoadVersion(digest):
                self.load(digest)
            case DrainVersion(digest):
                self.slots[digest] = replace(
                    self.slots[digest],
                    phase=VersionPhase.DRAINING,
                    running=self.rng.randrange(2),
                    drain_until_s=1.0,
                )
            case CancelRemoval(digest):
                self.slots[digest] = replace(self.slots[digest], phase=VersionPhase.READY)
            case Discard(digest):
                self.ledger.release(digest)
                del self.slots[digest]

    def end_sequences(self) -> None:
        self.slots = {digest: replace(slot, running=0) for digest, slot in self.slots.items()}

    def load(self, digest: str) -> None:
        slot, weights = self.slots[digest], self.weights[digest]
        try:
            grant = self.ledger.grant(digest, weight_bytes=weights, kv_bytes=KV_WISH, min_kv_bytes=KV_LEAST)
        except DoesNotFit:
            self.slots[digest] = replace(slot, phase=VersionPhase.BROKEN, needed_bytes=weights + KV_LEAST)
        else:
            self.slots[digest] = replace(
                slot, phase=VersionPhase.READY, granted_bytes=grant.bytes, unbooked=False, needed_bytes=0
            )

    def crash(self, digest: str) -> None:
        self.ledger.release(digest)
        self.slots[digest] = replace(
            self.slots[digest], phase=VersionPhase.BROKEN, granted_bytes=0, unbooked=True, restarting=True
        )

    def record(self) -> Worker:
        loaded = [self.loaded(digest, slot) for digest, slot in sorted(self.slots.items())]
        return Worker(self.worker_id, "x", memory_bytes=self.total, versions=tuple(loaded))

    def loaded(self, digest: str, slot: Slot) -> LoadedVersion:
        starved = slot.phase is VersionPhase.BROKEN and slot.needed_bytes > 0
        state = {VersionPhase.READY: VersionState.READY, VersionPhase.DRAINING: VersionState.DRAINING}.get(
            slot.phase, VersionState.FAILED if starved else VersionState.LOADING
        )
        grant = self.ledger.held_by(digest)
        return LoadedVersion(
            slot.version.deployment,
            "m",
            digest,
            state,
            reason=DoesNotFit.reason if starved else "",
            weight_bytes=0 if grant is None else grant.weight_bytes,
            kv_bytes=0 if grant is None else grant.kv_bytes,
            needed_bytes=self.weights[digest] + KV_LEAST if grant is not None or starved else 0,
        )


@dataclass
class Fleet:
    deployments: list[Deployment]
    agents: list[Agent]
    nodes: list[Node] = field(default_factory=list)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    writes: int = 0

    def plan(self) -> int:
        """Apply a plan; return how many assignments it wrote."""
        actions = plan(
            self.deployments,
            [agent.record() for agent in self.agents],
            self.nodes,
            list(self.assignments.values()),
        )
        written = 0
        for action in actions:
            if isinstance(action, PutAssignment):
                self.assignments[action.assignment.worker_id] = action.assignment
                written += 1
            elif isinstance(action, DropAssignment):
                del self.assignments[action.worker_id]
                written += 1
        self.writes += written
        return written

    def tick(self, agent: Agent) -> int:
        return agent.tick(self.assignments.get(agent.worker_id, Assignment(agent.worker_id)))

    def rest(self, rounds: int = 60) -> None:
        """Go on until nothing happens any more."""
        for _ in range(rounds):
            done = self.plan() + sum(self.tick(agent) for agent in self.agents)
            for agent in self.agents:
                agent.end_sequences()
            if not done:
                return
        raise AssertionError(f"it does not come to rest: {self.assignments}")

    def ready(self, name: str) -> list[str]:
        digest = "sha256:" + name
        return [
            agent.worker_id
            for agent in self.agents
            if digest in agent.slots and agent.slots[digest].phase is VersionPhase.READY
        ]

    def unplaced(self) -> list[Unplaced]:
        workers = [agent.record() for agent in self.agents]
        actions = plan(self.deployments, workers, self.nodes, list(self.assignments.values()))
        return [action for action in actions if isinstance(action, Unplaced)]


def fleet(deployments: list[Deployment], totals: list[int], weights: dict[str, int]) -> Fleet:
    by_digest = {"sha256:" + name: mib * MIB for name, mib in weights.items()}
    agents = [
        Agent(f"w{n}", total * MIB, by_digest, random.Random(n))  # a seeded source
        for n, total in enumerate(totals)
    ]
    return Fleet(deployments, agents)


def test_a_higher_priority_takes_the_place_of_a_lower_one_which_says_why() -> None:
    low, high = deployment("low", Priority.BATCH), deployment("high", Priority.INTERACTIVE)
    world = fleet([low], [300], {"low": 150, "high": 200})
    world.rest()
    assert world.ready("low") == ["w0"]
    world.deployments.append(high)
    world.rest()
    assert (world.ready("high"), world.ready("low")) == (["w0"], [])
    (starved,) = [one for one in world.agents[0].record().versions if one.deployment == "low"]
    assert starved.reason == "DOES_NOT_FIT"
    world.deployments.remove(high)
    world.rest()
    assert world.ready("low") == ["w0"], "what yielded comes back once there is room"


def test_equal_priorities_do_not_yield() -> None:
    world = fleet([deployment("first")], [300], {"first": 150, "second": 200})
    world.rest()
    world.deployments.append(deployment("second"))
    world.rest()
    assert (world.ready("first"), world.ready("second")) == (["w0"], [])


def test_what_its_equals_can_spare_is_room_and_nobody_has_to_go_for_it() -> None:
    held = [AssignedVersion("a", "m", "da", priority=Priority.STANDARD)]
    held += [AssignedVersion("b", "m", "db", priority=Priority.BATCH)]
    loaded = tuple(
        LoadedVersion(one.deployment, "m", one.version_digest, VersionState.READY, "", 1.0, weight_bytes=50,
                      working_bytes=10, kv_bytes=60, spare_bytes=40)
        for one in held
    )  # fmt: skip
    worker = Worker("w", "x", memory_bytes=250, versions=loaded)
    for priority, free in (
        (Priority.BATCH, 10 + 40),
        (Priority.STANDARD, 10 + 40 + 40),
        (Priority.INTERACTIVE, 10 + 40 + 40),
    ):
        new = AssignedVersion("new", "m", "dn", priority=priority)
        memory = MemoryView(worker, [*held, new], {"dn": free})
        assert memory.free_bytes(but="dn", rank=priority.rank) == free
        assert no_memory(memory, new) == ""
        assert memory.evictions_for(new) == ()
    urgent = AssignedVersion("new", "m", "dn", priority=Priority.INTERACTIVE)
    more = MemoryView(worker, [*held, urgent], {"dn": 91})
    assert more.evictions_for(urgent) == (("db", 80),), "what is left of it when it has shrunk"


def test_nothing_yields_when_it_would_not_help() -> None:
    low, giant = deployment("low", Priority.BATCH), deployment("giant", Priority.INTERACTIVE)
    world = fleet([low, giant], [300], {"low": 100, "giant": 400})
    world.rest()
    assert (world.ready("low"), world.ready("giant")) == (["w0"], [])


def test_only_as_many_yield_as_make_room_and_the_lowest_first() -> None:
    others = [deployment("b1", Priority.BATCH), deployment("b2", Priority.BATCH), deployment("s1")]
    world = fleet(others, [600], {"b1": 100, "b2": 100, "s1": 100, "top": 200})
    world.rest()
    world.deployments.append(deployment("top", Priority.INTERACTIVE))
    world.rest()
    assert world.ready("top") == ["w0"]
    assert world.ready("s1") == ["w0"]
    assert len(world.ready("b1") + world.ready("b2")) == 1


def test_what_its_worker_has_no_memory_for_moves_to_one_that_has() -> None:
    world = fleet([deployment("a"), deployment("b")], [300], {"a": 200, "b": 200})
    world.rest()
    (only,) = world.ready("a") + world.ready("b")
    world.agents.append(Agent("w9", 300 * MIB, world.agents[0].weights, random.Random(9)))
    world.rest()
    assert sorted(world.ready("a") + world.ready("b")) == ["w0", "w9"]
    assert only == "w0"


def test_a_drain_without_memory_elsewhere_stays_and_says_the_figures() -> None:
    world = fleet([deployment("a"), deployment("b")], [300, 300], {"a": 200, "b": 200})
    world.rest()
    world.nodes = [Node("w0", cordoned=True, draining=True)]
    world.rest()
    assert sorted(world.ready("a") + world.ready("b")) == ["w0", "w1"], "nothing was given up"
    (missing,) = world.unplaced()
    why = dict(missing.rejected)["w1"]
    holder = "b" if missing.deployment == "a" else "a"
    assert why == f"no_memory: needs 216 MiB, 36 of 300 MiB are free, {holder} holds 264 MiB"


def test_a_crashed_engine_finds_its_memory_again() -> None:
    low, high = deployment("low", Priority.BATCH), deployment("high", Priority.INTERACTIVE)
    world = fleet([low, high], [300], {"low": 150, "high": 200})
    world.rest()
    writes = world.writes
    for _ in range(5):
        world.agents[0].crash("sha256:high")
        world.rest()
        assert world.ready("high") == ["w0"]
    assert world.writes == writes, "assignments moved because an engine died"


def test_a_worker_that_states_no_memory_has_no_bound() -> None:
    version = AssignedVersion("a", "m", "d")
    memory = MemoryView(Worker("w", "x"), (version,), {"d": 1 << 50})
    assert no_memory(memory, version) == ""
    assert memory.evictions_for(version) == ()


# --- whatever the fleet looks like -----------------------------------------------------------------

NAMES = [f"d{n}" for n in range(6)]


@st.composite
def worlds(draw: st.DrawFn) -> Fleet:
    deployments = [
        deployment(name, draw(st.sampled_from(list(Priority))), draw(st.integers(1, 2)))
        for name in sorted(draw(st.sets(st.sampled_from(NAMES), min_size=1)))
    ]
    totals = draw(st.lists(st.sampled_from([150, 300, 500, 900]), min_size=1, max_size=3))
    return fleet(deployments, totals, {name: draw(st.sampled_from([20, 100, 180, 400])) for name in NAMES})


@settings(max_examples=250, deadline=None)
@given(worlds(), st.randoms(use_true_random=False))
def test_it_comes_to_rest_in_any_order_and_nobody_waits_behind_a_lower_priority(
    world: Fleet, rng: random.Random
) -> None:
    late = world.deployments[::2]
    world.deployments = [one for one in world.deployments if one not in late]
    for one in [None, *late]:
        if one is not None:
            world.deployments.append(one)
        for _ in range(rng.randrange(25)):
            choice = rng.randrange(len(world.agents) + 1)
            if choice == len(world.agents):
                world.plan()
            else:
                world.tick(world.agents[choice])
                world.agents[choice].end_sequences()
    world.rest()
    placements = sum(one.replicas for one in world.deployments)
    assert world.writes <= 12 * (placements + len(world.agents)), "it moved to and fro"
    _check_rest(world)


def _check_rest(world: Fleet) -> None:
    workers = [agent.record() for agent in world.agents]
    needs = needs_of(workers)
    ranks = {one.meta.name: one.priority.rank for one in world.deployments}
    for agent, worker in zip(world.agents, workers, strict=True):
        held = world.assignments.get(worker.worker_id, Assignment(worker.worker_id)).versions
        names = [version.deployment for version in held]
        assert len(set(names)) == len(names), "two replicas of one deployment on a worker"
        for version in held:
            slot = agent.slots[version.version_digest]
            if slot.phase is VersionPhase.READY:
                continue
            assert slot.needed_bytes, f"{version.deployment} waits for nothing: {slot}"
            lower = sum(
                MemoryView(worker, held, needs).granted_bytes(other.version_digest)
                for other in held
                if ranks[other.deployment] < ranks[version.deployment]
            )
            assert slot.needed_bytes > agent.ledger.free_bytes + lower, "it could have had that memory"
            for elsewhere in world.agents:
                if version.deployment not in {
                    v.deployment for v in world.assignments.get(elsewhere.worker_id, Assignment("")).versions
                }:
                    assert slot.needed_bytes > elsewhere.ledger.free_bytes, "another worker has room"
