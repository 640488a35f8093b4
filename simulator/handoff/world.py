"""Replicas that do both, or prefill or decode and hand KV over, on the kernel's virtual clock.

Engines, planner and prefill budget are production code on a cost model. The model of a hand-off favours it: a
replica that prefills keeps no blocks for a lease, the first token reaches the client before KV moves, each
replica that prefills has a link of its own, and the replica that decodes takes KV when it has room, as blocks
of its prefix cache. So a map without a gain is no artefact of the model.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from random import Random
from typing import Final

from services.core.estimates.cost_model import CostModel
from services.core.estimates.sketch import Sketch
from services.core.generation import OutputLimits, Prompt, Sampling
from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.worker.engine_protocol import Stepped, Submit
from simulator.engine.sim_engine import SimEngine, SimEngineSpec
from simulator.kernel.loop import VirtualTimeLoop
from simulator.lab.load.arrivals import Poisson
from simulator.lab.load.lengths import Lengths
from simulator.lab.report.measure import Slo

WARM_UP_RATIO: Final = 0.2  # share of the requests that are not counted, at the start
GOOD_RATIO: Final = 0.9  # share of the requests that meet both objectives at a rate that is served


@dataclass(frozen=True, slots=True)
class Link:
    """What moves KV. ``delay_s``: from the end of a prefill to the first byte."""

    bytes_per_s: float
    delay_s: float = 0.002


@dataclass(frozen=True, slots=True)
class HandoffSpec:
    """One run. ``prefill_replicas`` 0: each replica does both."""

    cost: CostModel
    rate_per_s: float  # requests, over all replicas
    prompt: Lengths
    output: Lengths
    slo: Slo
    replicas: int = 8
    prefill_replicas: int = 0
    # A step that prefills beside decodes may take this many times the objective of a token.
    pace_ratio: float = 1.0
    link: Link = Link(50e9)
    requests: int = 1000
    seed: int = 0


@dataclass(slots=True)
class HandoffOutcome:
    """What the counted requests of a run observed. ``ended`` false: too many missed to go on."""

    counted: int = 0
    good: int = 0
    handed_over: int = 0
    lost_tokens: int = 0  # tokens handed over and evicted before their sequence started
    ended: bool = True
    ttft: Sketch = field(default_factory=Sketch)
    itl: Sketch = field(default_factory=Sketch)

    @property
    def good_ratio(self) -> float:
        return self.good / self.counted if self.ended and self.counted else 0.0


@dataclass(slots=True)
class _Request:
    number: int
    prompt: Prompt
    output_tokens: int
    arrived_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0

    def submit(self, produced: int, most: int) -> Submit:
        limits = OutputLimits(max_tokens=most)
        return Submit(
            self.number, self.prompt, Sampling(self.number), limits, most, produced_ids=[0] * produced
        )


@dataclass(slots=True)
class _Replica:
    engine: SimEngine
    prompt_tokens: int = 0  # prompts of the requests that it has
    arriving: deque[_Request] = field(default_factory=deque)  # prefilled elsewhere, first in, first out
    taken: dict[int, int] = field(default_factory=dict)  # blocks of those that arrived and have not started
    link_free_s: float = 0.0


class HandoffWorld:
    """Runs one spec. A request goes to the replica of its kind with the fewest prompt tokens."""

    def __init__(self, spec: HandoffSpec) -> None:
        self._spec = spec
        self._rng = Random(spec.seed)
        self._loop = VirtualTimeLoop()
        self._live: dict[int, _Request] = {}
        self._sent = self._ended = 0
        self._warm = int(spec.requests * WARM_UP_RATIO)
        # Misses of which no rest of the run can make a rate that is served.
        self._most_missed = (1.0 - GOOD_RATIO) * (spec.requests - self._warm)
        first = spec.prefill_replicas
        self._first = [self._replica(decodes=not first) for _ in range(first or spec.replicas)]
        self._second = [self._replica(decodes=True) for _ in range(spec.replicas - first if first else 0)]
        self.outcome = HandoffOutcome()

    def run(self) -> HandoffOutcome:
        """Return the outcome once all requests have ended, or too many have missed."""
        with self._loop as loop:
            for replica in (*self._first, *self._second):
                replica.engine.start()
            times = islice(
                Poisson(self._spec.rate_per_s).times(Random(self._spec.seed + 1)), self._spec.requests
            )
            loop.at(next(times), self._arrive, times)
            loop.run_forever()
        return self.outcome

    def _replica(self, *, decodes: bool) -> _Replica:
        spec, found = self._spec, list[_Replica]()
        pace_s = spec.slo.tpot_s * spec.pace_ratio if decodes else 0.0
        engine = SimEngine(
            SimEngineSpec(spec.cost, itl_target_s=pace_s, prefix_cache=spec.prefill_replicas > 0),
            clock=_LoopClock(self._loop),
            call_at=self._loop.at,
            report=lambda _: None,
            observe=lambda ends_s, event: self._stepped(found[0], ends_s, event),
        )
        found.append(_Replica(engine))
        return found[0]

    def _arrive(self, times: islice[float]) -> None:
        spec, number = self._spec, self._sent
        self._sent += 1
        length = spec.prompt.draw(self._rng)
        blocks = range(number << 16, (number << 16) + length // PREFIX_BLOCK_TOKENS)
        names = tuple(block + 2 for block in blocks) if spec.prefill_replicas else ()
        root = 1 if spec.prefill_replicas else 0
        request = _Request(
            number, Prompt(range(length), names, root), spec.output.draw(self._rng), self._loop.now_s
        )
        self._live[number] = request
        replica = min(self._first, key=lambda each: each.prompt_tokens)
        replica.prompt_tokens += length
        replica.engine.send(request.submit(0, 1 if self._second else request.output_tokens))
        if (following := next(times, None)) is not None:
            self._loop.at(following, self._arrive, times)

    def _stepped(self, replica: _Replica, ends_s: list[float], event: Stepped) -> None:
        steps = len(ends_s)
        share = len(event.handles) // steps
        for step, end_s in enumerate(ends_s):
            gaps = Counter(
                self._token(handle, end_s) for handle in event.handles[step * share : (step + 1) * share]
            )
            for gap_s, count in gaps.items():
                if gap_s > 0.0:
                    self.outcome.itl.add(gap_s, count)
        for handle, cached in event.cached.items():
            if replica.taken.pop(handle, None) is not None:
                names = self._live[handle].prompt.prefix_hashes
                self.outcome.lost_tokens += len(names) * PREFIX_BLOCK_TOKENS - cached
        for handle in event.finished:
            self._finished(replica, self._live[handle])
        self._pull(replica)

    def _token(self, handle: int, end_s: float) -> float:
        """Note a token; return the gap before it, 0 where none counts."""
        request = self._live[handle]
        last_s, request.last_s = request.last_s, end_s
        request.tokens += 1
        if request.tokens == 1:
            request.first_s = end_s
            return 0.0
        return end_s - last_s if handle >= self._warm else 0.0

    def _finished(self, replica: _Replica, request: _Request) -> None:
        replica.prompt_tokens -= len(request.prompt.ids)
        if request.tokens < request.output_tokens:
            self._hand_over(replica, request)
            return
        del self._live[request.number]
        self._ended += 1
        outcome, slo = self.outcome, self._spec.slo
        if request.number >= self._warm:
            ttft_s = request.first_s - request.arrived_s
            late = ttft_s > slo.ttft_s
            slow = request.last_s - request.first_s > slo.tpot_s * (request.tokens - 1)
            outcome.counted += 1
            outcome.good += not (late or slow)
            outcome.ttft.add(ttft_s)
        outcome.ended = outcome.counted - outcome.good <= self._most_missed
        if self._ended == self._spec.requests or not outcome.ended:
            self._loop.stop()

    # --- the hand-off -----------------------------------------------------------------------------------

    def _hand_over(self, source: _Replica, request: _Request) -> None:
        target = min(self._second, key=lambda each: each.prompt_tokens)
        target.prompt_tokens += len(request.prompt.ids)
        size = len(request.prompt.prefix_hashes) * PREFIX_BLOCK_TOKENS * self._spec.cost.kv_bytes_per_token
        link, now_s = self._spec.link, self._loop.now_s
        began_s = max(now_s + link.delay_s, source.link_free_s)
        source.link_free_s = began_s + size / link.bytes_per_s
        self._loop.at(source.link_free_s, partial(self._arrived, target, request))

    def _arrived(self, target: _Replica, request: _Request) -> None:
        target.arriving.append(request)
        self._pull(target)

    def _pull(self, target: _Replica) -> None:
        """Take what has arrived, as far as there is room, with a block for each sequence that grows."""
        pool, arriving, taken = target.engine.pool, target.arriving, target.taken
        while arriving:
            request = arriving[0]
            blocks = pool.blocks_for(len(request.prompt.ids) + 1)
            short = sum(taken.values()) + blocks + target.engine.spec.max_sequences > pool.blocks_free
            if short and (taken or pool.blocks_used):
                return
            arriving.popleft()
            pool.receive(request.prompt.prefix_hashes)
            taken[request.number] = blocks
            self.outcome.handed_over += 1
            target.engine.send(request.submit(1, request.output_tokens))


class _LoopClock:
    """Implements ``Clock`` on the loop's time."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def monotonic_s(self) -> float:
        return self._loop.now_s

    def unix_s(self) -> float:
        return self._loop.now_s

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError("an engine sets timers")
