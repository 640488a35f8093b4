"""The stages sum to the latency, whatever the order they are entered in."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.requests.stage_timer import STAGE_NAMES, Stage, StageTimer

FIELDS = [f"{name}_us" for name in STAGE_NAMES]


@given(st.lists(st.tuples(st.sampled_from(Stage), st.floats(0, 10)), max_size=30), st.floats(0, 20))
def test_stages_sum_to_the_latency(moves: list[tuple[Stage, float]], engine_wait_s: float) -> None:
    timer, now_s = StageTimer(123, 5.0), 5.0
    for stage, step_s in moves:
        now_s += step_s
        timer.enter(stage, now_s)
    timer.split_wait(engine_wait_s)
    clock = timer.finish(now_s + 1.0)
    total_us = sum(getattr(clock, field) for field in FIELDS)
    assert abs(total_us - (now_s + 1.0 - 5.0) * 1e6) <= len(FIELDS)
    assert all(getattr(clock, field) >= 0 for field in FIELDS)


def test_a_stage_entered_twice_adds_up() -> None:
    timer = StageTimer(0, 0.0)
    for stage, at_s in ((Stage.QUEUE, 1.0), (Stage.DECODE, 3.0), (Stage.QUEUE, 4.0), (Stage.SEND, 5.5)):
        timer.enter(stage, at_s)
    clock = timer.finish(6.0)
    assert (clock.validate_us, clock.queue_us, clock.decode_us, clock.send_us) == (
        1_000_000,
        3_500_000,
        1_000_000,
        500_000,
    )


def test_the_worker_splits_what_the_gateway_saw() -> None:
    timer = StageTimer(0, 0.0)
    timer.enter(Stage.ENGINE_WAIT, 0.0)
    timer.enter(Stage.DECODE, 1.0)
    timer.split_wait(0.25)
    clock = timer.finish(2.0)
    assert (clock.engine_wait_us, clock.prefill_us, clock.decode_us) == (250_000, 750_000, 1_000_000)


def test_a_fork_leaves_its_parent_alone() -> None:
    timer = StageTimer(7, 0.0)
    timer.enter(Stage.ADMIT, 1.0)
    child = timer.fork()
    child.enter(Stage.QUEUE, 3.0)
    assert child.finish(4.0).admit_us == 2_000_000
    assert timer.finish(1.5).admit_us == 500_000
