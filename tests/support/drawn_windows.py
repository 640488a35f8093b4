"""Requests of a small fleet, drawn by a queue of steps, with causes of slowness that a test plants.

Workers step over their sequences: a step takes what the work in it takes. Requests wait in order of their
class for a slot. Nothing here is shared with what is tested.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.core.estimates.finished import FinishedRequest
from services.core.generation import RunFacts, StageClock, StepTotals, Usage
from services.core.records import Priority

STEP_S, ROW_S, PREFILL_S, ATTENDED_S = 8e-3, 2e-4, 6e-5, 2e-7
SLOTS, CHUNK = 3, 1024
WIDTHS = (32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Habits:
    per_s: float = 2.0
    prompt: tuple[int, int] = (60, 120)
    shared: int = 0
    output: tuple[int, int] = (8, 16)
    priority: Priority = Priority.STANDARD
    pause_s: float = 0.0


TENANTS: Mapping[str, Habits] = {
    "ann": Habits(2.5, (80, 160)),
    "bob": Habits(2.5, (700, 800), shared=640),
    "cleo": Habits(2.3),
    "dora": Habits(1.0),
    "rita": Habits(1.0),
    "iris": Habits(0.4, output=(40, 60), priority=Priority.INTERACTIVE),
}


@dataclass(frozen=True)
class World:
    """How the fleet is for a while. Ratios are of step times."""

    tenants: Mapping[str, Habits] = field(default_factory=lambda: dict(TENANTS))
    workers: int = 4
    admit_s: float = 1e-3
    zone_delay_s: Mapping[str, float] = field(default_factory=dict)
    worker_ratio: Mapping[str, float] = field(default_factory=dict)
    version: str = "sha256:old"
    version_ratio: float = 1.0
    log_s: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.15  # spread of every duration

    def with_tenant(self, name: str, **changed: object) -> World:
        had = self.tenants.get(name, Habits(0.0))
        return replace(self, tenants={**self.tenants, name: replace(had, **changed)})  # type: ignore[arg-type]


@dataclass
class _Sequence:
    tenant: str
    habits: Habits
    number: int
    arrived_s: float
    admit_s: float
    gateway: str
    log_s: float
    prompt: int
    cached: int
    output: int
    network_s: float = 0.0
    placed_s: float = 0.0
    left: int = 0
    produced: int = 0
    started_s: float = 0.0
    first_s: float = 0.0
    sums: tuple[float, ...] = ()
    first_sums: tuple[float, ...] = ()


@dataclass
class _Worker:
    name: str
    zone: str
    free_s: float = 0.0
    running: list[_Sequence] = field(default_factory=list)
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)


def drawn(world: World, begin_s: float, lasted_s: float, seed: int) -> list[FinishedRequest]:
    """Return the requests that ended within a time, from a fleet that starts empty two seconds before."""
    rng = random.Random(seed)
    arrivals = sorted(
        (_arrivals(world, begin_s - 2, lasted_s + 2, rng)), key=lambda one: one.arrived_s + one.admit_s
    )
    workers = [_Worker(f"worker-{at}", "ab"[at % 2]) for at in range(world.workers)]
    queues: dict[Priority, deque[_Sequence]] = {each: deque() for each in Priority}
    found: list[FinishedRequest] = []
    at, turns = 0, [(0.0, place) for place in range(world.workers)]
    heapq.heapify(turns)
    while turns:
        now_s, place = heapq.heappop(turns)
        worker = workers[place]
        while at < len(arrivals) and arrivals[at].arrived_s + arrivals[at].admit_s <= now_s:
            queues[arrivals[at].habits.priority].append(arrivals[at])
            at += 1
        fewest = min(len(one.running) for one in workers)
        while len(worker.running) < SLOTS and len(worker.running) <= fewest + 1:
            queue = next(
                (queues[each] for each in sorted(Priority, key=lambda p: -p.rank) if queues[each]), None
            )
            if queue is None:
                break
            one = queue.popleft()
            delay_s = world.zone_delay_s.get(worker.zone, 0.0)
            one.network_s = 2e-3 * rng.lognormvariate(0, world.noise) + 2 * delay_s
            one.placed_s, one.left, one.sums = now_s, one.prompt - one.cached, tuple(worker.sums)
            worker.running.append(one)
        if not worker.running:
            if at >= len(arrivals) and not any(queues.values()):
                continue
            later_s = now_s + 2e-3 if at >= len(arrivals) else max(now_s + 2e-3, arrivals[at].arrived_s)
            heapq.heappush(turns, (later_s, place))
            continue
        end_s = now_s + _step(world, worker, now_s, rng, found)
        heapq.heappush(turns, (end_s, place))
    return [one for one in found if begin_s <= one.ended_unix_us / 1e6 < begin_s + lasted_s]


def _arrivals(world: World, begin_s: float, lasted_s: float, rng: random.Random) -> list[_Sequence]:
    found = list[_Sequence]()
    for tenant, habits in world.tenants.items():
        at_s = begin_s
        while habits.per_s:
            at_s += rng.expovariate(habits.per_s)
            if at_s >= begin_s + lasted_s:
                break
            gateway = f"gateway-{rng.randrange(2)}"
            prompt = rng.randint(*habits.prompt)
            noise = rng.lognormvariate(0, 2 * world.noise)
            log_s = (1e-4 + world.log_s.get(gateway, 0.0)) * noise
            cached = min(habits.shared, prompt) if rng.random() < 0.97 else 0
            output = rng.randint(*habits.output)
            admit_s = world.admit_s * noise + log_s
            found.append(
                _Sequence(tenant, habits, len(found), at_s, admit_s, gateway, log_s, prompt, cached, output)
            )
    return found


def _step(
    world: World, worker: _Worker, now_s: float, rng: random.Random, found: list[FinishedRequest]
) -> float:
    """Run a step, and append what ended with it; return its duration."""
    room, prefill, decodes, attended = CHUNK, 0, [], 0
    done: list[_Sequence] = []
    for one in worker.running:
        if one.left > 0:
            took = min(room, one.left)
            if took and one.left == one.prompt - one.cached:
                one.started_s = now_s
            one.left -= took
            room -= took
            prefill += took
            if one.left == 0 and took:
                done.append(one)
        else:
            decodes.append(one)
            attended += one.prompt + one.produced
    ratio = (
        world.worker_ratio.get(worker.name, 1.0) * world.version_ratio * rng.lognormvariate(0, world.noise)
    )
    step_s = (STEP_S + ROW_S * len(decodes) + PREFILL_S * prefill + ATTENDED_S * attended) * ratio
    for place, more in enumerate((1, step_s * 1e6, prefill, len(decodes), attended)):
        worker.sums[place] += more
    end_s = now_s + step_s
    for one in done:
        one.first_s, one.first_sums, one.produced = end_s, tuple(worker.sums), 1
    for one in decodes:
        one.produced += 1
    for one in [one for one in worker.running if one.produced >= one.output]:
        worker.running.remove(one)
        found.append(_finished(world, worker, one, end_s))
    return step_s


def _finished(world: World, worker: _Worker, one: _Sequence, end_s: float) -> FinishedRequest:
    def sums(begin: Sequence[float], end: Sequence[float]) -> StepTotals:
        return StepTotals(*(round(b - a) for a, b in zip(begin, end, strict=True)))

    blocked_s = one.habits.pause_s * one.output / 4
    times = (
        2e-4,
        one.admit_s,
        one.placed_s - one.arrived_s - one.admit_s,
        one.network_s / 2,
        one.started_s - one.placed_s,
        one.first_s - one.started_s + one.network_s / 2,
        end_s - one.first_s + blocked_s,
        1e-4,
    )
    clock = StageClock(round(one.arrived_s * 1e6), *(max(0, round(time * 1e6)) for time in times))
    run = RunFacts(
        worker_id=worker.name,
        prefill_us=round((one.first_s - one.started_s) * 1e6),
        before=sums(one.sums, one.first_sums),
        after=sums(one.first_sums, worker.sums),
        blocked_us=round(blocked_s * 1e6),
        log_us=round(one.log_s * 1e6),
    )
    return FinishedRequest(
        request_id=f"req_{one.tenant}_{one.number}",
        face="grpc",
        tenant=one.tenant,
        model="chat",
        version_digest=world.version,
        priority=one.habits.priority,
        reason="FINISHED",
        clock=clock,
        usage=Usage(one.prompt, one.output, one.cached),
        zone="a",
        gateway=one.gateway,
        weight=1.0,
        run=run,
    )


def drawn_rows(
    widths: Sequence[int], per_s: float, begin_s: float, lasted_s: float, seed: int
) -> list[FinishedRequest]:
    """Return requests of a fixed-cost model with rows of these lengths: one device, a queue per bucket."""
    rng = random.Random(seed)
    queues: dict[int, list[tuple[float, int]]] = {width: [] for width in WIDTHS}
    arrivals, at_s = [], begin_s
    while at_s < begin_s + lasted_s:
        at_s += rng.expovariate(per_s)
        arrivals.append((at_s, rng.choice(widths)))
    found: list[FinishedRequest] = []
    now_s, at = begin_s, 0
    while at < len(arrivals) or any(queues.values()):
        while at < len(arrivals) and arrivals[at][0] <= now_s:
            length = arrivals[at][1]
            queues[next(width for width in WIDTHS if width >= length)].append(arrivals[at])
            at += 1
        ready = [(queue[0][0], width) for width, queue in queues.items() if queue]
        due = [(first, width) for first, width in ready if now_s - first >= 5e-3 or len(queues[width]) >= 16]
        if not due:
            now_s += 1e-3
            continue
        _, width = min(due)
        batch, queues[width] = queues[width][:16], queues[width][16:]
        run_s = (0.02 + len(batch) * width * 5e-6) * rng.lognormvariate(0, 0.1)
        for arrived_s, length in batch:
            wait_s = now_s - arrived_s
            stages_us = (200, 1000, 0, 0, round(wait_s * 1e6), round(run_s * 1e6) + 2000, 0, 100)
            clock = StageClock(round(arrived_s * 1e6), *stages_us)
            run = RunFacts(
                worker_id="worker-0",
                prefill_us=round(run_s * 1e6),
                batch_wait_us=round(wait_s * 1e6),
                batch_rows=len(batch),
                batch_width=width,
                row_tokens=length,
            )
            found.append(
                FinishedRequest(
                    f"row_{len(found)}",
                    "grpc",
                    "vera",
                    "embed",
                    "sha256:rows",
                    Priority.STANDARD,
                    "FINISHED",
                    clock,
                    Usage(length, 0),
                    "a",
                    "gateway-0",
                    1.0,
                    run,
                )
            )
        now_s += run_s
    return found
