"""Arrivals of a day, with the lengths and the burstiness of recorded traces.

Three facts of the traces shape them. Lengths are log-normal. Gaps are gamma-distributed. The rate itself
wanders: over windows of 1 to 300 s, the variance of the Azure trace's counts grows with the window as that of
a rate whose logarithm is an Ornstein-Uhlenbeck process. On these lie a diurnal curve and spikes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from random import Random
from typing import Final

from services.core.estimates.cost_model import DEVICES, LLAMA_3_70B, PRESETS, CostModel, derive
from services.core.records import Priority
from simulator.lab.load.arrivals import Diurnal, Gamma
from simulator.lab.load.lengths import LogNormal
from simulator.lab.load.traces import read_trace

DAY_S: Final = 86_400.0
INTERACTIVE_SHARE: Final = 0.3  # shares of the mean rate; the rest is batch
STANDARD_SHARE: Final = 0.4


@dataclass(slots=True)
class DayRequest:
    """One request. ``produced`` counts tokens before a lost replica; ``due_s``: instant, for batch alone."""

    arrival_s: float
    priority: Priority
    prompt: int
    output: int
    due_s: float = math.inf
    produced: int = 0
    begun: bool = False  # whether its first token was sent

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Workload:
    """Traffic of a pool and the device of its replicas. Parameters without a comment are the traces'."""

    name: str
    trace: str  # name of the file that they were fitted to
    costs: CostModel
    rate_per_s: float  # mean over the day, all classes
    prompt: LogNormal  # tokens that no cache has
    output: LogNormal
    cv: float  # coefficient of variation of the gaps
    wander_sigma: float  # standard deviation of the rate's logarithm
    wander_s: float  # time constant of the rate's changes
    targets: dict[Priority, float]  # times to first token
    # Predicted wait from which a request is refused, by its target; a prefill follows.
    shed_ratio: float = 0.75
    max_sequences: int = 64  # of an engine
    swing_ratio: float = 0.6  # 4:1 between peak and night
    spikes: int = 4  # in a day
    spike_ratio: float = 10.0
    spike_s: float = 30.0
    job_lines: int = 5000
    job_due_s: float = 6 * 3600.0
    seed: int = 0
    phase_s: float = 0.0  # instant of the night's least rate
    duration_s: float = DAY_S
    rows: tuple[tuple[float, int, int], ...] = ()  # recorded (instant at a mean rate of 1, prompt, output)

    def requests(self) -> Iterator[DayRequest]:
        """Yield all requests in order of arrival."""
        return heapq.merge(self._urgent(), self._batch(), key=lambda one: one.arrival_s)

    def recorded(self, folder: Path) -> Workload:
        """Return it with the gaps and lengths of the recorded trace. Raises TraceError."""
        rows = list(read_trace(folder / self.trace))
        seen: set[int] = set()
        scale, found = len(rows) / rows[-1].arrival_s, []
        for row in rows:
            cached = sum(1 for _ in takewhile(seen.__contains__, row.blocks)) * row.block_tokens
            seen.update(row.blocks)
            fresh = min(max(1, row.prompt_tokens - cached), self.prompt.most_tokens)
            found.append((row.arrival_s * scale, fresh, row.output_tokens))
        return replace(self, rows=tuple(found), wander_sigma=0.0)

    def spike_starts(self) -> tuple[float, ...]:
        """Return when the spikes begin, ascending."""
        rng = Random(f"{self.seed}/spikes")
        drawn = (rng.uniform(0.0, self.duration_s) for _ in range(self.spikes))
        return tuple(sorted(drawn))

    def _urgent(self) -> Iterator[DayRequest]:
        rng = Random(f"{self.seed}/urgent")
        urgent = INTERACTIVE_SHARE + STANDARD_SHARE
        day = Diurnal(self.rate_per_s * urgent, self.swing_ratio, phase_s=self.phase_s)
        keep = math.exp(-1.0 / self.wander_s)
        step = self.wander_sigma * math.sqrt(1.0 - keep * keep)
        spikes, wander, passed = self.spike_starts(), 0.0, 0.0
        units = self._units(rng)
        due, prompt, output = next(units)
        before = 0.0
        for second in count():
            if second >= self.duration_s:
                return
            upto = day.cumulative(second + 1.0)
            rate = upto - before
            if any(start_s <= second < start_s + self.spike_s for start_s in spikes):
                rate *= self.spike_ratio
            else:
                rate *= math.exp(wander - self.wander_sigma**2 / 2)
            before, wander = upto, wander * keep + step * rng.gauss(0.0, 1.0)
            while due < passed + rate:
                interactive = rng.random() * urgent < INTERACTIVE_SHARE
                priority = Priority.INTERACTIVE if interactive else Priority.STANDARD
                at_s = second + (due - passed) / rate
                yield DayRequest(at_s, priority, prompt, output)
                due, prompt, output = next(units)
            passed += rate

    def _units(self, rng: Random) -> Iterator[tuple[float, int, int]]:
        """Yield requests of a mean rate of 1, as (instant, prompt, output)."""
        for turn in count() if self.rows else ():
            for at_s, prompt, output in self.rows:
                yield turn * len(self.rows) + at_s, prompt, output
        for at_s in Gamma(1.0, self.cv).times(Random(f"{self.seed}/gaps")):
            yield at_s, self.prompt.draw(rng), self.output.draw(rng)

    def _batch(self) -> Iterator[DayRequest]:
        rng = Random(f"{self.seed}/batch")
        share = 1.0 - INTERACTIVE_SHARE - STANDARD_SHARE
        now_s = 0.0
        while True:
            now_s += rng.expovariate(self.rate_per_s * share / self.job_lines)
            if now_s >= self.duration_s:
                return
            for _ in range(self.job_lines):
                prompt, output = self.prompt.draw(rng), self.output.draw(rng)
                yield DayRequest(now_s, Priority.BATCH, prompt, output, due_s=now_s + self.job_due_s)


_CHAT: Final = {Priority.INTERACTIVE: 2.0, Priority.STANDARD: 10.0}
AZURE: Final = Workload(
    name="azure",
    trace="azure_llm_2023_conv.csv",
    costs=derive("a100x4-70b", DEVICES["a100"], LLAMA_3_70B, devices=4),
    rate_per_s=18.0,
    prompt=LogNormal(760.0, 0.985, least_tokens=2, most_tokens=4200),
    output=LogNormal(151.0, 0.859, least_tokens=2, most_tokens=1000),
    cv=1.09,
    wander_sigma=0.22,
    wander_s=240.0,
    targets=_CHAT,
)
MOONCAKE: Final = Workload(
    name="mooncake",
    trace="mooncake_conversation.jsonl",
    costs=PRESETS["a100"],
    rate_per_s=6.0,
    prompt=LogNormal(2470.0, 1.72, least_tokens=1, most_tokens=32_768),
    output=LogNormal(208.0, 1.36, least_tokens=1, most_tokens=2000),
    cv=1.0,
    wander_sigma=0.08,
    wander_s=240.0,
    targets={Priority.INTERACTIVE: 10.0, Priority.STANDARD: 30.0},
)
