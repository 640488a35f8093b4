"""A fit finds the model that the measurements came from, and says by how much it is off."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from services.core.estimates.cost_model import PRESETS, CostModel, decode, encode
from services.worker.engine.core import Engine
from services.worker.engine_protocol import EngineConfig
from simulator.engine.calibrate import (
    PLAN,
    SHORT_PLAN,
    CalibrationFailed,
    Counters,
    NotEnough,
    Observation,
    Phase,
    fit,
    measure,
    read_counters,
)
from tests.support.submits import make_submit

TRUE = CostModel("true", 0.004, 0.00012, 0.0003, 0.0000009)
TINY = Path(__file__).parents[3] / "models" / "tiny" / "checkpoint"


def observations(model: CostModel, rng: random.Random, noise: float, count: int = 40) -> list[Observation]:
    rows = []
    for _ in range(count):
        steps = rng.randrange(20, 200)
        prefill = rng.choice([0, steps * rng.randrange(1, 500)])
        decodes = steps * rng.choice([0, 1, 4, 16, 64])
        attended = decodes * rng.randrange(1, 2000)
        seconds = (
            steps * model.base_s
            + prefill * model.prefill_token_s
            + decodes * model.decode_sequence_s
            + attended * model.attended_token_s
        )
        rows.append(Observation(steps, prefill, decodes, attended, seconds * rng.gauss(1.0, noise)))
    return rows


def times(model: CostModel) -> tuple[float, ...]:
    return model.base_s, model.prefill_token_s, model.decode_sequence_s, model.attended_token_s


@pytest.mark.parametrize(("noise", "band"), [(0.0, 1e-6), (0.03, 0.06), (0.10, 0.2)])
def test_known_times_are_found_under_noise(noise: float, band: float) -> None:
    found = fit(observations(TRUE, random.Random(1), noise), TRUE, name="found")
    for value, true in zip(times(found.model), times(TRUE), strict=True):
        assert value == pytest.approx(true, rel=band)
    assert found.median_error <= max(1e-9, noise)
    assert found.held_out_error <= max(1e-9, 1.2 * noise)


def test_no_time_is_negative_whatever_was_measured() -> None:
    rng = random.Random(2)
    free_kv = CostModel("free", 0.004, 0.00012, 0.0003, 0.0)
    for _ in range(20):
        found = fit(observations(free_kv, rng, 0.1), free_kv, name="found")
        assert all(value >= 0.0 for value in times(found.model))


def test_too_little_is_refused() -> None:
    rows = observations(TRUE, random.Random(3), 0.0)
    with pytest.raises(NotEnough, match="needed"):
        fit(rows[:3], TRUE, name="found")
    with pytest.raises(NotEnough, match="prompt"):
        fit([Observation(5, 0, 5, 9, 0.1)] * 10, TRUE, name="found")


def test_a_model_survives_its_file() -> None:
    for model in PRESETS.values():
        assert decode(encode(model)) == model
    with pytest.raises(ValueError, match="no cost model"):
        decode(b'{"name": "half"}')
    with pytest.raises(ValueError):
        decode(encode(TRUE).replace(b"0.004", b"-1"))


def test_counters_are_read_from_a_worker_s_metrics() -> None:
    text = "\n".join(
        (
            'fairway_worker_step_seconds_bucket{model="m",le="0.1"} 3',
            'fairway_worker_step_seconds_count{model="m"} 3',
            'fairway_worker_step_seconds_sum{model="m"} 0.5',
            'fairway_worker_step_seconds_sum{model="other"} 7',
            'fairway_worker_tokens_total{model="m",kind="prefill"} 40',
            'fairway_worker_tokens_total{model="m",kind="output"} 9',
            'fairway_worker_attended_tokens_total{model="m"} 400',
            'fairway_worker_sequences_ended_total{model="m",reason="length"} 2',
            'fairway_worker_sequences_ended_total{model="m",reason="cancelled"} 1',
            "",
        )
    )
    assert read_counters(text, "m") == Counters(3, 40, 9, 400, 3, 0.5)
    with pytest.raises(CalibrationFailed, match="nobody"):
        read_counters(text, "nobody")


@pytest.fixture(scope="module")
def tiny_engine() -> Engine:
    """The bundled model, as an engine process loads it."""
    from services.worker.engine.load.loading import load

    config = EngineConfig(socket_path="", model_dir=str(TINY), threads=1, kv_blocks=2048, itl_target_s=0.0)
    return load(config, lambda phase, ratio: None)[0]


def steps_of(engine: Engine, phase: Phase, first: int) -> list[Observation]:
    """Run a phase to its end; return what each step did."""
    seen = []
    waiting = [
        make_submit(
            first + number,
            [3 + (number * 31 + index * 7) % 90 for index in range(phase.prompt)],
            1 << 30,
            seed=number,
            temperature=0.0,
            max_tokens=phase.output,
            ignore_eos=True,
        )
        for number in range(phase.count)
    ]
    live = 0
    while waiting or live:
        while waiting and live < phase.at_once:
            engine.apply(waiting.pop(0))
            live += 1
        decodes = len(engine.planner.decoding)
        began_s = time.thread_time()  # what others do on this machine is not the engine's
        event = engine.step()
        took_s = time.thread_time() - began_s
        live -= len(event.finished)
        seen.append(Observation(1, event.prefill_tokens, decodes, event.attended_tokens, took_s))
    return seen


def test_a_real_engine_is_fitted(tiny_engine: Engine) -> None:
    """The bundled model's steps, phase by phase: half of the phases are explained to within 20 %."""
    rows, first = [], 0
    for phase in SHORT_PLAN:
        steps = steps_of(tiny_engine, phase, first)
        first += phase.count
        rows.append(
            Observation(
                len(steps),
                sum(step.prefill_tokens for step in steps),
                sum(step.decode_tokens for step in steps),
                sum(step.attended_tokens for step in steps),
                sum(step.seconds for step in steps),
            )
        )
    found = fit(rows, PRESETS["tiny-cpu"], name="tiny-cpu")
    assert found.median_error < 0.2
    assert found.held_out_error < 0.35
    assert found.model.base_s > 0.0
    assert found.model.prefill_token_s > 0.0


def test_a_plan_is_measured_through_what_it_is_given() -> None:
    """``measure`` with a device of known times behind the counters."""
    done = [Counters(0, 0, 0, 0, 0, 0.0)]

    def send(number: int, prompt: int, output: int) -> None:
        now = done[-1]
        attended = sum(range(prompt + 1, prompt + output))
        seconds = TRUE.step_s(prompt, 0, 0) + sum(
            TRUE.step_s(0, 1, prompt + index) for index in range(1, output)
        )
        done.append(
            Counters(
                now.steps + output,
                now.prefill_tokens + prompt,
                now.output_tokens + output,
                now.attended_tokens + attended,
                now.ended + 1,
                now.seconds + seconds,
            )
        )

    plan = [Phase(phase.count, 1, phase.prompt, phase.output) for phase in PLAN]
    rows = measure(plan, send=send, counters=lambda: done[-1])
    found = fit(rows, TRUE, name="found")
    assert found.median_error < 1e-6
    assert found.model.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=1e-3)


def test_requests_that_other_workers_served_are_not_counted_here() -> None:
    before, after = Counters(10, 100, 50, 500, 5, 1.0), Counters(16, 164, 74, 900, 9, 1.5)
    assert after.since(before) == Observation(6, 64, 20, 400, 0.5)  # four ended here, however many were sent
