"""The production queue and fleet view before workers that compute, report late, and lose their leader.

Every worker takes what it is granted, computes a chunk of each prompt and a token of each output in a step,
and reports every few steps. What was granted and what was produced is counted here, independently of the
scheduler's own counters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from services.core.fleet import (
    Granted,
    PoolSnapshot,
    ReportSnapshot,
    SequenceUsage,
    TenantCounter,
    TenantTokens,
)
from services.core.generation import Grant, PlaceSpec
from services.core.records import Priority
from services.scheduler.fleet.view import FleetView
from services.scheduler.fleet.worker import FleetLimits
from services.scheduler.policy.placement.choose import PlacementProfile
from services.scheduler.policy.queue.fair_order import OrderPolicy
from services.scheduler.policy.queue.fairness import ServiceWeights
from services.scheduler.policy.step_time import StepTimes
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.queue.index import QueueLimits
from simulator.invariants.fairness import granted_bound, service_bound
from tests.unit.scheduler.model import BLOCK, DIGEST

STEP_S = 0.05
CHUNK = 64
WEIGHTS = ServiceWeights()


@dataclass(frozen=True)
class Load:
    """What one tenant asks for: always ``depth`` waiting, except in steps for which ``idle`` says so."""

    weight: float = 1.0
    prompt: tuple[int, int] = (16, 64)
    output: tuple[int, int] = (4, 32)
    depth: int = 6
    idle: Callable[[int], bool] = lambda _: False


@dataclass
class Running:
    spec: PlaceSpec
    grant: Grant
    output: int
    prompt_left: int
    produced: int = 0


@dataclass
class FairWorker:
    worker_id: str
    kv_blocks: int
    slots: int
    starting: list[tuple[int, Running]] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: list[SequenceUsage] = field(default_factory=list)
    counters: dict[str, TenantCounter] = field(default_factory=dict)
    connected: bool = False


@dataclass
class Pair:
    """The extremes of the difference of two tenants since both wait."""

    low: float
    high: float

    @staticmethod
    def at(value: float) -> Pair:
        return Pair(value, value)

    def widen(self, value: float) -> float:
        self.low, self.high = min(self.low, value), max(self.high, value)
        return self.high - self.low


class FairRig:
    """``exact``: clients ask for as many output tokens as come, so that the expected cost is the real one."""

    def __init__(
        self,
        seed: int,
        loads: dict[str, Load],
        *,
        workers: int = 2,
        slots: int = 4,
        kv_blocks: int = 64,
        report_every: int = 3,
        start_delay: int = 1,
        exact: bool = True,
        window_tokens: float = 64.0,
        plant: Callable[[FlowQueue], None] = lambda _: None,
    ) -> None:
        self.rng = Random(seed)
        self.loads = loads
        self.workers = [FairWorker(f"w{n}", kv_blocks, slots) for n in range(workers)]
        self.report_every, self.start_delay, self.exact = report_every, start_delay, exact
        self.order = OrderPolicy(bypass_window_tokens=window_tokens, max_bypasses=4)
        self.plant = plant
        self.step_number = 0
        self.epoch = 0
        self.numbers = 0
        self.failovers = 0
        self.waiting: dict[int, PlaceSpec] = {}
        self.outputs: dict[int, int] = {}
        self.granted = dict.fromkeys(loads, 0.0)
        self.produced = dict.fromkeys(loads, 0.0)
        self.starts: dict[str, list[int]] = {tenant: [] for tenant in loads}
        self._pairs: dict[tuple[str, str], tuple[Pair, Pair]] = {}
        self.widest = 0.0
        self.new_leader()

    @property
    def now_s(self) -> float:
        return 1000.0 + self.step_number * STEP_S

    # --- the scheduler ----------------------------------------------------------------------------

    def new_leader(self) -> None:
        """Another scheduler leads: workers report to it first, gateways ask again."""
        self.epoch += 1
        self.fleet = FleetView(self.epoch, FleetLimits(), StepTimes())
        limits = QueueLimits(predicted_output_tokens=16)
        if self.exact:
            limits = QueueLimits(predicted_output_tokens=4096, output_samples=1_000_000)
        profile = PlacementProfile()
        self.queue = FlowQueue(self.fleet, limits, self.order, profile, Random(self.rng.random()))
        self.plant(self.queue)
        for worker in self.workers:
            worker.connected = False
            worker.seen = []
            self._report(worker)
        for number, spec in self.waiting.items():
            self.queue.submit(1, number, spec, spec.arrival_unix_us, self.now_s)

    def step(self) -> None:
        """A moment: clients ask, the scheduler decides, workers compute and report."""
        self.step_number += 1
        self._ask()
        self.queue.touch(self.fleet.expire(self.now_s))
        self.queue.run_pass(self.now_s)
        self.queue.expire(self.now_s)
        self._start()
        for index, worker in enumerate(self.workers):
            self._compute(worker)
            if (self.step_number + index) % self.report_every == 0:
                self._report(worker)
        self._check()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.queue.check_integrity()

    # --- clients ----------------------------------------------------------------------------------

    def _ask(self) -> None:
        waits = dict.fromkeys(self.loads, 0)
        for spec in self.waiting.values():
            waits[spec.tenant_id] += 1
        for tenant, load in self.loads.items():
            if not load.idle(self.step_number):
                for _ in range(load.depth - waits[tenant]):
                    self._submit(tenant, load)

    def _submit(self, tenant: str, load: Load) -> None:
        self.numbers += 1
        output = self.rng.randint(*load.output)
        self.outputs[self.numbers] = output
        spec = PlaceSpec(
            request_id=f"req_{self.numbers}",
            choice=0,
            tenant_id=tenant,
            priority=Priority.STANDARD,
            model="tiny",
            version_digest=DIGEST,
            route_revision=1,
            prompt_tokens=self.rng.randint(*load.prompt),
            max_output_tokens=output if self.exact else 4 * load.output[1],
            arrival_unix_us=round(self.now_s * 1e6),
            queue_ttl_s=3000.0,
            ticket=b"t",
            tenant_weight=load.weight,
        )
        self.waiting[self.numbers] = spec
        self.queue.submit(1, self.numbers, spec, spec.arrival_unix_us, self.now_s)

    def _start(self) -> None:
        for _, outcome in self.queue.take_outcomes():
            spec = self.waiting.pop(outcome.placement_id)
            assert isinstance(outcome, Granted), f"refused: {outcome}"
            grant, output = outcome.grant, self.outputs.pop(outcome.placement_id)
            self.granted[spec.tenant_id] += self.cost(spec.prompt_tokens, output)
            self.starts[spec.tenant_id].append(self.step_number)
            worker = next(found for found in self.workers if found.worker_id == grant.worker_id)
            running = Running(spec, grant, output, spec.prompt_tokens)
            worker.starting.append((self.step_number + self.start_delay, running))

    @staticmethod
    def cost(prompt_tokens: int, output_tokens: int) -> float:
        return WEIGHTS.cost(prompt_tokens, output_tokens)

    # --- workers ----------------------------------------------------------------------------------

    def _compute(self, worker: FairWorker) -> None:
        due = [found for at, found in worker.starting if at <= self.step_number]
        worker.starting = [found for found in worker.starting if found[0] > self.step_number]
        for found in due:
            worker.running.append(found)
            if found.grant.epoch == self.epoch:
                worker.seen.append(found.grant.sequence)
        for found in list(worker.running):
            tenant = found.spec.tenant_id
            tokens = worker.tokens.setdefault(tenant, [0, 0])
            if found.prompt_left > CHUNK:
                found.prompt_left -= CHUNK
                continue
            if found.prompt_left:
                found.prompt_left = 0
                tokens[0] += found.spec.prompt_tokens
                self.produced[tenant] += self.cost(found.spec.prompt_tokens, 0)
            found.produced += 1
            tokens[1] += 1
            self.produced[tenant] += self.cost(0, 1)
            if found.produced == found.output:
                worker.running.remove(found)
                self._end(worker, found)

    def _end(self, worker: FairWorker, found: Running) -> None:
        spec = found.spec
        worker.ended.append(
            SequenceUsage(
                spec.request_id, 0, spec.tenant_id, DIGEST, spec.prompt_tokens, found.produced, ended=True
            )
        )

    def _report(self, worker: FairWorker) -> None:
        reserved = sum(found.grant.kv_blocks for found in worker.running)
        pool = PoolSnapshot(
            DIGEST, worker.kv_blocks, reserved, BLOCK, len(worker.running), 0, worker.slots, 1 << 20
        )
        tenants = tuple(
            TenantTokens(name, DIGEST, used[0], used[1]) for name, used in worker.tokens.items() if any(used)
        )
        snapshot = ReportSnapshot(
            worker.worker_id,
            1,
            "h:1",
            pools=(pool,),
            epoch=self.epoch,
            grants_seen=tuple(worker.seen),
            tenants=tenants,
            usage=tuple(worker.ended),
            counters=() if worker.connected else tuple(worker.counters.values()),
        )
        worker.connected, worker.seen, worker.tokens, worker.ended = True, [], {}, []
        changed = self.fleet.apply(int(worker.worker_id[1:]) + 1, snapshot, self.now_s)
        for counter in self.queue.reported(snapshot):
            worker.counters[counter.tenant] = counter
        self.queue.touch(changed)

    # --- what must hold ---------------------------------------------------------------------------

    def bounds(self) -> tuple[float, float]:
        """Return the bounds of what is granted, and of what is produced, in any interval."""
        largest = max(self.cost(load.prompt[1], load.output[1]) for load in self.loads.values())
        in_flight = largest * sum(worker.slots for worker in self.workers)
        window = self.order.window_tokens(len(self.workers))
        weight = min(load.weight for load in self.loads.values())
        estimate = 0.0 if self.exact and not self.failovers else in_flight
        granted = granted_bound(
            sequence_tokens=largest,
            estimate_tokens=estimate,
            window_tokens=window,
            weight=weight,
            in_flight_tokens=in_flight,
        )
        produced = service_bound(
            sequence_tokens=largest,
            in_flight_tokens=in_flight,
            estimate_tokens=estimate,
            window_tokens=window,
            weight=weight,
            unreported_tokens=in_flight if self.failovers else 0.0,
            failovers=self.failovers,
        )
        loss = self.failovers * in_flight / weight
        return 2.0 * granted + loss, produced

    def _check(self) -> None:
        waits = {spec.tenant_id for spec in self.waiting.values()}
        present = sorted(waits)
        pairs = [(left, right) for left in present for right in present if left < right]
        self._pairs = {key: found for key, found in self._pairs.items() if waits.issuperset(key)}
        most_granted, most_produced = self.bounds()
        for left, right in pairs:
            granted = self._apart(self.granted, left, right)
            produced = self._apart(self.produced, left, right)
            if (left, right) not in self._pairs:
                self._pairs[left, right] = Pair.at(granted), Pair.at(produced)
                continue
            of_granted, of_produced = self._pairs[left, right]
            gap, got = of_granted.widen(granted), of_produced.widen(produced)
            self.widest = max(self.widest, gap / most_granted, got / most_produced)
            assert gap <= most_granted, (
                f"{left}, {right}: granted {gap:.0f} apart, {most_granted:.0f} allowed"
            )
            assert got <= most_produced, f"{left}, {right}: {got:.0f} apart, {most_produced:.0f} allowed"

    def _apart(self, of: dict[str, float], left: str, right: str) -> float:
        return of[left] / self.loads[left].weight - of[right] / self.loads[right].weight
