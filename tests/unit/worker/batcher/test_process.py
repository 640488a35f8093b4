"""The process of a fixed-cost model, without its socket: rows are checked, batches run or raise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from services.core.fixed_cost.rows import RawTensor
from services.worker.batcher.models.model import Outputs, Pause, no_pause
from services.worker.batcher.models.rows import Batch
from services.worker.batcher.process import BatchRunner, load, row_of
from services.worker.engine.unsupported import TooLittleMemory
from services.worker.engine_protocol import (
    BatchRaised,
    BatchRan,
    EngineConfig,
    EngineMessage,
    RunBatch,
    decode_command,
    decode_event,
    encode,
)
from tests.support.fixed_cost import save, save_pooling, token_row
from tests.support.poisoned_batcher import POISON, PoisonedModel, RowFault
from tests.unit.worker.batcher.models.test_loading import save_mlp

RAISES = 9
GOOD = RawTensor("input", "FP32", (6,), np.ones(6, np.float32).tobytes())


def config(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(socket_path="", model_dir=str(folder), executor="rows", **fields)


def mlp(folder: Path) -> BatchRunner:
    save_mlp(folder)
    runner, _ = load(config(folder), lambda phase, ratio: None, around=PoisonedModel)
    return runner


def over_the_socket(runner: BatchRunner, command: RunBatch) -> BatchRan | BatchRaised:
    """Return the answer as the agent receives it."""
    received = decode_command(encode(command)[4:])
    runner.apply(received)
    assert runner.has_work
    answer = decode_event(encode(runner.step())[4:])
    assert not runner.has_work
    assert isinstance(answer, BatchRan | BatchRaised)
    return answer


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (structs.replace(GOOD, datatype="FP16"), "data type"),
        (structs.replace(GOOD, data=b"1234"), "bytes"),
        (structs.replace(GOOD, shape=(7,)), "bytes"),
        (structs.replace(GOOD, shape=(2**30,) * 16), "bytes"),
        (structs.replace(GOOD, name="other"), "no input"),
        (structs.replace(GOOD, shape=(2, 3)), "shape"),
    ],
)
def test_a_row_that_is_wrong_is_named_and_the_others_run(
    tensor: RawTensor, problem: str, tmp_path: Path
) -> None:
    answer = over_the_socket(mlp(tmp_path), RunBatch(3, [(GOOD,), (tensor,), (GOOD,), (GOOD, GOOD), ()]))
    assert isinstance(answer, BatchRan)
    assert problem in answer.problems[1]
    assert answer.problems.keys() == {1, 3, 4}
    (output,) = answer.outputs[0]
    assert (output.name, output.datatype, output.shape) == ("output", "FP32", (3,))
    assert answer.outputs[2] == answer.outputs[0]
    assert answer.outputs[1] == ()
    assert answer.run_s > 0.0


def test_a_batch_of_wrong_rows_does_not_run(tmp_path: Path) -> None:
    answer = over_the_socket(mlp(tmp_path), RunBatch(1, [()]))
    assert isinstance(answer, BatchRan)
    assert answer.outputs == [()]


def test_a_batch_that_raises_is_reported_without_its_text_and_the_process_goes_on(tmp_path: Path) -> None:
    runner = mlp(tmp_path)
    poison = structs.replace(GOOD, data=np.full(6, POISON + RowFault.RAISES, np.float32).tobytes())
    answer = over_the_socket(runner, RunBatch(1, [(GOOD,), (poison,)]))
    assert isinstance(answer, BatchRaised)
    assert answer.message == "RuntimeError"
    assert isinstance(over_the_socket(runner, RunBatch(2, [(GOOD,)])), BatchRan)


def test_rows_of_several_lengths_have_no_padding(tmp_path: Path) -> None:
    save("Bert", "Model", tmp_path)
    save_pooling(tmp_path)
    runner, ready = load(config(tmp_path), lambda phase, ratio: None)
    assert ready.rows is not None
    assert ready.rows.packs
    assert ready.rows.costs.token_bytes > 0
    rng = np.random.default_rng(2)
    rows = [token_row(rng, length) for length in (30, 2, 7)]
    raw = [tuple(RawTensor(n, "INT64", v.shape, v.tobytes()) for n, v in row.items()) for row in rows]
    together = over_the_socket(runner, RunBatch(1, raw, 40))
    assert isinstance(together, BatchRan)
    for row, outputs in zip(raw, together.outputs, strict=True):
        alone = over_the_socket(runner, RunBatch(2, [row], 40))
        assert isinstance(alone, BatchRan)
        (one,), (other,) = alone.outputs[0], outputs
        found, expected = (np.frombuffer(each.data, np.float32) for each in (other, one))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_whose_longest_row_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    with pytest.raises(TooLittleMemory):
        load(config(tmp_path, memory_bytes=10_000, kv_memory_bytes=100), lambda phase, ratio: None)


def test_arrays_of_a_row_refer_to_what_was_received() -> None:
    row = row_of([GOOD])
    assert not row["input"].flags.owndata
    assert row["input"].tolist() == [1.0] * 6


def test_an_allocation_beyond_the_bound_fails() -> None:
    program = (
        "from services.worker.batcher.process import bound_memory\n"
        "import numpy as np\n"
        "np.ones(1 << 22)\n"
        "bound_memory(64 << 20)\n"
        "np.ones(1 << 20)\n"
        "try:\n"
        "    np.ones(1 << 26)\n"
        "except MemoryError:\n"
        "    print('bounded')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "bounded", done.stderr


# --- between the layers of a batch -------------------------------------------------------------------


class Arriving:
    """Implements ``StepLink``: commands arrive at the first pause, and answers are kept."""

    def __init__(self, runner: BatchRunner, *commands: RunBatch) -> None:
        self._runner = runner
        self._commands = list(commands)
        self.sent: list[EngineMessage] = []
        runner.connect(self)

    def receive(self) -> None:
        while self._commands:
            self._runner.apply(self._commands.pop())

    def send(self, message: EngineMessage) -> None:
        self.sent.append(message)


class RaisingModel(PoisonedModel):
    """Raises for rows that begin with ``RAISES``."""

    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        if any(row["input_ids"][0] == RAISES for row in batch.rows):
            raise RuntimeError("device-side assert triggered")
        return super().run(batch, pause)


def encoder(folder: Path) -> BatchRunner:
    save("Bert", "Model", folder, seed=3)
    save_pooling(folder)
    runner, ready = load(config(folder), lambda phase, ratio: None, around=RaisingModel)
    assert ready.rows is not None
    assert ready.rows.pauses
    return runner


def token_tensor(length: int, first: int = 1) -> tuple[RawTensor, ...]:
    ids = np.full(length, 2, np.int64)
    ids[0] = first
    return (RawTensor("input_ids", "INT64", (length,), ids.tobytes()),)


def test_a_batch_that_arrives_runs_between_the_layers_and_is_answered_first(tmp_path: Path) -> None:
    runner = encoder(tmp_path)
    alone = [over_the_socket(runner, RunBatch(1, [token_tensor(length)])) for length in (20, 3)]
    link = Arriving(runner, RunBatch(3, [token_tensor(3)]))
    answer = over_the_socket(runner, RunBatch(2, [token_tensor(20)]))
    (between,) = link.sent
    assert isinstance(between, BatchRan)
    assert isinstance(answer, BatchRan)
    assert (between.number, answer.number) == (3, 2)
    for found, expected in zip((answer, between), alone, strict=True):
        assert isinstance(expected, BatchRan)
        own, other = (np.frombuffer(one.outputs[0][0].data, np.float32) for one in (found, expected))
        np.testing.assert_allclose(own, other, atol=1e-5)


def test_the_time_of_a_batch_between_layers_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = encoder(tmp_path)
    times = iter(range(100))
    monkeypatch.setattr("services.worker.batcher.process.time.perf_counter", lambda: float(next(times)))
    link = Arriving(runner, RunBatch(3, [token_tensor(3)]))
    answer = over_the_socket(runner, RunBatch(2, [token_tensor(20)]))
    (between,) = link.sent
    assert isinstance(between, BatchRan)
    assert between.run_s == 1.0  # seconds of this clock are its readings
    assert answer.run_s == 2.0, "five readings between its first and last, less three of the pause"


def test_a_batch_that_raises_between_layers_ends_alone(tmp_path: Path) -> None:
    runner = encoder(tmp_path)
    link = Arriving(runner, RunBatch(3, [token_tensor(3, RAISES)]))
    answer = over_the_socket(runner, RunBatch(2, [token_tensor(20)]))
    assert isinstance(answer, BatchRan)
    assert [type(message) for message in link.sent] == [BatchRaised]
