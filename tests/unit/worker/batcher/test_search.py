"""The search for what ends a batch, over scripted processes: places, runs, ends, charges."""

from __future__ import annotations

import pytest

from services.core.poison.suspicion import LossCause
from services.worker.batcher.driver import RESTART_LOADS, RESTART_S, SEARCH_RESTART_S
from services.worker.batcher.search import KEPT_S
from services.worker.engine_protocol import BatchRan
from tests.unit.worker.batcher.scripted import SACRIFICIAL, SERVING, Scripted, fill, vector


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


def test_a_row_that_raises_is_found_in_the_process_that_serves(scripted: Scripted) -> None:
    rows = fill(scripted, 8)
    poison, runs = rows[5], 0
    scripted.raises()
    while poison not in scripted.ends:
        runs += 1
        scripted.raises() if poison in scripted.running() else scripted.answer()
    while len(scripted.ends) < 9:
        scripted.answer()
        runs += 1
    assert scripted.errors() == {poison: "POISONED_INPUT"}
    assert scripted.ends[poison].error.metadata["deaths"] == "0"  # type: ignore[union-attr]
    assert scripted.answered() == [1, *(row for row in rows if row != poison)]
    assert runs <= 5
    assert not scripted.sacrifice.wanted
    assert scripted.device.attributed_s < scripted.device.busy_s


def test_a_row_that_ends_its_process_is_found_in_another_while_others_go_on(scripted: Scripted) -> None:
    rows = fill(scripted, 4)
    healthy = scripted.start()
    scripted.dies()
    assert scripted.sacrifice.wanted
    assert not scripted.batcher.ready
    scripted.attach(SERVING)
    assert scripted.running() == [healthy]
    scripted.answer()
    assert scripted.answered() == [1, healthy]
    deaths = 0
    while rows[0] not in scripted.ends:
        assert scripted.sacrifice.wanted
        if SACRIFICIAL not in scripted.processes:
            scripted.attach(SACRIFICIAL)
        if rows[0] in scripted.running(SACRIFICIAL):
            deaths += 1
            scripted.dies(SACRIFICIAL)
        else:
            scripted.answer(SACRIFICIAL)
    assert deaths == 2  # both alone: a part of one row, since its failures cost the most
    assert scripted.errors() == {rows[0]: "POISONED_INPUT"}
    assert scripted.ends[rows[0]].error.metadata["deaths"] == "2"  # type: ignore[union-attr]
    scripted.attach(SACRIFICIAL)
    scripted.answer(SACRIFICIAL)
    assert len(scripted.ends) == 6
    assert not scripted.sacrifice.wanted
    assert scripted.serving.sent[-1].number != 0
    assert not any(row in scripted.running() for row in rows), "a suspect ran in the serving process"


def test_kills_from_outside_condemn_no_row(scripted: Scripted) -> None:
    rows = fill(scripted, 4)
    scripted.dies(cause=LossCause.OUTSIDE)
    scripted.attach(SACRIFICIAL)
    scripted.dies(SACRIFICIAL, cause=LossCause.OUTSIDE)
    scripted.attach(SACRIFICIAL)
    while len(scripted.ends) < 5:
        scripted.answer(SACRIFICIAL)
    assert scripted.answered() == [1, *rows]


def test_a_batch_that_hangs_is_cut_once_at_its_limit(scripted: Scripted) -> None:
    fill(scripted, 1)
    scripted.sweep(1.9)
    assert not scripted.serving.kills
    scripted.sweep(0.2)
    scripted.sweep(0.2)
    assert len(scripted.serving.kills) == 1
    for _ in range(3):
        scripted.dies(SACRIFICIAL if SACRIFICIAL in scripted.processes else SERVING, LossCause.OUTSIDE)
        if 2 in scripted.ends:
            break
        scripted.attach(SACRIFICIAL)
        scripted.sweep(2.1)
        assert scripted.processes[SACRIFICIAL].kills
    assert scripted.errors() == {2: "POISONED_INPUT"}


def test_the_limit_follows_what_batches_take(scripted: Scripted) -> None:
    for _ in range(25):
        scripted.start()
        scripted.answer(run_s=1.0)
    scripted.start()
    scripted.sweep(7.5)
    assert not scripted.serving.kills
    scripted.sweep(1.5)
    assert scripted.serving.kills


def test_an_answer_of_another_batch_is_ignored(scripted: Scripted) -> None:
    fill(scripted, 2)
    earlier = scripted.serving.sent[0]
    scripted.batcher.on_batch(SERVING, BatchRan(earlier.number, 0.001, list(earlier.rows)))
    scripted.collect()
    assert scripted.answered() == [1]
    scripted.answer()
    assert scripted.answered() == [1, 2, 3]


def test_a_pause_of_the_agent_is_not_a_hang(scripted: Scripted) -> None:
    scripted.start()
    scripted.clock.now_s += 60.0
    scripted.batcher.reset_silence()
    scripted.sweep(0.0)
    assert not scripted.serving.kills


def test_without_a_process_to_sacrifice_suspects_are_searched_in_the_one_that_serves(
    scripted: Scripted,
) -> None:
    rows = fill(scripted, 100)
    poison, deaths, runs = rows[60], 1, 0
    scripted.dies()
    healthy = scripted.start()
    scripted.batcher.search_in_serving("no memory")
    while len(scripted.batcher):
        assert not scripted.sacrifice.wanted
        if SERVING not in scripted.processes:
            scripted.attach(SERVING)
        running = scripted.running()
        runs += healthy not in running
        assert healthy not in running or running == [healthy], "a healthy row beside suspects"
        if poison in running:
            deaths += 1
            scripted.dies()
        else:
            scripted.answer()
    assert scripted.errors() == {poison: "POISONED_INPUT"}
    assert scripted.answered() == [1, *(row for row in rows if row != poison), healthy]
    assert deaths <= 5
    assert runs <= 13


def test_rows_that_wait_run_between_the_runs_of_a_search_that_ends_the_process(scripted: Scripted) -> None:
    rows = fill(scripted, 4)
    scripted.dies()
    scripted.batcher.search_in_serving("no memory")
    healthy = [scripted.start()]
    scripted.attach(SERVING)
    assert scripted.running() == [rows[0]], "the search has begun"
    healthy.append(scripted.start())
    scripted.dies()
    scripted.attach(SERVING)
    assert scripted.running() == healthy
    healthy.append(scripted.start())
    scripted.answer()
    assert scripted.running() == [rows[0]], "the search goes on though rows wait"
    scripted.dies()
    assert scripted.errors() == {rows[0]: "POISONED_INPUT"}


def test_suspects_do_not_wait_for_the_serving_process_without_end(scripted: Scripted) -> None:
    rows = fill(scripted, 3)
    scripted.dies()
    scripted.batcher.search_in_serving("no memory")
    scripted.sweep(SEARCH_RESTART_S - 1.0)
    assert not scripted.lost()
    scripted.sweep(1.1)
    assert scripted.lost() == rows
    assert len(scripted.batcher) == 0


def test_the_end_of_a_sacrificed_process_does_not_prolong_the_wait_for_the_serving_one(
    scripted: Scripted,
) -> None:
    rows = fill(scripted, 3)
    scripted.dies()
    waiting = scripted.start()
    scripted.attach(SACRIFICIAL)
    scripted.clock.now_s += RESTART_S - 1.0
    scripted.dies(SACRIFICIAL)
    scripted.sweep(1.1)
    assert scripted.lost() == [waiting]
    assert waiting not in rows


def test_rows_of_a_stopped_process_are_lost_and_late_messages_ignored(scripted: Scripted) -> None:
    rows = fill(scripted, 2)
    scripted.stops()
    assert scripted.lost() == rows
    process = scripted.attach(SERVING)
    scripted.start()
    scripted.batcher.lose_all()
    scripted.collect()
    assert scripted.lost() == [*rows, scripted.sent]
    assert process.sent
    scripted.answer()
    assert len(scripted.ends) == 4


@pytest.mark.parametrize(
    ("load_s", "most_s"), [(1.0, RESTART_S), (20.0, RESTART_LOADS * 20.0), (1e4, SEARCH_RESTART_S)]
)
def test_rows_do_not_wait_for_a_process_without_end(scripted: Scripted, load_s: float, most_s: float) -> None:
    scripted.attach(SERVING, load_s=load_s)
    scripted.stops()
    waiting = scripted.start()
    scripted.sweep(most_s - 1.0)
    assert waiting not in scripted.ends
    scripted.sweep(1.1)
    assert scripted.lost() == [waiting]


def deaths_in_a_search(scripted: Scripted, poison: int, cause: LossCause = LossCause.FAULT) -> int:
    """Let the searches end; return how many sacrificial processes the row ended alone."""
    alone = 0
    while scripted.sacrifice.wanted:
        if SACRIFICIAL not in scripted.processes:
            scripted.attach(SACRIFICIAL)
            continue
        running = scripted.running(SACRIFICIAL)
        alone += running == [poison]
        scripted.dies(SACRIFICIAL, cause) if poison in running else scripted.answer(SACRIFICIAL)
    return alone


def test_a_row_that_hangs_is_condemned_though_its_client_left_before(scripted: Scripted) -> None:
    """Its client leaves while it runs in the first batch, and comes back."""
    poison = fill(scripted, 1)[0]
    scripted.cancel(poison)
    scripted.sweep(2.1)
    assert scripted.serving.kills
    scripted.dies(cause=LossCause.OUTSIDE)
    assert deaths_in_a_search(scripted, poison, LossCause.OUTSIDE) == 2
    assert len(scripted.batcher) == 0
    scripted.attach(SERVING)
    again, other = scripted.start(vector(f"{poison:04}")), scripted.start()
    assert scripted.errors() == {again: "POISONED_INPUT"}
    assert scripted.ends[again].error.metadata["deaths"] == "3"  # type: ignore[union-attr]
    assert scripted.running() == [other]
    scripted.answer()
    scripted.clock.now_s += KEPT_S
    later = scripted.start(vector(f"{poison:04}"))
    assert later not in scripted.ends, "it is refused for a while"


def test_a_search_goes_on_without_its_clients_and_charges_each_row_once(scripted: Scripted) -> None:
    rows = fill(scripted, 16)
    scripted.tally.take(10)
    poison = rows[5]
    scripted.dies()
    scripted.cancel(*rows)
    alone = deaths_in_a_search(scripted, poison)
    assert alone == 2
    assert len(scripted.batcher) == 0
    (tokens,) = scripted.tally.take(10)
    assert tokens.rows == 16
    runs = [sent for sent in scripted.usage.sequences if sent.request_id in {f"r{row}" for row in rows}]
    assert len(runs) == len({use.request_id for use in runs}), "a row is charged twice"
    assert f"r{poison}" not in {use.request_id for use in runs}
    assert scripted.device.attributed_s == pytest.approx(
        sum(use.device_s for use in scripted.usage.sequences)
    )
    again = scripted.start(vector(f"{poison:04}"))
    assert scripted.errors() == {again: "POISONED_INPUT"}


def test_rows_set_aside_do_not_run_for_no_one(scripted: Scripted) -> None:
    rows = fill(scripted, 4)
    scripted.raises()
    scripted.raises()
    assert scripted.running() == rows[:1]
    scripted.cancel(*rows)
    scripted.raises()
    assert len(scripted.batcher) == 0
    assert scripted.running() == rows[:1]
