"""Charges of step time: those of a step by step account, whole in sum, and settled once for each sequence."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.generation import OutputLimits, Sampling
from services.worker.engine.execute.executor import Batch, Inline, PrefillChunk
from services.worker.engine.load.loading import load
from services.worker.engine.sequence import SequenceState
from services.worker.engine.step_meter import REPORT_S, StepMeter
from services.worker.engine_protocol import Cancel, Credit, EngineConfig, Park, Stepped, Submit
from services.worker.policy.device_share import MeasuredCosts, StepCosts, StepWork, attended_before, prices
from tests.support.run_ahead import RunsAhead
from tests.support.submits import make_submit
from tests.unit.worker.engine.speculation.test_speculative_step import speculating

EXAMPLES = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SCORED = 6  # the sequence whose prompt is scored
COSTS = StepCosts(1e-3, 1e-4, 1e-5, 2e-4, 1e-6, 3e-4)


def sequence(handle: int) -> SequenceState:
    prompt = [0] * (10 * (handle + 1))
    sampling = Sampling(seed=1, prompt_logprobs=0 if handle == SCORED else None)
    return SequenceState(
        handle, prompt, len(prompt), sampling, OutputLimits(1000), frozenset(), 0, (0, handle), 1000
    )


class FixedCosts(MeasuredCosts):
    """Costs that no sample changes."""

    def add(self, work: StepWork, step_s: float, steps: int = 1) -> None: ...


@dataclass
class Account:
    """A meter beside an account that charges each sequence in each step."""

    meter: StepMeter = field(default_factory=lambda: StepMeter(FixedCosts(COSTS)))
    expected: dict[int, float] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=dict)
    settled: list[int] = field(default_factory=list)

    def step(self, batch: Batch, step_s: float) -> None:
        decodes = [
            (each.handle, 1 + len(batch.proposals.get(index, ())), len(each.tokens))
            for index, each in enumerate(batch.decodes)
        ]
        attended = sum(length for _, _, length in decodes)
        members = self.meter.launched(batch, attended)
        work = StepWork(
            len(decodes) + len(batch.prefills),
            sum(rows for _, rows, _ in decodes),
            attended,
            batch.prefill_tokens,
            sum(attended_before(chunk.start, chunk.end) for chunk in batch.prefills),
            sum(len(chunk.scored) for chunk in batch.prefills),
        )
        price = prices(COSTS, work, step_s)
        for handle, rows, length in decodes:
            self._expect(handle, price.decode(rows, length))
        for chunk in batch.prefills:
            self._expect(chunk.sequence.handle, price.chunk(chunk.start, chunk.end, len(chunk.scored)))
        for index, each in enumerate(batch.decodes):
            each.tokens += [0] * (1 + len(batch.proposals.get(index, ())) // 2)
        for chunk in batch.prefills:  # its entries are taken before the step is charged
            chunk.sequence.scored = chunk.end + 1
        self.meter.ended(members, step_s)
        self.take()

    def take(self) -> None:
        charged, settled = self.meter.report((), airborne=False)
        self.found |= charged
        self.settled += settled

    def _expect(self, handle: int, share_s: float) -> None:
        self.expected[handle] = self.expected.get(handle, 0.0) + share_s


# Of each step: the decodes that are present, the sequence that prefills, and the tokens proposed.
steps = st.lists(
    st.tuples(st.sets(st.integers(0, 4)), st.none() | st.integers(5, 7), st.integers(0, 4)),
    min_size=1,
    max_size=20,
)


def played(drawn: list[tuple[set[int], int | None, int]], step_s: float) -> Account:
    account, sequences = Account(), [sequence(handle) for handle in range(8)]
    for present, prefilled, proposed in drawn:
        for _ in range(2):  # so that runs of equal steps occur
            decodes = [sequences[handle] for handle in sorted(present)]
            chunks = [] if prefilled is None else [PrefillChunk(sequences[prefilled], 4, 4 + 2 * prefilled)]
            proposals = {0: [0] * proposed} if decodes and proposed > 2 else {}
            if decodes or chunks:
                account.step(Batch(decodes, chunks, proposals), step_s)
    for handle in range(8):
        account.meter.end(handle)
    account.take()
    assert account.settled == list(range(8))
    return account


@EXAMPLES
@given(steps)
def test_charges_are_those_of_an_account_by_step(drawn: list[tuple[set[int], int | None, int]]) -> None:
    account = played(drawn, 2 * REPORT_S)
    for handle, expected_s in account.expected.items():
        assert account.found[handle] == pytest.approx(expected_s * 1e6, abs=0.51)


@EXAMPLES
@given(steps)
def test_a_run_of_steps_is_charged_with_its_mean_lengths(
    drawn: list[tuple[set[int], int | None, int]],
) -> None:
    account = played(drawn, REPORT_S / 20)
    assert sum(account.found.values()) == pytest.approx(sum(account.expected.values()) * 1e6, abs=4.0)
    for handle, expected_s in account.expected.items():
        assert account.found[handle] == pytest.approx(expected_s * 1e6, rel=0.01, abs=1.0)


def test_a_steady_run_reports_now_and_then() -> None:
    account, decodes = Account(), [sequence(0), sequence(1)]
    reports = 0
    for _ in range(1000):
        before, account.found = account.found, {}
        account.step(Batch(decodes, []), REPORT_S / 10)
        reports += bool(account.found)
        account.found = {**before, **account.found}
    assert 90 <= reports <= 100
    assert sum(account.found.values()) == pytest.approx(100 * REPORT_S * 1e6, abs=REPORT_S * 1e6)


# --- the engine ------------------------------------------------------------------------------------------


class Ticks:
    """A clock that goes on by an irregular interval at each reading."""

    def __init__(self) -> None:
        self._rng, self._now_s = random.Random(5), 0.0

    def __call__(self) -> float:
        self._now_s += self._rng.uniform(1e-4, 3e-2)
        return self._now_s


@dataclass
class Charged:
    """What an engine's events say: charges by handle, and the time of the steps that computed anything."""

    device_us: dict[int, int] = field(default_factory=dict)
    settled: list[int] = field(default_factory=list)
    computing_s: float = 0.0
    prefill_s: float = 0.0

    def note(self, event: Stepped) -> None:
        for handle, total_us in event.device_us.items():
            assert handle not in self.settled, "charged after it was settled"
            assert total_us >= self.device_us.get(handle, 0), "a charge was taken back"
        assert event.device_us.keys() >= set(event.settled)
        self.device_us |= event.device_us
        self.settled += event.settled
        if event.prefill_tokens or event.attended_tokens:
            self.computing_s += event.step_s
            self.prefill_s += event.prefill_s
        else:
            assert not event.prefill_s


# When it comes, prompt, output, stop token, credit per step, and when it is cancelled and parked.
asked = st.tuples(
    st.integers(0, 8),
    st.integers(1, 20),
    st.integers(1, 12),
    st.none() | st.integers(0, 96),
    st.sampled_from((0, 0, 1, 3)),
    st.none() | st.integers(0, 20),
    st.none() | st.integers(0, 20),
)
Asked = tuple[int, int, int, int | None, int, int | None, int | None]


def charged_by(bench: Any, submit: Callable[..., Submit], requests: list[Asked]) -> Charged:
    """Run the requests to their ends; return what was charged."""
    found, ended = Charged(), set[int]()
    for step in itertools.count():
        assert step < 2000, "the engine does not come to an end"
        for number, (begin, prompt, output, stop, credit, cancelled, parked) in enumerate(requests):
            if begin == step:
                stops = () if stop is None else (stop,)
                bench.engine.apply(
                    submit(number, [3] * prompt, output, credit=credit or 1 << 30, stop_token_ids=stops)
                )
            if cancelled == step:
                bench.engine.apply(Cancel([number]))
                if begin <= step:
                    ended.add(number)
            if parked == step:
                bench.engine.apply(Park([number]))
            if credit or parked is not None:
                bench.engine.apply(Credit([number], [len(bench.tokens.get(number, [])) + (credit or 3)]))
        if bench.engine.has_work:
            event = bench.step()
            found.note(event)
            ended |= event.finished.keys()
        elif step > 24:
            break
    assert sorted(found.settled) == sorted(ended), "a sequence is not settled, or twice"
    assert ended >= {number for number, request in enumerate(requests) if request[5] is None}
    return found


@EXAMPLES
@given(
    requests=st.lists(asked, min_size=1, max_size=6),
    blocks=st.sampled_from((8, 10, 16, 64)),
    places=st.integers(1, 4),
    how=st.sampled_from(("inline", "ahead", "speculating")),
)
def test_every_step_is_charged_to_those_in_it(
    make_bench: Callable[..., Any],
    submit: Callable[..., Submit],
    requests: list[Asked],
    blocks: int,
    places: int,
    how: str,
) -> None:
    shape = {"blocks": blocks, "max_sequences": places, "max_model_len": 32}
    if how == "speculating":
        bench = speculating(make_bench, wrong=0.3, **shape)
    else:
        bench = make_bench(**shape, clock=Ticks(), launch=RunsAhead if how == "ahead" else Inline)
    found = charged_by(bench, submit, requests)
    assert sum(found.device_us.values()) == pytest.approx(found.computing_s * 1e6, abs=len(requests))
    assert found.prefill_s <= found.computing_s + 1e-9


def test_a_sequence_that_stopped_pays_for_the_row_behind_it(make_bench: Any, submit: Any) -> None:
    """Nobody else is in that step."""
    bench = make_bench(launch=RunsAhead, clock=Ticks())
    bench.executor.token_of = lambda handle, position: 50 + position
    bench.engine.apply(submit(0, [1, 2, 3], 10, stop_token_ids=(52,)))
    found = Charged()
    finished_first = 0
    while bench.engine.has_work:
        event = bench.step()
        found.note(event)
        finished_first += bool(event.finished) and not event.settled
    assert finished_first == 1
    assert found.device_us[0] == pytest.approx(found.computing_s * 1e6, abs=1)


def test_a_real_model_charges_what_its_steps_took(save_model: Any) -> None:
    _, folder = save_model("Llama")
    config = EngineConfig("", str(folder), threads=1, token_budget=64, max_sequences=8)
    engine, _ = load(config, lambda *_: None)
    found = Charged()
    steps_s = 0.0
    for handle in range(6):
        prompt = [5] * (90 if handle == 0 else 4)
        engine.apply(make_submit(handle, prompt, 1000, max_tokens=24, seed=handle, ignore_eos=True))
    while engine.has_work:
        event = engine.step()
        steps_s += event.step_s
        found.note(event)
    assert sorted(found.settled) == list(range(6))
    assert 0.99 * steps_s <= sum(found.device_us.values()) / 1e6 <= steps_s + 1e-5
    others = [found.device_us[handle] for handle in range(1, 6)]
    assert found.device_us[0] > max(others)
