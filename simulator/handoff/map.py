"""Where prefill and decode apart serve more than replicas that do both.

    python -m simulator handoff [--preset h100] [--profiles 2048:256 8192:256]

Goodput is the highest rate at which nine of ten requests meet both objectives, of the best split, and of the
best pace where both are done. The objective of the time per output token is a multiple of the shortest step;
that of the first token is half a second and three times the median prompt alone. A hand-off pays where it
serves ``PAYS_RATIO`` times as much. Prints a line per point, and ``RESULT {json}`` last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from services.core.estimates.cost_model import CostModel
from simulator.engine.cost_model import cost_model
from simulator.handoff.world import GOOD_RATIO, HandoffOutcome, HandoffSpec, HandoffWorld, Link
from simulator.lab.load.lengths import LogNormal
from simulator.lab.report.measure import Slo

# Medians of prompt and output, in tokens.
PROFILES: Final = ((512, 256), (2048, 64), (2048, 256), (8192, 64), (8192, 256), (32_768, 256))
SIGMA: Final = 0.5  # standard deviation of the logarithm of each length
STEP_RATIOS: Final = (1.5, 2.5, 5.0)  # time per output token that is the objective, by the shortest step
LINKS: Final = {"400 Gb/s": 50e9, "100 Gb/s": 12.5e9}  # bytes per second of each link
REPLICAS: Final = 8
NEVER: Final = 99.0  # gain where replicas that do both serve nothing
GROWTH: Final = 1.15  # factor between rates, until one is served and the next is not
HALVINGS: Final = 2  # halvings of the interval between those two rates
SPAN_S, SPAN_OUTPUTS = 10.0, 2.5  # least traffic of a run, in seconds and in outputs
LEAST_REQUESTS: Final = 300
PAYS_RATIO: Final = 1.2  # gain in goodput below which the second kind of failure is not worth it
PACE_RATIOS: Final = (1.0, 2.0, 4.0)  # the best of which counts where both are done
LOAD_RATIO: Final = 0.7  # load at which latencies are compared, by the goodput of replicas that do both


def point(cost: CostModel, prompt: int, output: int, step_ratio: float) -> HandoffSpec:
    """Return a point of the map, each replica doing both, without a rate."""
    slo = Slo(0.5 + 3.0 * cost.prefill_s(prompt), step_ratio * (cost.base_s + cost.weight_read_s))
    lengths = LogNormal(prompt, SIGMA, 16, 4 * prompt), LogNormal(output, SIGMA, 2, 4 * output)
    return HandoffSpec(cost, 1.0, *lengths, slo, replicas=REPLICAS)


@dataclass(frozen=True, slots=True)
class Search:
    """Finds goodputs, with at most so many requests in a run."""

    prompt: int
    output: int
    most_requests: int

    def run(self, spec: HandoffSpec, rate_per_s: float) -> HandoffOutcome:
        """Return the outcome at a rate."""
        span_s = max(SPAN_S, SPAN_OUTPUTS * self.output * spec.slo.tpot_s)
        requests = min(self.most_requests, max(LEAST_REQUESTS, round(rate_per_s * span_s)))
        return HandoffWorld(replace(spec, rate_per_s=rate_per_s, requests=requests)).run()

    def goodput(self, spec: HandoffSpec, least_per_s: float = 0.0) -> float:
        """Return the highest rate that is served, within 4 %; 0 if it is not above ``least_per_s``."""
        low = high = least_per_s * 1.02 or self._expected_per_s(spec)
        if self._serves(spec, low):
            most_per_s = spec.replicas / (self.prompt * spec.cost.prefill_token_s)
            while (high := low * GROWTH) < most_per_s and self._serves(spec, high):
                low = high
        elif least_per_s:
            return 0.0
        else:
            while not self._serves(spec, low := high / GROWTH):
                high = low
                if low * spec.cost.prefill_s(self.prompt) < 1e-3:
                    return 0.0  # the objective is out of reach
        for _ in range(HALVINGS):
            rate_per_s = (low + high) / 2
            low, high = (rate_per_s, high) if self._serves(spec, rate_per_s) else (low, rate_per_s)
        return low

    def best_pace(self, spec: HandoffSpec) -> tuple[float, HandoffSpec]:
        """Return the highest goodput of replicas that do both, and how they are paced for it."""
        best, found = 0.0, spec
        for pace_ratio in PACE_RATIOS:
            paced = replace(spec, pace_ratio=pace_ratio)
            if (rate_per_s := self.goodput(paced, best)) > best:
                best, found = rate_per_s, paced
        return best, found

    def best_split(self, spec: HandoffSpec) -> tuple[float, int]:
        """Return the highest goodput with a hand-off, and how many replicas prefill: goodput has one peak."""
        prefill_s, decode_s = self._needs_s(spec)
        first = round(spec.replicas * prefill_s / (prefill_s + decode_s))
        best, split = 0.0, min(max(1, first), spec.replicas - 1)
        for way in (1, -1):
            count = split if way == 1 else split - 1
            while 1 <= count < spec.replicas:
                found = self.goodput(replace(spec, prefill_replicas=count), best)
                if found <= best:
                    break
                best, split, count = found, count, count + way
        return best, split

    def _serves(self, spec: HandoffSpec, rate_per_s: float) -> bool:
        return self.run(spec, rate_per_s).good_ratio >= GOOD_RATIO

    def _expected_per_s(self, spec: HandoffSpec) -> float:
        """Return a rate near the goodput."""
        return 0.8 * spec.replicas / sum(self._needs_s(spec))

    def _needs_s(self, spec: HandoffSpec) -> tuple[float, float]:
        """Return what prompt and output take of a replica with steps of the objective's length."""
        cost, tpot_s = spec.cost, spec.slo.tpot_s
        row_s = cost.attended_token_s * (self.prompt + self.output / 2) + cost.decode_sequence_s
        rows = max(1.0, min(256.0, (tpot_s - cost.base_s - cost.weight_read_s) / max(1e-9, row_s)))
        return cost.prefill_s(self.prompt), self.output * tpot_s / rows


def profile(text: str) -> tuple[int, int]:
    """Return the medians in PROMPT:OUTPUT. Raises ValueError."""
    prompt, output = map(int, text.split(":"))
    if not (1 <= prompt <= 131_072 and 2 <= output <= 131_072):
        raise ValueError(f"{text}: 1 to 131072 tokens of prompt, 2 to 131072 of output")
    return prompt, output


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--preset", default="h100")
    parser.add_argument("--requests", type=int, default=2400, help="most in a run")
    parser.add_argument(
        "--profiles", nargs="+", type=profile, default=PROFILES, metavar="PROMPT:OUTPUT", help="medians"
    )
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS)
    parser.add_argument("--step-ratios", nargs="+", type=float, default=STEP_RATIOS)
    parser.add_argument(
        "--no-overlap", action="store_true", help="a step's prefill does not hide behind its weights"
    )
    options = parser.parse_args(arguments)
    try:
        cost = cost_model(options.preset)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.no_overlap:
        cost = replace(cost, base_s=cost.base_s + cost.weight_read_s, weight_read_s=0.0)
    ratios: dict[str, dict[str, float]] = {}
    for step_ratio, (prompt, output) in product(options.step_ratios, options.profiles):
        spec, search = point(cost, prompt, output, step_ratio), Search(prompt, output, options.requests)
        name = f"{prompt}:{output} within {spec.slo.tpot_s * 1e3:.0f} ms"
        ratios[name] = _compared(name, spec, search, options.links)
    pays = [name for name, found in ratios.items() if max(found.values()) >= PAYS_RATIO]
    print("RESULT", json.dumps({"pays": pays, "ratios": ratios}))
    return 0


def _compared(name: str, spec: HandoffSpec, search: Search, links: Sequence[str]) -> dict[str, float]:
    """Print a point; return the gain in goodput by link."""
    both_per_s, both = search.best_pace(spec)
    split, found = 0, dict[str, float]()
    for link in links:
        apart = replace(spec, link=Link(LINKS[link]))
        if not split:
            rate_per_s, split = search.best_split(apart)
        else:  # a slower link does not move the best split
            rate_per_s = search.goodput(replace(apart, prefill_replicas=split))
        found[link] = round(rate_per_s / both_per_s, 2) if both_per_s else NEVER
    print(f"{name}: both {both_per_s:.2f}/s, pace {both.pace_ratio:.0f}; apart, {split} prefill: {found}")
    for kind, each in (("both", both), ("apart", replace(spec, prefill_replicas=split))):
        outcome = search.run(each, LOAD_RATIO * both_per_s) if both_per_s else HandoffOutcome()
        p99_ms = [(sketch.quantile(0.99) or 0.0) * 1e3 for sketch in (outcome.ttft, outcome.itl)]
        print(
            f"  {kind} at {LOAD_RATIO:.0%}: p99 TTFT {p99_ms[0]:.0f} ms, ITL {p99_ms[1]:.0f} ms", flush=True
        )
    return found
