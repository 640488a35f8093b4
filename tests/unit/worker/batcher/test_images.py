"""Images whose size is free: batches of one size, with time limits and memory of their pixels."""

from __future__ import annotations

import pytest

from services.core.fixed_cost.rows import RawTensor
from services.core.fixed_cost.signature import ANY, Operation, TensorSpec
from services.core.poison.suspicion import LossCause
from services.worker.batcher.batch_choice import FIRST_ROWS, ROWS_PER_CHOICE, ArrivingRows
from services.worker.engine_protocol import RowCosts, RowModel
from tests.unit.worker.batcher.scripted import SACRIFICIAL, SERVING, Scripted

TILE_S = 1.9e-3  # of a ResNet-50 on two cores
MIB = 1 << 20
IMAGES = RowModel(
    Operation.CLASSIFY,
    "float32",
    (TensorSpec("pixel_values", "FP32", (3, ANY, ANY), is_image=True),),
    512,
    False,
    RowCosts(batch_s=1e-3, row_s=2e-3, token_s=TILE_S, row_bytes=4096, token_bytes=MIB // 4),
)


@pytest.fixture
def scripted() -> Scripted:
    return Scripted(IMAGES)


def image(height: int, width: int) -> tuple[RawTensor, ...]:
    """Return an image as the batcher reads it: by its shape."""
    return (RawTensor("pixel_values", "FP32", (3, height, width), b"1"),)


def gathered(scripted: Scripted, count: int, *, side: int) -> None:
    """Run a first image, then a batch of ``count``."""
    scripted.start(image(side, side))
    for _ in range(count):
        scripted.start(image(side, side))
    scripted.answer(run_s=0.1)
    assert len(scripted.serving.sent[-1].rows) == count


def test_a_batch_of_large_images_has_the_time_of_its_pixels(scripted: Scripted) -> None:
    gathered(scripted, 55, side=224)
    assert scripted.serving.sent[-1].width == 49
    for _ in range(10):
        scripted.sweep(1.0)
    assert not scripted.serving.kills, "5 s are what it takes"
    scripted.answer(run_s=0.0)
    assert len(scripted.answered()) == 56


def test_one_large_image_alone_is_no_hang_and_one_that_hangs_is_cut(scripted: Scripted) -> None:
    scripted.start(image(512, 1024))
    scripted.sweep(5.0)
    assert not scripted.serving.kills
    scripted.sweep(10.0)
    assert len(scripted.serving.kills) == 1


def test_small_images_do_not_shorten_the_limit_of_the_first_large_one(scripted: Scripted) -> None:
    for _ in range(40):
        for _ in range(4):
            scripted.start(image(32, 32))
        scripted.answer(run_s=0.005)
        scripted.answer(run_s=0.005)
    scripted.start(image(512, 1024))
    scripted.sweep(5.0)
    assert not scripted.serving.kills
    scripted.answer(run_s=0.0)
    assert not scripted.errors()


def test_images_of_other_sizes_run_in_batches_of_their_own(scripted: Scripted) -> None:
    scripted.start(image(32, 32))
    for side in (224, 200, 224, 96):
        scripted.start(image(side, 224))
    while len(scripted.batcher):
        sent = scripted.serving.sent[-1]
        assert len({row[0].shape for row in sent.rows}) == 1
        assert sent.width in (1, 49, 21)
        scripted.answer()
    assert len(scripted.answered()) == 5


def test_a_batch_stays_within_the_memory_of_its_pixels() -> None:
    scripted = Scripted(IMAGES, memory_bytes=128 * MIB)
    scripted.start(image(224, 224))
    for _ in range(30):
        scripted.start(image(224, 224))
    scripted.answer(run_s=0.1)
    assert len(scripted.serving.sent[-1].rows) == 10
    while len(scripted.batcher):
        scripted.answer(run_s=0.1)
    assert len(scripted.answered()) == 31


def test_an_image_beyond_the_largest_is_refused_by_the_worker(scripted: Scripted) -> None:
    handle = scripted.start(image(736, 736))
    error = scripted.ends[handle].error
    assert error is not None
    assert error.message == "the row has 529 tiles of 32 x 32 pixels; the model takes 1 to 512"
    assert not scripted.serving.sent


def test_an_image_is_charged_its_time_and_no_tokens(scripted: Scripted) -> None:
    scripted.start(image(224, 224), request_id="a")
    scripted.answer(run_s=0.25)
    (use,) = scripted.usage.sequences
    assert not use.usage.prompt_tokens
    assert use.device_s == pytest.approx(0.25)


def test_sizes_that_no_longer_arrive_lose_their_share() -> None:
    arriving = ArrivingRows(512, pads=False)
    sizes = [1] * (FIRST_ROWS + ROWS_PER_CHOICE) + [49] * (4 * ROWS_PER_CHOICE)
    assert [arriving.note(tiles, place * 1e-3) for place, tiles in enumerate(sizes)] == sizes
    old, new = (arriving.expected(tiles, len(sizes) * 1e-3).rate_per_s for tiles in (1, 49))
    assert 0.0 < old < 0.1 * new


def test_a_large_image_that_kills_its_process_is_still_found(scripted: Scripted) -> None:
    gathered(scripted, 2, side=224)
    scripted.dies()
    while len(scripted.batcher):
        if SACRIFICIAL not in scripted.processes:
            scripted.attach(SACRIFICIAL)
        assert scripted.processes[SACRIFICIAL].sent[-1].width == 49
        scripted.dies(SACRIFICIAL, LossCause.FAULT)
    assert set(scripted.errors().values()) == {"POISONED_INPUT"}
    assert SERVING not in scripted.processes
