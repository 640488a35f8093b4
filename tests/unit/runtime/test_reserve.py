"""The reserve of a store: who is refused, what counts between measurements, and when room is back."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from services.core.errors import StorageFull
from services.runtime.reserve import MEASURED_S, Reserve
from tests.support.clocks import HandClock


class Disk:
    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.looks = 0

    def measure(self) -> int:
        self.looks += 1
        return self.free_bytes


def test_writes_leave_the_reserve_and_go_on_when_there_is_room() -> None:
    clock, disk = HandClock(), Disk(1000)
    reserve = Reserve("the disk", "add disk", clock, reserve_bytes=400, measure=disk.measure)
    with reserve.taken(600):
        pass
    with pytest.raises(
        StorageFull, match=r"no room in the disk: .* 400 are kept in reserve; add disk"
    ) as full:
        reserve.taken(1).__enter__()
    assert full.value.retry_after_s
    assert full.value.metadata["store"] == "the disk"
    assert reserve.reached
    assert "400" in reserve.problem()
    disk.free_bytes = 2000
    clock.now_s += MEASURED_S
    with reserve.taken(1600):
        pass
    clock.now_s += 60
    reserve.look()
    assert not reserve.reached
    assert reserve.problem() == ""


def test_it_is_reported_when_only_what_was_to_be_written_did_not_fit() -> None:
    clock, disk = HandClock(), Disk(1000)
    reserve = Reserve("the disk", "add disk", clock, reserve_bytes=400, measure=disk.measure)
    assert not reserve.reached
    with pytest.raises(StorageFull):
        reserve.taken(700).__enter__()
    assert reserve.reached


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_written_at_once_the_reserve_stays_free(seed: int) -> None:
    """Bytes reach the disk somewhere between the beginning of a write and its end, of several at once."""
    rng, clock, disk = random.Random(seed), HandClock(), Disk(100_000)
    reserve = Reserve("the disk", "add disk", clock, reserve_bytes=30_000, measure=disk.measure)
    running: list[tuple[ExitStack, int]] = []
    refused = 0
    for _ in range(2000):
        clock.now_s += rng.choice([0.0, 0.01, 0.2])
        if running and rng.random() < 0.5:
            held, unwritten = running.pop(rng.randrange(len(running)))
            disk.free_bytes -= unwritten
            held.close()
        elif rng.random() < 0.1:
            disk.free_bytes += rng.randrange(20_000)  # a deletion
        else:
            size, held = rng.randrange(9000), ExitStack()
            try:
                held.enter_context(reserve.taken(size))
            except StorageFull:
                refused += 1
                continue
            part = rng.randrange(size + 1)
            disk.free_bytes -= part
            running.append((held, size - part))
        assert disk.free_bytes - sum(unwritten for _, unwritten in running) >= 30_000
    assert refused


def test_it_measures_at_most_ten_times_a_second() -> None:
    clock, disk = HandClock(), Disk(10**9)
    reserve = Reserve("the disk", "add disk", clock, measure=disk.measure)
    for _ in range(1000):
        clock.now_s += 0.001
        with reserve.taken(1):
            pass
    assert disk.looks <= 11
