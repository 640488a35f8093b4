"""A batcher with scripted processes: batches, answers, charges, and the search for what ends a batch."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from services.core.fixed_cost.rows import RawTensor
from services.core.poison.suspicion import LossCause
from services.core.records import Priority
from services.runtime.telemetry.metrics import Metrics
from services.worker.batcher.policy.start import MOST_BATCH_BYTES
from services.worker.batcher.telemetry import BatcherTelemetry, BatchInstruments
from services.worker.engine_protocol import RowCosts, RowModel
from tests.unit.worker.batcher.scripted import (
    DIGEST,
    LAYERS,
    SACRIFICIAL,
    SERVING,
    TEXTS,
    VECTORS,
    Scripted,
    fill,
    row_of,
    text,
    train,
    vector,
)

SLOW_START = RowModel(VECTORS.operation, "float32", VECTORS.inputs, 0, False, RowCosts(5e-3, 1e-5, 0.0, 1, 0))


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


# --- batches -----------------------------------------------------------------------------------------


def test_an_idle_device_starts_at_once_and_rows_gather_while_it_computes(scripted: Scripted) -> None:
    scripted.start()
    assert scripted.running() == [1]
    for _ in range(5):
        scripted.start()
    assert len(scripted.serving.sent) == 1
    scripted.answer()
    assert scripted.running() == [2, 3, 4, 5, 6]
    scripted.answer()
    assert scripted.answered() == [1, 2, 3, 4, 5, 6]
    end = scripted.ends[3]
    assert (end.outputs, end.batch_rows, end.batch_cause) == (vector("0003"), 5, "idle")
    assert end.wait_s == pytest.approx(0.001)
    assert len(scripted.batcher) == 0


def test_a_device_waits_for_the_next_row_where_that_pays() -> None:
    scripted = Scripted(SLOW_START)
    scripted.start()
    assert not scripted.serving.sent
    scripted.clock.now_s += 1e-5
    scripted.start()
    assert not scripted.serving.sent
    scripted.fire()
    while not scripted.serving.sent:
        scripted.fire()
    assert scripted.running() == [1, 2]
    scripted.answer()


def test_nothing_waits_in_a_drain() -> None:
    scripted = Scripted(SLOW_START, draining=True)
    scripted.start()
    assert scripted.running() == [1]
    scripted.answer()
    assert scripted.ends[1].batch_cause == "drain"


def test_a_batch_has_a_hundred_rows_at_most(scripted: Scripted) -> None:
    scripted.start()
    for _ in range(130):
        scripted.start()
    scripted.answer()
    assert len(scripted.running()) == 100
    scripted.answer()
    assert scripted.ends[2].batch_cause == "full"
    assert len(scripted.running()) == 30


def test_rows_of_other_tensors_run_in_batches_of_their_own(scripted: Scripted) -> None:
    scripted.start()
    scripted.start(vector("0002"))
    scripted.start(vector("0003", shape=(1, 1)))
    scripted.start(vector("0004"))
    scripted.answer()
    assert scripted.running() == [2, 4]
    scripted.answer()
    assert scripted.running() == [3]


def costly(model: RowModel) -> RowModel:
    """Return the model with batches whose rows save time: tenants share them."""
    return structs.replace(model, costs=structs.replace(model.costs, batch_s=1e-4))


def test_a_burst_shares_the_batch_with_another_tenants_rows() -> None:
    scripted = Scripted(costly(VECTORS))
    scripted.start()
    for _ in range(99):
        scripted.start(tenant_id="greedy")
    modest = [scripted.start(tenant_id="modest") for _ in range(5)]
    scripted.answer()
    assert set(modest) <= set(scripted.running()[:10])


def test_weights_divide_the_device_among_tenants() -> None:
    scripted = Scripted(costly(VECTORS))
    scripted.start()
    for _ in range(60):
        scripted.start(tenant_id="light")
    heavy = [scripted.start(tenant_id="heavy", tenant_weight=3.0) for _ in range(60)]
    ran: list[int] = []
    while len(ran) < 60:
        scripted.answer()
        ran += scripted.running()
    assert 0.7 <= len(set(heavy).intersection(ran)) / len(ran) <= 0.8


def test_a_full_batcher_has_no_room(scripted: Scripted) -> None:
    for _ in range(scripted.batcher.row_slots):
        assert scripted.batcher.has_room
        scripted.start()
    assert not scripted.batcher.has_room
    scripted.answer()
    assert scripted.batcher.has_room


def test_lengths_are_checked_and_padded_to_the_widths() -> None:
    scripted = Scripted(TEXTS)
    scripted.start(text(3))
    assert scripted.serving.sent[-1].width == 64
    scripted.start(text(65))
    scripted.start(())
    assert set(scripted.errors().values()) == {"INVALID_INPUT"}
    scripted.answer()


def lengths_of(scripted: Scripted) -> list[int]:
    """Return the lengths of the rows of the latest batch."""
    return [row[0].shape[0] for row in scripted.serving.sent[-1].rows]


def test_a_model_that_packs_computes_rows_of_all_widths_together_for_one_tenant() -> None:
    scripted = Scripted(costly(TEXTS))
    for length in [2] * 60 + [60] * 20:
        scripted.start(text(length))
    scripted.answer()
    assert sorted(set(lengths_of(scripted))) == [2, 60]
    for length in (60, 2, 60, 2, 2):
        scripted.start(text(length))
    scripted.answer()
    assert lengths_of(scripted) == [2, 2, 2, 60, 60], "of one length side by side"
    for length in (60, 2, 60):
        scripted.start(text(length))
    scripted.start(text(2), tenant_id="other")
    scripted.answer()
    assert lengths_of(scripted) in ([60, 60], [2, 2]), "nobody's short row waits for a long one of others"


def test_a_long_row_of_a_lost_mixed_batch_has_the_time_of_its_own_length_alone() -> None:
    scripted = Scripted(costly(TEXTS))
    for length in [2] * 60 + [60] * 20:
        scripted.start(text(length))
    while len(scripted.batcher):
        scripted.answer()
    for length in [2] * 60 + [60]:
        scripted.start(text(length))
    scripted.answer()
    assert scripted.serving.sent[-1].width < 60
    scripted.dies(cause=LossCause.OUTSIDE)
    while len(scripted.batcher):
        if SACRIFICIAL not in scripted.processes:
            scripted.attach(SACRIFICIAL)
        sent = scripted.processes[SACRIFICIAL].sent[-1]
        longest = max(row[0].shape[0] for row in sent.rows)
        assert sent.width >= longest / len(sent.rows)
        scripted.answer(SACRIFICIAL)
    assert not scripted.errors()


def test_a_batch_of_all_widths_keeps_the_budget_of_tokens() -> None:
    scripted = Scripted(structs.replace(TEXTS, max_tokens=16_000))
    for length in [9] * 40 + [9000] * 30:
        scripted.start(text(length))
    while len(scripted.batcher):
        scripted.answer()
    for length in [9, 9000, 9000] + [9] * 60:
        scripted.start(text(length))
    scripted.answer()
    assert lengths_of(scripted) == [9000], "two of them are above the budget, though the mean is not"
    scripted.answer()
    assert [end.batch_cause for end in scripted.ends.values() if end.batch_rows == 1][-1] == "tokens"
    assert len(lengths_of(scripted)) > 20


def test_a_batch_that_the_bytes_of_its_inputs_limit_is_full_by_them() -> None:
    metrics = Metrics()
    scripted = Scripted(telemetry=BatcherTelemetry(BatchInstruments(metrics), "m"))
    scripted.start()
    large = (RawTensor("x", "FP32", (1,), bytes(MOST_BATCH_BYTES // 40)),)
    for inputs in [large] * 60 + [vector()] * 140:
        scripted.start(inputs)
    scripted.answer()
    fill = "fairway_worker_batch_fill_ratio_sum", {"model": "m"}
    before = metrics.registry.get_sample_value(*fill) or 0.0
    assert len(scripted.serving.sent[-1].rows) == 40, "of the mean a hundred fit, of the first rows fewer"
    scripted.answer()
    assert {end.batch_cause for end in scripted.ends.values() if end.batch_rows == 40} == {"bytes"}
    assert metrics.registry.get_sample_value(*fill) == before + 1.0
    scripted.answer()
    assert {end.batch_cause for end in scripted.ends.values() if end.batch_rows == 100} == {"full"}


def test_a_row_with_a_problem_is_refused_alone_and_is_not_charged(scripted: Scripted) -> None:
    rows = fill(scripted, 3)
    scripted.answer(problems={1: "x is wrong"}, run_s=0.004)
    assert scripted.errors() == {rows[1]: "INVALID_INPUT"}
    assert scripted.ends[rows[0]].batch_rows == 2
    assert scripted.ends[rows[0]].device_s == pytest.approx(0.002)
    assert scripted.ends[rows[1]].device_s == 0.0


# --- deadlines and cancels ---------------------------------------------------------------------------


def test_a_deadline_that_cannot_be_met_is_refused_at_once_or_as_soon_as_it_is_seen(
    scripted: Scripted,
) -> None:
    scripted.start(time_left_s=1e-6)
    assert scripted.errors() == {1: "DEADLINE_UNMEETABLE"}
    assert not scripted.serving.sent
    scripted.start()
    late = scripted.start(time_left_s=0.5)
    scripted.sweep(0.49)
    assert late not in scripted.ends
    scripted.sweep(0.0099)
    assert scripted.errors()[late] == "DEADLINE_UNMEETABLE"


def test_a_cancelled_row_is_in_no_batch_and_one_that_runs_is_charged(scripted: Scripted) -> None:
    running, waiting, other = scripted.start(), scripted.start(), scripted.start()
    scripted.cancel(running, waiting)
    assert len(scripted.batcher) == 2
    scripted.answer(run_s=0.002)
    assert scripted.running() == [other]
    scripted.answer(run_s=0.001)
    assert scripted.answered() == [other]
    (tokens,) = scripted.tally.take(10)
    assert (tokens.rows, tokens.device_us) == (3, 3000)


# --- charges -----------------------------------------------------------------------------------------


def test_the_shares_of_a_batch_add_up_to_its_time() -> None:
    scripted = Scripted(costly(TEXTS))
    lengths = {"a": 10, "b": 30}
    scripted.start(text(1), tenant_id="a")
    scripted.answer(run_s=0.0)
    scripted.tally.take(10)
    scripted.start(text(64), tenant_id="other")
    for tenant, length in lengths.items():
        scripted.start(text(length), tenant_id=tenant, priority=Priority.BATCH)
    scripted.answer(run_s=0.0)
    scripted.answer(run_s=0.004)
    found = {tokens.tenant: (tokens.rows, tokens.device_us) for tokens in scripted.tally.take(10)}
    assert found == {"a": (1, 1000), "b": (1, 3000), "other": (1, 0)}
    assert scripted.device.busy_s == scripted.device.attributed_s == pytest.approx(0.004)


def test_a_request_is_reported_once_its_last_row_here_has_ended(scripted: Scripted) -> None:
    scripted.start()
    for row in range(3):
        scripted.start(request_id="several", row=row)
    scripted.answer()
    scripted.usage.sequences.clear()
    scripted.answer(run_s=0.003)
    (use,) = scripted.usage.sequences
    assert (use.request_id, use.tenant, use.version_digest) == ("several", "t1", DIGEST)
    assert use.device_s == pytest.approx(0.003)


def test_the_report_counts_rows_and_what_one_takes(scripted: Scripted) -> None:
    scripted.start()
    scripted.start()
    pool = scripted.batcher.report(ready=True)
    assert (pool.running, pool.waiting, pool.row_slots, pool.row_us) == (1, 1, 400, 0)
    scripted.answer(run_s=0.002)
    pool = scripted.batcher.report(ready=False)
    assert (pool.running, pool.waiting, pool.row_us, pool.ready, pool.block_size) == (1, 0, 2000, False, 1)
    assert (pool.kv_blocks_total, pool.max_sequences, pool.steps) == (0, 0, 1)


@pytest.mark.parametrize("seed", range(60))
def test_every_row_ends_once_whatever_fails(seed: int) -> None:
    """Rows, cancels and failures at random: no row is lost from sight, and time is charged once."""
    rng, scripted = random.Random(seed), Scripted(LAYERS if seed % 2 else VECTORS)
    train(scripted)
    began = scripted.sent
    poisons: dict[int, str] = {}
    cancelled: set[int] = set()
    charged_s = scripted.device.attributed_s
    for _ in range(400):
        match rng.randrange(9):
            case 0 | 1 | 2:
                handle = scripted.start(row_of(scripted, rng.choice([2, 2, 64])), tenant_id=rng.choice("abc"))
                if rng.random() < 0.1:
                    poisons[handle] = rng.choice(["raises", "dies", "killed"])
            case 3 if scripted.outbox.rows:
                victim = rng.choice(list(scripted.outbox.rows))
                cancelled.add(victim)
                scripted.cancel(victim)
            case 4 if SERVING not in scripted.processes:
                scripted.attach(SERVING)
            case 5 if scripted.sacrifice.wanted and SACRIFICIAL not in scripted.processes:
                if rng.random() < 0.2:
                    scripted.batcher.search_in_serving("no memory")
                else:
                    scripted.attach(SACRIFICIAL)
            case 8:
                scripted.fire()
            case _:
                charged_s += _end_a_batch(scripted, rng, poisons)
    for _ in range(4000):
        if not len(scripted.batcher):
            break
        for place in (SERVING, SACRIFICIAL):
            if place not in scripted.processes:
                scripted.attach(place)
        scripted.fire()
        charged_s += _end_a_batch(scripted, rng, poisons)
    assert len(scripted.batcher) == 0
    ended = set(scripted.ends)
    assert ended | cancelled == set(range(1, scripted.sent + 1))
    assert began < len(ended)
    assert {handle for handle, reason in scripted.errors().items()} <= set(poisons)
    assert not set(scripted.answered()) & set(poisons)
    assert all(handle in poisons for handle in scripted.lost())
    assert scripted.device.attributed_s == pytest.approx(charged_s)
    rows: Counter[str] = Counter()
    for tokens in scripted.tally.take(10):
        rows[tokens.tenant] += tokens.rows
    assert rows.total() == scripted.sent


def _end_a_batch(scripted: Scripted, rng: random.Random, poisons: dict[int, str]) -> float:
    """End a batch that runs, by what its rows do to it; return what is charged for it."""
    numbers = {run.number for run in scripted.batcher._runs}  # the process alone observes which ones run
    batches = [
        (place, back)
        for place, process in scripted.processes.items()
        for back, command in enumerate(reversed(process.sent), 1)
        if command.number in numbers
    ]
    if not batches:
        return 0.0
    place, back = rng.choice(batches)
    match next((poisons[row] for row in scripted.running(place, back) if row in poisons), ""):
        case "raises":
            scripted.raises(place, back)
        case "dies":
            scripted.dies(place)
        case "killed":
            scripted.dies(place, LossCause.OUTSIDE)
        case _:
            scripted.answer(place, run_s=0.001, back=back)
            return 0.001
    return 0.0


def test_observed_transport_shortens_the_window_and_is_explained() -> None:
    scripted = Scripted()
    for _ in range(400):
        scripted.start(transport_s=0.02)
        scripted.answer()
    end = scripted.ends[scripted.sent]
    assert end.window is not None
    assert end.window.transport_s == pytest.approx(0.02, rel=0.05)
    assert end.stay_s > 0.0


@pytest.mark.parametrize("fields", [{"target_s": 0.006}, {"target_s": 2.0, "waited_s": 1.995}])
def test_the_target_of_the_row_bounds_its_linger(fields: dict[str, Any]) -> None:
    scripted = Scripted(SLOW_START)
    scripted.start(target_s=2.0)
    assert not scripted.serving.sent, "waiting pays"
    scripted.start(**fields)
    assert scripted.running() == [2, 1]
    scripted.answer()
    window = scripted.ends[2].window
    assert window is not None
    assert scripted.ends[2].batch_cause == "linger"
    assert (window.target_s, window.objective_s) == pytest.approx((fields["target_s"], 0.0055), abs=6e-4)


def test_a_row_without_an_objective_has_the_default_target() -> None:
    scripted = Scripted()
    scripted.start()
    scripted.answer()
    window = scripted.ends[1].window
    assert window is not None
    assert (window.target_s, window.objective_s) == pytest.approx((0.05, 0.05))


def test_rows_with_a_later_target_go_after_those_without_an_objective() -> None:
    scripted = Scripted()
    scripted.start()
    patient = [scripted.start(target_s=2.0) for _ in range(60)]
    urgent = [scripted.start() for _ in range(60)]
    scripted.answer()
    assert scripted.running() == urgent + patient[:40]
    scripted.answer()
    window = scripted.ends[urgent[0]].window
    assert window is not None
    assert window.target_s == 0.05, "of the row due first, not of the oldest"


def test_a_tight_target_shortens_the_turns_of_tenants() -> None:
    rows = []
    for target_s in (0.0, 0.01):
        scripted = Scripted(costly(VECTORS))
        scripted.start()
        for _ in range(80):
            scripted.start(tenant_id="greedy")
        scripted.start(target_s=target_s)
        scripted.answer()
        rows.append(len(scripted.running()))
    assert rows[1] < rows[0]
