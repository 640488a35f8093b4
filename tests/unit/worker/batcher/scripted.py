"""A batcher whose processes are lists of commands, and a stream that keeps what it receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import structs

from services.core.fixed_cost.rows import RawTensor, RowEnd, RowSpec
from services.core.fixed_cost.signature import Operation, TensorSpec
from services.core.poison.suspicion import LossCause
from services.core.records import Priority
from services.worker.batcher.batch_choice import FIRST_ROWS
from services.worker.batcher.charges import RowCharges
from services.worker.batcher.driver import Batcher, BatcherContext
from services.worker.batcher.policy.isolation import RunPlace
from services.worker.batcher.telemetry import BatcherTelemetry
from services.worker.engine_protocol import BatchRaised, BatchRan, Command, RowCosts, RowModel, RunBatch
from services.worker.slots.engine_process import Crashed, Stopped
from services.worker.step_recorder import StepRecorder
from services.worker.streams.charges import DeviceKind, DeviceTime, Tally
from services.worker.streams.outbox import Outbox
from tests.support.clocks import HandClock
from tests.support.kept_usage import KeptUsage

DIGEST: Final = "sha256:" + "d" * 64
SERVING, SACRIFICIAL = RunPlace.SERVING, RunPlace.SACRIFICIAL
CHEAP: Final = RowCosts(batch_s=1e-5, row_s=1e-4, token_s=0.0, row_bytes=1, token_bytes=0)
VECTORS: Final = RowModel(Operation.INFER, "float32", (TensorSpec("x", "FP32", (1,)),), 0, False, CHEAP)
TEXTS: Final = RowModel(
    Operation.EMBED,
    "float32",
    (TensorSpec("input_ids", "INT64", (-1,), has_length=True),),
    64,
    True,
    RowCosts(batch_s=1e-5, row_s=1e-4, token_s=1e-6, row_bytes=1, token_bytes=1),
)

# Other batches run between its layers.
LAYERS: Final = structs.replace(TEXTS, pauses=True, costs=RowCosts(0.0, 0.0, 1e-4, 1, 1))


class ScriptedProcess:
    """Implements ``RunningEngine``: keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[RunBatch] = []
        self.kills: list[str] = []

    @property
    def pid(self) -> int:
        return 1

    @property
    def silent_s(self) -> float:
        return 0.0

    @property
    def members(self) -> tuple[int, ...]:
        return ()

    async def start(self) -> None: ...

    def send(self, command: Command) -> bool:
        assert isinstance(command, RunBatch)
        self.sent.append(command)
        return True

    def kill(self, reason: str) -> None:
        self.kills.append(reason)

    async def stop(self) -> None: ...


class KeptSacrifice:
    """Implements ``driver.Sacrifice``: keeps whether a process is wanted."""

    def __init__(self) -> None:
        self.wanted = False

    def start(self) -> None:
        self.wanted = True

    def stop(self) -> None:
        self.wanted = False


def vector(text: str = "1234", shape: tuple[int, ...] = (1,)) -> tuple[RawTensor, ...]:
    return (RawTensor("x", "FP32", shape, text.encode()),)


def text(length: int) -> tuple[RawTensor, ...]:
    return (RawTensor("input_ids", "INT64", (length,), bytes(8 * length)),)


@dataclass
class Scripted:
    """One batcher. ``ends`` keeps each row's end by handle."""

    model: RowModel = VECTORS
    clock: HandClock = field(default_factory=HandClock)
    usage: KeptUsage = field(default_factory=KeptUsage)
    tally: Tally = field(default_factory=Tally)
    sacrifice: KeptSacrifice = field(default_factory=KeptSacrifice)
    timers: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    ends: dict[int, RowEnd] = field(default_factory=dict)
    draining: bool = False
    memory_bytes: int = 0
    telemetry: BatcherTelemetry | None = None
    sent: int = 0

    def __post_init__(self) -> None:
        self.device = DeviceTime(DeviceKind("w1"), self.usage, self.clock)
        self.outbox = Outbox(lambda: None)
        self.recorder = StepRecorder(self.clock)
        context = BatcherContext(
            clock=self.clock,
            call_later=lambda delay_s, call: self.timers.append((self.clock.now_s + delay_s, call)),
            changed=lambda: None,
            draining=lambda: self.draining,
            charges=RowCharges(DIGEST, "m", self.tally, self.device),
            recorder=self.recorder.engine(DIGEST, "m", rows=True),
            sacrifice=self.sacrifice,
            telemetry=self.telemetry,
        )
        self.batcher = Batcher(DIGEST, self.model, memory_bytes=self.memory_bytes, context=context)
        self.processes: dict[RunPlace, ScriptedProcess] = {}
        self.attach(SERVING)

    def attach(self, place: RunPlace, *, load_s: float = 0.0) -> ScriptedProcess:
        process = self.processes[place] = ScriptedProcess()
        self.batcher.attach(place, process, load_s=load_s)
        return process

    @property
    def serving(self) -> ScriptedProcess:
        return self.processes[SERVING]

    def start(self, inputs: tuple[RawTensor, ...] | None = None, **fields: Any) -> int:
        """Start a row; return its handle."""
        self.sent += 1
        values: dict[str, Any] = {
            "request_id": f"r{self.sent}",
            "row": 0,
            "tenant_id": "t1",
            "version_digest": DIGEST,
            "inputs": inputs if inputs is not None else vector(f"{self.sent:04}"),
            "priority": Priority.STANDARD,
        }
        self.batcher.start(self.outbox, self.sent, RowSpec(**{**values, **fields}))
        self.collect()
        return self.sent

    def cancel(self, *handles: int) -> None:
        rows = [row for handle in handles if (row := self.outbox.drop_row(handle)) is not None]
        self.batcher.cancel(rows)
        self.collect()

    def running(self, place: RunPlace = SERVING, back: int = 1) -> list[int]:
        """Return the rows of the latest batch that was sent, by handle: a row's data is its handle."""
        return [int(row[0].data) for row in self.processes[place].sent[-back].rows]

    def answer(self, place: RunPlace = SERVING, run_s: float = 0.001, back: int = 1, **fields: Any) -> None:
        """End a batch of the process, the latest or one ``back``, with the rows' inputs as outputs."""
        batch = self.processes[place].sent[-back]
        self.clock.now_s += run_s
        problems = fields.pop("problems", {})
        outputs = [() if index in problems else row for index, row in enumerate(batch.rows)]
        self.batcher.on_batch(place, BatchRan(batch.number, run_s, outputs, problems))
        self.collect()

    def raises(self, place: RunPlace = SERVING, back: int = 1) -> None:
        batch = self.processes[place].sent[-back]
        self.clock.now_s += 0.001
        self.batcher.on_batch(place, BatchRaised(batch.number, 0.001, "RuntimeError"))
        self.collect()

    def dies(self, place: RunPlace = SERVING, cause: LossCause = LossCause.FAULT) -> None:
        self.processes.pop(place)
        self.batcher.detach(place, Crashed(-11, "it ended", cause))
        self.collect()

    def stops(self, place: RunPlace = SERVING) -> None:
        self.processes.pop(place)
        self.batcher.detach(place, Stopped())
        self.collect()

    def sweep(self, after_s: float) -> None:
        self.clock.now_s += after_s
        self.batcher.sweep(self.clock.now_s)
        self.collect()

    def fire(self) -> None:
        """Let all timers run out."""
        timers, self.timers = self.timers, []
        for due_s, call in timers:
            self.clock.now_s = max(self.clock.now_s, due_s)
            call()
        self.collect()

    def collect(self) -> None:
        while (frame := self.outbox.take()) is not None:
            for handle, end in frame.rows:
                assert handle not in self.ends, "two ends of a row"
                self.ends[handle] = end
        self.batcher.check_integrity()

    def answered(self) -> list[int]:
        return sorted(handle for handle, end in self.ends.items() if end.outputs)

    def errors(self) -> dict[int, str]:
        return {handle: end.error.reason for handle, end in self.ends.items() if end.error is not None}

    def lost(self) -> list[int]:
        return sorted(handle for handle, end in self.ends.items() if end.lost)


def fill(scripted: Scripted, count: int) -> Sequence[int]:
    """Start rows behind a first one, whose batch is answered, so that they form one batch."""
    first = scripted.start()
    rows = [scripted.start() for _ in range(count)]
    scripted.answer()
    assert first in scripted.ends
    assert scripted.running() == rows
    return rows


def row_of(scripted: Scripted, length: int) -> tuple[RawTensor, ...]:
    """Return the inputs of the next row, whose data is its handle; models without lengths have one alike."""
    data = f"{scripted.sent + 1:04}".encode()
    if not scripted.model.max_tokens:
        return vector(data.decode())
    return (RawTensor("input_ids", "INT64", (length,), data),)


def train(scripted: Scripted) -> None:
    """Let it learn the widths and their costs."""
    for each in [2, 64] * (FIRST_ROWS // 2 + 1):
        scripted.start(row_of(scripted, each))
        scripted.fire()
        scripted.answer(run_s=each * 1e-4)
    assert not len(scripted.batcher)
