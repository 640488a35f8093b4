"""Two hundred variants on a shared pool: production scaler, order of leaving and planner, in virtual time.

Only engines, stores and the scheduler are left out. A variant's request waits until its variant is READY.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.controlplane.fleet import Fleet, replicas_of
from services.controlplane.policy.assign import PutAssignment, plan
from services.controlplane.policy.host import MAX_VERSIONS_PER_WORKER
from services.controlplane.scaling.policy.deployment import DeploymentScaler, Situation
from services.controlplane.scaling.policy.residency import Resident, leaving, stay_s
from services.controlplane.scaling.policy.scaler import ScalerTuning
from services.core.estimates.pool_load import ClassLoad, PoolLoad
from services.core.records import (
    Assignment,
    Deployment,
    LoadedVersion,
    Meta,
    Priority,
    VersionState,
    Worker,
)
from services.core.scaling import Scaled, Scaling

GIB = 2**30
STEP_S = 5.0
LOAD_S = 15.0
ROOM_GIB = 24  # of a worker; variants take one or two
Order = Callable[[Iterable[Resident]], dict[str, str]]


@dataclass
class Variant:
    deployment: Deployment
    size_gib: int
    scaler: DeploymentScaler = field(default_factory=lambda: DeploymentScaler(ScalerTuning()))
    decided: Scaled | None = None
    arrived: int = 0
    waiting: list[float] = field(default_factory=list)  # arrival times


class Pool:
    """Workers on which loads take ``LOAD_S``, and what a leader of the control plane decides about them."""

    def __init__(self, variants: int, workers: int, order: Order, *, owners: int = 1) -> None:
        self.variants = {
            name: Variant(
                Deployment(
                    Meta(name, {"owner": f"o{number % owners}"}), "m", "v", f"sha256:{name}", 0,
                    scaling=Scaling(0, 1, idle_s=36000.0),
                ),
                1 + number % 2,
            )
            for number in range(variants)
            for name in [f"v{number:03}"]
        }  # fmt: skip
        self.assignments = {f"w{n}": Assignment(f"w{n}") for n in range(workers)}
        self.ready_s: dict[tuple[str, str], float] = {}  # when each loaded variant is READY, by worker
        self.order, self.now_s = order, 1000.0
        self.leaving: dict[str, str] = {}
        self.needs: dict[str, int] = {}
        self.loads: dict[str, int] = dict.fromkeys(self.variants, 0)
        self.waits_s: list[float] = []
        self.shortest_stay_s = float("inf")
        self.starved: set[tuple[str, str]] = set()  # assigned without room
        self.planned: object = None  # what the last plan was made from: another makes no change

    def step(self, requests: Iterable[str]) -> None:
        """Let ``STEP_S`` pass, in which these requests arrive."""
        self.now_s += STEP_S
        for name in requests:
            self.variants[name].arrived += 1
            self.variants[name].waiting.append(self.now_s)
        workers = self._workers()
        ready = {one.deployment for w in workers for one in w.versions if one.state is VersionState.READY}
        for name in ready:
            self.waits_s += [self.now_s - at_s for at_s in self.variants[name].waiting]
            self.variants[name].waiting.clear()
        self._decide(workers, ready)
        self._plan(workers)

    def _workers(self) -> tuple[Worker, ...]:
        found: dict[str, list[LoadedVersion]] = {name: [] for name in self.assignments}
        for (worker, name), ready_s in sorted(self.ready_s.items()):
            size = self.variants[name].size_gib * GIB
            state = VersionState.READY if ready_s <= self.now_s else VersionState.LOADING
            found[worker].append(
                LoadedVersion(name, "m", f"sha256:{name}", state, weight_bytes=size, needed_bytes=size)
            )
            self.needs[f"sha256:{name}"] = size
        for worker, name in sorted(self.starved):
            size = self.needs[f"sha256:{name}"] = self.variants[name].size_gib * GIB
            found[worker].append(
                LoadedVersion(
                    name, "m", f"sha256:{name}", VersionState.FAILED, reason="DOES_NOT_FIT", needed_bytes=size
                )
            )
        for versions in found.values():
            assert sum(one.weight_bytes for one in versions) <= ROOM_GIB * GIB
            assert len(versions) <= MAX_VERSIONS_PER_WORKER
        return tuple(
            Worker(name, "x", memory_bytes=ROOM_GIB * GIB, versions=tuple(versions))
            for name, versions in sorted(found.items())
        )

    def _decide(self, workers: tuple[Worker, ...], ready: set[str]) -> None:
        fleet = Fleet(workers=workers, assignments=tuple(self.assignments.values()))
        residents: list[Resident] = []
        for name, one in self.variants.items():
            replicas = replicas_of(fleet, name)
            arrived = (ClassLoad(Priority.STANDARD, arrived=float(one.arrived)),)
            situation = Situation(
                one.deployment,
                one.decided,
                {(each.worker_id, each.assigned.version_digest): each.loaded for each in replicas},
                PoolLoad(arrived, held=0 if name in ready else len(one.waiting)),
                1,
                self.now_s,
                self.now_s,
                leaving=self.leaving.get(name, ""),
            )
            one.decided = one.scaler.decide(situation)
            if (resident := one.scaler.resident(situation, one.decided.replicas)) is not None:
                residents.append(resident)
        self.leaving = self.order(residents)

    def _plan(self, workers: tuple[Worker, ...]) -> None:
        state = (workers, [one.decided and one.decided.replicas for one in self.variants.values()])
        if state == self.planned:
            return
        self.planned = state
        actions = plan(
            [one.deployment.scaled_by(one.decided) for one in self.variants.values()],
            workers,
            [],
            list(self.assignments.values()),
            estimates=self.needs,
            leaving=tuple(self.leaving),
        )
        for action in actions:
            if isinstance(action, PutAssignment):
                self.assignments[action.assignment.worker_id] = action.assignment
        assigned = {
            (worker, version.deployment)
            for worker, assignment in self.assignments.items()
            for version in assignment.versions
        }
        for key in [key for key in self.ready_s if key not in assigned]:
            self.shortest_stay_s = min(self.shortest_stay_s, self.now_s - self.ready_s.pop(key))
        for worker, name in sorted(assigned - self.ready_s.keys()):
            room = ROOM_GIB - sum(self.variants[n].size_gib for w, n in self.ready_s if w == worker)
            if room >= self.variants[name].size_gib:
                self.ready_s[worker, name] = self.now_s + LOAD_S
                self.loads[name] += 1
        self.starved = assigned - self.ready_s.keys()


def traffic(variants: int, steps: int, per_step: float, seed: int) -> list[list[str]]:
    """Return requests by step: Zipf's law over variants in random order, Poisson arrivals, two at a time."""
    rng = random.Random(seed)
    names = [f"v{number:03}" for number in range(variants)]
    rng.shuffle(names)
    weights = list(itertools.accumulate((rank + 1) ** -1.2 for rank in range(variants)))
    found: list[list[str]] = []
    for _ in range(steps):
        count = sum(rng.random() < per_step / 8 for _ in range(8))
        found.append([names[bisect.bisect(weights, rng.random() * weights[-1])] for _ in range(count)])
    return found


def oracle_loads(requests: list[list[str]], sizes: dict[str, int], room: int) -> int:
    """Return the loads where who is used farthest in the future, by size, leaves one common memory."""
    trace = [name for step in requests for name in step]
    later = [float("inf")] * len(trace)
    last: dict[str, int] = {}
    for index in reversed(range(len(trace))):
        later[index] = last.get(trace[index], float("inf"))
        last[trace[index]] = index
    inside: dict[str, float] = {}
    loads = used = 0
    for index, name in enumerate(trace):
        if name not in inside:
            loads, used = loads + 1, used + sizes[name]
            while used > room:
                gone = max(inside, key=lambda one: ((inside[one] - index) * sizes[one], one))
                used -= sizes[gone]
                del inside[gone]
        inside[name] = later[index]
    return loads


def run(order: Order, requests: list[list[str]], *, owners: int = 1) -> Pool:
    pool = Pool(200, 4, order, owners=owners)
    for step in requests:
        pool.step(step)
    for _ in range(60):
        pool.step([])
    return pool


def test_two_hundred_variants_are_loaded_little_more_often_than_an_oracle_would() -> None:
    requests = traffic(200, 600, 2.0, seed=3)
    pool = run(leaving, requests)
    sizes = {name: one.size_gib for name, one in pool.variants.items()}
    best = oracle_loads(requests, sizes, 4 * ROOM_GIB)
    loads = sum(pool.loads.values())
    assert len(pool.waits_s) == sum(map(len, requests)), "every request was served"
    assert loads <= 1.5 * best
    assert pool.shortest_stay_s >= stay_s(LOAD_S - STEP_S) - STEP_S, "who was just loaded stays"
    assert max(pool.waits_s) <= 2 * (stay_s(LOAD_S) + LOAD_S)
