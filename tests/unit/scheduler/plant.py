"""Workers with a known throughput around one scheduler term, on a clock of the test's: no wire, no tasks.

A worker runs up to ``slots`` sequences, each at an equal share of its tokens per second, and reports four
times a second what it did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from services.core.errors import FairwayError
from services.core.fleet import Granted, PoolSnapshot, ReportSnapshot, SequenceUsage, TenantTokens
from services.core.generation import PlaceSpec
from services.core.records import Priority
from services.scheduler.term import Term, TermSettings
from services.scheduler.term_streams import Report, SubmitPlacements
from tests.unit.scheduler.model import BLOCK, DIGEST, ManualClock, place_spec

TICK_S = 0.05
REPORT_S = 0.25
BLOCKS = 4096


@dataclass
class Asked:
    """One placement and what became of it."""

    spec: PlaceSpec
    at_s: float
    granted_s: float | None = None
    refused_s: float | None = None
    error: FairwayError | None = None
    worker_id: str = ""

    @property
    def wait_s(self) -> float:
        assert self.granted_s is not None
        return self.granted_s - self.at_s


@dataclass
class Running:
    spec: PlaceSpec
    blocks: int
    left: float


@dataclass
class Machine:
    """``slowness``: how many times longer its steps take than those of others."""

    worker_id: str
    rate: float
    slots: int
    slowness: float = 1.0
    running: list[Running] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    done: dict[str, float] = field(default_factory=dict)
    ended: list[SequenceUsage] = field(default_factory=list)
    granted: int = 0
    itl_target_s: float = 0.0
    steps: float = 0.0
    seconds: float = 0.0
    decoded: float = 0.0

    def work(self, seconds: float) -> None:
        if not self.running:
            return
        share = self.rate / self.slowness * seconds / len(self.running)
        self.steps += seconds / (0.01 * self.slowness)
        self.seconds += seconds
        for one in self.running:
            worked = min(share, one.left)
            one.left -= worked
            self.decoded += worked
            self.done[one.spec.tenant_id] = self.done.get(one.spec.tenant_id, 0.0) + worked
        for one in [one for one in self.running if one.left <= 1e-6]:
            self.running.remove(one)
            spec = one.spec
            self.ended.append(
                SequenceUsage(
                    spec.request_id,
                    spec.choice,
                    spec.tenant_id,
                    DIGEST,
                    spec.prompt_tokens,
                    spec.max_output_tokens,
                    ended=True,
                )
            )

    def report(self, epoch: int) -> ReportSnapshot:
        seen, self.seen = tuple(self.seen), []
        done, self.done = self.done, {}
        ended, self.ended = tuple(self.ended), []
        pool = PoolSnapshot(
            DIGEST,
            BLOCKS,
            sum(one.blocks for one in self.running),
            BLOCK,
            len(self.running),
            0,
            self.slots,
            BLOCKS * BLOCK,
            steps=int(self.steps),
            step_seconds=self.seconds,
            decode_tokens=int(self.decoded),
            itl_target_s=self.itl_target_s,
        )
        tokens = tuple(TenantTokens(tenant, DIGEST, 0, round(count)) for tenant, count in done.items())
        return ReportSnapshot(
            self.worker_id,
            1,
            "h:1",
            pools=(pool,),
            epoch=epoch,
            grants_seen=seen,
            tenants=tokens,
            usage=ended,
            device_type="gpu",
        )


class Plant:
    def __init__(
        self, workers: int, *, rate: float = 1000.0, slots: int = 8, settings: TermSettings | None = None
    ) -> None:
        self.clock = ManualClock()
        self.term = Term(1, settings or TermSettings(), self.clock, Random(7))
        self.machines = {f"w{n}": Machine(f"w{n}", rate, slots) for n in range(workers)}
        self.session = self.term.streams.open_session("gateway", lambda: None)
        self.reporters = {name: self.term.streams.open_reporter(lambda: None) for name in self.machines}
        self.reports = dict.fromkeys(self.machines, 0)
        self.asked: dict[int, Asked] = {}
        self.on_refused: Callable[[Asked], None] = lambda _asked: None
        self.number = 0
        self._report_s = 0.0
        self.run(REPORT_S)

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def ask(
        self,
        priority: Priority = Priority.STANDARD,
        *,
        tenant: str = "acme",
        prompt: int = 50,
        output: int = 50,
        **more: object,
    ) -> Asked:
        """Submit one placement now; it is decided in the next tick."""
        self.number += 1
        spec = place_spec(
            prompt_tokens=prompt,
            max_output_tokens=output,
            priority=priority,
            arrival_s=self.now_s,
            queue_ttl_s=30.0,
            tenant=tenant,
        )
        spec = replace(spec, request_id=f"r{self.number}", **more)  # type: ignore[arg-type]
        asked = self.asked[self.number] = Asked(spec, self.now_s)
        self.term.streams.send(SubmitPlacements(self.session, [(self.number, spec, round(self.now_s * 1e6))]))
        return asked

    def run(self, seconds: float, each_tick: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock.now_s += TICK_S
            each_tick()
            for machine in self.machines.values():
                machine.work(TICK_S)
            if self.now_s >= self._report_s:
                self._report_s = self.now_s + REPORT_S
                for name, machine in self.machines.items():
                    self.reports[name] += 1
                    self.term.streams.send(
                        Report(self.reporters[name], self.reports[name], machine.report(1))
                    )
            self.term.step()
            self._take()
        self.term.check_integrity()

    def _take(self) -> None:
        outcomes, self.session.outbox = self.session.outbox, []
        for outcome in outcomes:
            asked = self.asked[outcome.placement_id]
            assert asked.granted_s is None, "ended twice"
            assert asked.refused_s is None, "ended twice"
            if isinstance(outcome, Granted):
                asked.granted_s, asked.worker_id = self.now_s, outcome.grant.worker_id
                machine = self.machines[outcome.grant.worker_id]
                tokens = asked.spec.prompt_tokens + asked.spec.max_output_tokens
                machine.seen.append(outcome.grant.sequence)
                machine.granted += 1
                machine.running.append(Running(asked.spec, outcome.grant.kv_blocks, tokens))
            else:
                asked.refused_s, asked.error = self.now_s, outcome.error
                self.on_refused(asked)
