"""The fit of step times, what it makes of slow workers, and the prediction of the first token."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from random import Random

import pytest

from services.core.fleet import LONG_PROMPT_TOKENS, PoolSnapshot
from services.scheduler.policy.placement.candidate import CHUNK_TOKENS, delay_of_others_s, predict_ttft_s
from services.scheduler.policy.step_time import PRIOR, Measured, StepModel, StepTimes, WorkerKind

TRUE = StepModel(5e-3, 40e-6, 100e-6, 20e-9)
KIND = WorkerKind("h100", "d")


class Workers:
    """Report every second what random steps took."""

    def __init__(
        self, count: int, *, noise: float = 0.05, stalls: bool = False, true: StepModel = TRUE, seed: int = 4
    ) -> None:
        self.true = true
        self.times = StepTimes()
        self.now_s = 100.0
        self.noise, self.stalls = noise, stalls
        self.rng = Random(seed)
        self.sums = [[0.0] * 5 for _ in range(count)]

    def run(
        self, seconds: int, *, slow: Collection[int] = (), factor: float = 3.0
    ) -> Iterator[tuple[int, Measured]]:
        for _ in range(seconds):
            self.now_s += 1.0
            for number, sums in enumerate(self.sums):
                measured = self._report(number, sums, factor if number in slow else 1.0)
                if measured is not None:
                    yield number, measured
            self.times.advance(self.now_s)

    def _report(self, number: int, sums: list[float], factor: float) -> Measured | None:
        rng = self.rng
        steps = rng.randint(20, 100)
        prefill, decode = steps * rng.randint(0, 400), steps * rng.randint(1, 64)
        attended = decode * rng.randint(100, 8000)
        took_s = factor * self.true.seconds(steps, prefill, decode, attended) * rng.gauss(1, self.noise)
        if self.stalls and rng.random() < 0.05:
            took_s += 20.0
        for index, value in enumerate((took_s, steps, prefill, decode, attended)):
            sums[index] += value
        return self.times.observe(f"w{number}", "h100", self.pool(sums), self.now_s)

    @staticmethod
    def pool(sums: list[float]) -> PoolSnapshot:
        return PoolSnapshot(
            "d",
            100,
            0,
            16,
            0,
            0,
            64,
            4096,
            step_seconds=sums[0],
            steps=int(sums[1]),
            prefill_tokens=int(sums[2]),
            decode_tokens=int(sums[3]),
            attended_tokens=int(sums[4]),
        )

    @property
    def model(self) -> StepModel:
        return self.times.model(KIND)


def drain(steps: Iterator[tuple[int, Measured]]) -> list[tuple[int, Measured]]:
    return list(steps)


def agrees(model: StepModel, ratio: float = 0.1) -> bool:
    """Whether it says of typical work what is true."""
    mixes = ((1, 0, 1, 500), (1, 512, 0, 0), (1, 256, 32, 60_000), (1, 0, 64, 250_000))
    return all(model.seconds(*mix) == pytest.approx(TRUE.seconds(*mix), rel=ratio) for mix in mixes)


def test_the_parameters_are_recovered() -> None:
    workers = Workers(4, noise=0.0)
    assert workers.model == PRIOR
    drain(workers.run(60))
    found = workers.model
    assert found.per_step_s == pytest.approx(TRUE.per_step_s, rel=0.01)
    assert found.per_prefill_s == pytest.approx(TRUE.per_prefill_s, rel=0.01)
    assert found.per_decode_s == pytest.approx(TRUE.per_decode_s, rel=0.01)
    assert found.per_attended_s == pytest.approx(TRUE.per_attended_s, rel=0.01)
    assert found.samples > 50
    assert found.error_ratio < 0.01


@pytest.mark.parametrize(("count", "slow"), [(2, {1}), (4, {0}), (16, {0, 1, 2, 3}), (9, {5, 6, 7, 8})])
@pytest.mark.parametrize("healthy_s", [0, 30])
def test_a_slow_minority_does_not_bend_the_model(count: int, slow: set[int], healthy_s: int) -> None:
    workers = Workers(count)
    drain(workers.run(healthy_s))
    reports = drain(workers.run(30, slow=slow))
    assert agrees(workers.model), workers.model
    for number in range(count):
        expected = 3.0 if number in slow else 1.0
        assert workers.times.slowness(f"w{number}", "d") == pytest.approx(expected, rel=0.15)
    last = {number: measured.measured_s / measured.predicted_s for number, measured in reports[-count:]}
    assert all((ratio > 2) == (number in slow) for number, ratio in last.items())


def test_all_slower_is_the_new_normal_and_one_that_recovers_counts_again() -> None:
    workers = Workers(4, noise=0.01)
    drain(workers.run(40))
    drain(workers.run(200, slow=range(4)))
    assert workers.model.seconds(1, 256, 32, 60_000) == pytest.approx(
        3 * TRUE.seconds(1, 256, 32, 60_000), rel=0.1
    )
    assert workers.times.slowness("w0", "d") == pytest.approx(1.0, rel=0.1)
    drain(workers.run(200))
    drain(workers.run(20, slow={0}))
    drain(workers.run(20))
    assert agrees(workers.model)
    assert workers.times.slowness("w0", "d") == pytest.approx(1.0, rel=0.1)


def test_stalls_do_not_bend_it_and_coefficients_are_never_negative() -> None:
    workers = Workers(8, noise=0.1, stalls=True)
    drain(workers.run(60))
    model = workers.model
    assert min(model.per_step_s, model.per_prefill_s, model.per_decode_s, model.per_attended_s) >= 0
    assert agrees(model, 0.15)


@pytest.mark.parametrize("seed", range(8))
def test_what_costs_nothing_is_not_found_to_cost_less(seed: int) -> None:
    workers = Workers(2, noise=0.2, true=StepModel(20e-3, 0.0, 0.0, 0.0), seed=seed)
    drain(workers.run(20))
    model = workers.model
    assert model.samples > 20
    assert min(model.per_step_s, model.per_prefill_s, model.per_decode_s, model.per_attended_s) >= 0


def test_what_a_worker_was_slow_with_is_forgotten_when_it_recovers() -> None:
    workers = Workers(4, noise=0.01)
    drain(workers.run(10))
    drain(workers.run(60, slow={0, 1}))
    for _ in range(10):
        drain(workers.run(2))
        assert agrees(workers.model)


def test_little_or_contradictory_evidence_is_not_trusted() -> None:
    workers = Workers(1)
    drain(workers.run(5))
    assert workers.model == PRIOR
    noisy = Workers(1, noise=0.0)
    for second in range(60):
        drain(noisy.run(1, slow={0}, factor=20.0 if second % 2 else 0.05))
    assert noisy.model == PRIOR


def test_an_engine_that_began_again_is_no_negative_work() -> None:
    workers = Workers(2)
    drain(workers.run(30))
    workers.sums[0] = [0.0] * 5
    found = drain(workers.run(1))
    assert [number for number, _ in found] == [1], "the first report of an engine is what others count from"
    assert all(measured.measured_s > 0 for _, measured in drain(workers.run(1)))


def test_what_was_never_seen_keeps_its_prior_and_the_forgotten_is_gone() -> None:
    times = StepTimes()
    sums = [0.0] * 5
    for second in range(40):
        sums = [sums[0] + 1.0, sums[1] + 100, 0.0, sums[3] + 100, sums[4]]
        times.observe("w0", "h100", Workers.pool(sums), float(second))
        times.advance(float(second))
    assert times.model(KIND).per_prefill_s == PRIOR.per_prefill_s
    assert times.model(KIND).seconds(1, 0, 1, 0) == pytest.approx(0.01, rel=0.01)
    times.forget("w0", ("d",))
    times.advance(100.0)
    assert times.model(KIND) == PRIOR


def test_the_first_token_comes_after_what_is_shorter_and_not_after_the_whole_queue() -> None:
    model = StepModel(0.010, 50e-6, 100e-6, 0.0)

    def ttft(ahead: int, own: int, running: int = 0) -> float:
        return predict_ttft_s(
            model, ahead_tokens=ahead, uncached_tokens=own, running=running, attended_tokens=0
        )

    assert ttft(0, CHUNK_TOKENS) == pytest.approx(0.010 + 512 * 50e-6)
    assert ttft(0, 0) == pytest.approx(0.010 + 50e-6), "the last token is computed whatever is cached"
    assert ttft(512, 512) == pytest.approx(2.5 * 0.010 + 1024 * 50e-6)
    assert ttft(4096, 512) == pytest.approx(3.5 * 0.010 + 1280 * 50e-6), "most of the queue is longer"
    assert ttft(4096, 16) == pytest.approx(1.5 * 0.010 + 40 * 50e-6)
    assert ttft(0, 512, running=50) == pytest.approx(1.5 * 0.015 + 512 * 50e-6)
    assert ttft(0, 100) < ttft(0, 5000) < ttft(5000, 5000) < ttft(5000, 5000, running=64)


def test_others_come_later_by_what_a_prompt_computes_and_not_by_what_is_cached() -> None:
    model = StepModel(0.010, 50e-6, 100e-6, 0.0)

    def delay(ahead: int, own: int) -> float:
        return delay_of_others_s(model, ahead_tokens=ahead, uncached_tokens=own)

    assert delay(0, 5000) == 0.0
    assert delay(2 * LONG_PROMPT_TOKENS, 512) == pytest.approx(2 * (512 * 50e-6 + 0.010))
    assert delay(2 * LONG_PROMPT_TOKENS, 64) < delay(LONG_PROMPT_TOKENS, 512)
