"""Rows of one tenant between the layers of a long batch of another, with scripted processes."""

from __future__ import annotations

import pytest
from msgspec import structs

from services.core.poison.suspicion import LossCause
from services.worker.batcher.policy.isolation import RunFailure
from services.worker.engine_protocol import RowModel
from tests.unit.worker.batcher.scripted import LAYERS, SACRIFICIAL, SERVING, Scripted, text, train


def between(model: RowModel = LAYERS, length: int = 2, *, memory_bytes: int = 0) -> tuple[Scripted, int, int]:
    """Return a batcher in which a long row runs and one of another tenant has come, and both."""
    scripted = Scripted(model, memory_bytes=memory_bytes)
    train(scripted)
    long_row = scripted.start(text(64), tenant_id="greedy")
    scripted.clock.now_s += 0.001
    other = scripted.start(text(length), tenant_id="modest")
    return scripted, long_row, other


def widths_of(scripted: Scripted) -> list[int]:
    """Return the widths of the batches that were sent since the long one."""
    sent = [command.width for command in scripted.serving.sent]
    return sent[-sent[::-1].index(64) :] if sent[-1] != 64 else []


def test_a_row_of_another_tenant_runs_between_the_layers_of_a_long_batch() -> None:
    scripted, long_row, other = between()
    assert widths_of(scripted) == [2]
    scripted.start(text(64), tenant_id="greedy")
    later = scripted.start(text(2), tenant_id="modest")
    assert widths_of(scripted) == [2], "one between layers at a time"
    scripted.answer(run_s=0.0002)
    assert scripted.ends[other].batch_cause == "between"
    assert widths_of(scripted) == [2, 2], "the next one follows"
    scripted.answer(run_s=0.0002)
    assert later in scripted.ends
    scripted.answer(run_s=0.005, back=3)
    assert long_row in scripted.ends
    assert widths_of(scripted) == [], "the greedy tenant's next row"


def test_pauses_and_waits_for_a_pause_are_not_what_a_batch_costs() -> None:
    scripted, _, _ = between()
    for _ in range(200):
        scripted.answer(run_s=0.005)  # of the batch between, most of it until a layer ended
        scripted.answer(run_s=0.0054, back=2)
        scripted.start(text(64), tenant_id="greedy")
        scripted.fire()
        scripted.clock.now_s += 0.001
        scripted.start(text(2), tenant_id="modest")
        assert [command.width for command in scripted.serving.sent[-2:]] == [64, 2]
    curve = scripted.batcher.curve
    assert curve.mean_s(64, 1) < 0.0065
    assert curve.mean_s(2, 1) < 0.0003


def test_only_rows_of_other_tenants_run_between_the_layers() -> None:
    scripted = Scripted(LAYERS)
    train(scripted)
    scripted.start(text(64), tenant_id="greedy")
    own = scripted.start(text(2), tenant_id="greedy")
    other = scripted.start(text(2), tenant_id="modest")
    assert len(scripted.serving.sent[-1].rows) == 1
    scripted.answer(run_s=0.0002)
    assert other in scripted.ends
    assert own not in scripted.ends


def test_both_batches_share_the_memory_of_one() -> None:
    scripted, _, _ = between(memory_bytes=64 + 1 + 2 * (2 + 1))
    scripted.answer(run_s=0.0002)
    for _ in range(4):
        scripted.start(text(2), tenant_id="modest")
    scripted.answer(run_s=0.0002)
    assert len(scripted.serving.sent[-1].rows) == 2


def test_a_batch_has_its_time_limit_without_what_runs_between_its_layers() -> None:
    scripted, _, _ = between()
    long_run = scripted.batcher._runs.serving
    assert long_run is not None
    own_s = scripted.batcher.curve.limit_s(64, 1)
    scripted.sweep(long_run.began_s + own_s - scripted.clock.now_s + 0.001)
    assert not scripted.serving.kills
    scripted.sweep(own_s)
    assert scripted.serving.kills
    scripted.dies(cause=LossCause.OUTSIDE)
    assert {search.failure for search in scripted.batcher._searches} == {RunFailure.HUNG}


@pytest.mark.parametrize(
    ("model", "length"),
    [(structs.replace(LAYERS, pauses=False), 2), (LAYERS, 64)],
    ids=["it does not pause", "it does not pay"],
)
def test_rows_wait_for_the_end_of_a_batch_otherwise(model: RowModel, length: int) -> None:
    scripted, long_row, other = between(model, length)
    assert widths_of(scripted) == []
    scripted.answer(run_s=0.0054)
    assert long_row in scripted.ends
    scripted.fire()
    scripted.answer()
    assert scripted.ends[other].batch_cause != "between"


def test_a_long_batch_keeps_half_of_the_device() -> None:
    scripted, long_row, _ = between()
    for _ in range(200):
        scripted.start(text(2), tenant_id="modest")
    curve, lent_s = scripted.batcher.curve, 0.0
    while scripted.batcher._runs.has_between:
        lent_s += curve.mean_s(2, len(scripted.serving.sent[-1].rows))
        scripted.answer(run_s=1e-9)
    assert long_row not in scripted.ends
    assert 0.0 < lent_s <= curve.mean_s(64, 1)


@pytest.mark.parametrize("end", ["dies", "hangs", "stops"])
def test_the_rows_of_both_batches_are_searched_after_their_process_ended(end: str) -> None:
    scripted, long_row, other = between()
    if end == "stops":
        scripted.stops()
        assert scripted.lost() == [long_row, other]
        return
    if end == "hangs":
        scripted.sweep(1000.0)
        assert len(scripted.serving.kills) == 1
    scripted.dies()
    scripted.attach(SERVING)
    scripted.attach(SACRIFICIAL)
    while SACRIFICIAL in scripted.batcher._runs:
        scripted.answer(SACRIFICIAL)
    assert {long_row, other} <= set(scripted.answered())


def test_a_batch_that_raises_between_layers_fails_alone() -> None:
    scripted, long_row, other = between()
    scripted.raises()
    assert scripted.errors() == {other: "POISONED_INPUT"}
    assert long_row not in scripted.ends
    scripted.answer()
    assert long_row not in scripted.ends, "that was the batch between"
    scripted.answer(back=2)
    assert long_row in scripted.answered()


def test_a_batch_that_came_too_late_runs_after_the_long_one() -> None:
    scripted, long_row, other = between()
    scripted.answer(run_s=0.0054, back=2)
    assert long_row in scripted.ends
    sent = len(scripted.serving.sent)
    scripted.start(text(2), tenant_id="greedy")
    assert len(scripted.serving.sent) == sent, "it is the batch that runs"
    scripted.answer(run_s=0.0002)
    assert other in scripted.answered()
    assert len(scripted.serving.sent) == sent + 1
