"""The process of a fixed-cost model, simulated: measured times, outputs that are a function of the row."""

from __future__ import annotations

import asyncio
import signal
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Final

from services.core.fixed_cost.rows import RawTensor
from services.core.fixed_cost.signature import ANY, Operation, TensorSpec
from services.worker import engine_protocol as wire
from services.worker.policy.engine_failures import STEP_FAILED, cause_of
from services.worker.slots.engine_process import Crashed, EngineEvents, EngineExit, Stopped
from simulator.batcher.costs import BatchCosts
from simulator.engine.poison import EngineEnding
from simulator.kernel.process import Process

MOST_TOKENS: Final = 64  # longest row
LEAST_TOKENS: Final = 2  # a row's kind and number
LAYERS: Final = 6  # layers of a model that pauses: other batches run between them
_WEIGHT_BYTES: Final = 90 * 1024 * 1024
_INPUT: Final = TensorSpec("input_ids", "INT64", (ANY,), has_length=True)
_SIGKILL: Final = -9
_EXITS: Final = {EngineEnding.SIGNALS: -signal.SIGSEGV, EngineEnding.KILLED: _SIGKILL}


def row_input(number: int, tokens: int, poison: EngineEnding | None = None) -> tuple[RawTensor, ...]:
    """Return the input of the row with a number; a poison ends each batch that contains it."""
    ids = array("q", bytes(8 * tokens))
    ids[0], ids[1] = 0 if poison is None else poison, number
    return (RawTensor(_INPUT.name, _INPUT.datatype, (tokens,), ids.tobytes()),)


def row_output(inputs: Sequence[RawTensor]) -> tuple[RawTensor, ...]:
    """Return the output of a row, by which its client recognises it."""
    return (RawTensor("output", "INT64", (1,), blake2b(inputs[0].data, digest_size=8).digest()),)


@dataclass(frozen=True, slots=True)
class SimRowVersion:
    """A fixed-cost version that a worker runs. ``load_s``: until its process is ready.

    ``by_layers``: it packs rows, and pauses between layers, as an encoder on a CPU does.
    """

    deployment: str
    version_digest: str
    costs: BatchCosts
    load_s: float = 0.5
    by_layers: bool = False

    @property
    def model(self) -> str:
        return self.deployment

    def ready(self) -> wire.Ready:
        """Return what its process reports once it is loaded."""
        one_s, two_s = self.costs.mean_s(MOST_TOKENS, 1), self.costs.mean_s(MOST_TOKENS, 2)
        costs = wire.RowCosts(
            batch_s=max(0.0, 2 * one_s - two_s),
            row_s=0.0,
            token_s=(two_s - one_s) / MOST_TOKENS,
            row_bytes=1024,
            token_bytes=1024,
        )
        return wire.Ready(
            kv_blocks_total=1,
            block_size=1,
            max_model_len=1,
            vocab_size=0,
            kv_bytes_per_block=0,
            weight_bytes=_WEIGHT_BYTES,
            rows=wire.RowModel(
                Operation.EMBED,
                "float32",
                (_INPUT,),
                MOST_TOKENS,
                packs=self.by_layers,
                costs=costs,
                pauses=self.by_layers,
            ),
        )


@dataclass(slots=True, eq=False)
class _Computed:
    """A batch that is computed. ``began_s`` and ``timer`` move on by what runs between its layers."""

    batch: wire.RunBatch
    took_s: float
    began_s: float
    timer: asyncio.TimerHandle | None = None

    @property
    def ends_s(self) -> float:
        return self.began_s + self.took_s

    def pause_s(self, now_s: float) -> float:
        """Return the end of the layer that is computed; that of the last layer is the batch's."""
        layer_s = self.took_s / LAYERS
        return self.began_s + layer_s * (1 + int((now_s - self.began_s) / layer_s))


class SimBatchRun:
    """Implements ``RunningEngine``: one batch after the other, each in a drawn time.

    Where the model pauses, a batch that is sent meanwhile runs once the layer is computed.
    """

    def __init__(
        self,
        version: SimRowVersion,
        events: EngineEvents,
        process: Process,
        *,
        slow_factor: Callable[[], float],
        ended: Callable[[SimBatchRun], None],
    ) -> None:
        """``slow_factor`` returns by how much batches take longer now; ``ended`` is called once, at the
        end."""
        self._version = version
        self._events = events
        self._process = process
        self._slow_factor = slow_factor
        self._ended = ended
        self._rng = Random(process.rng.getrandbits(64))
        self._ready = self._over = self._hangs = False
        self._computed: _Computed | None = None
        self._next: list[tuple[wire.RunBatch, float]] = []

    @property
    def pid(self) -> int:
        return 0

    @property
    def silent_s(self) -> float:
        return 0.0

    @property
    def members(self) -> tuple[int, ...]:
        return ()

    async def start(self) -> None:
        self._process.call_later(self._version.load_s, self._loaded)

    def send(self, command: wire.Command) -> bool:
        if self._over or not self._ready:
            return False
        assert isinstance(command, wire.RunBatch), "it has no sequences"
        took_s = self._slow_factor() * self._version.costs.draw_s(command.width, len(command.rows), self._rng)
        now_s = self._process.clock.monotonic_s()
        running = self._computed
        if running is None:
            self._compute(command, took_s)
        elif self._version.by_layers and (pause_s := running.pause_s(now_s)) < running.ends_s:
            running.began_s += took_s
            self._process.call_later(pause_s + took_s - now_s, self._ran, command, took_s)
            self._set_timer(running)
        else:
            self._next.append((command, took_s))
        return True

    async def stop(self) -> None:
        self._end(Stopped())

    def kill(self, reason: str) -> None:
        self._process.call_soon(self.crash, reason)  # a process ends after its signal

    def crash(self, message: str, code: int = _SIGKILL) -> None:
        """The process ends, by default killed. It has no effect once it has ended."""
        self._end(Crashed(code, message, cause_of(code)))

    def hang(self) -> None:
        """From now on no batch ends."""
        self._hangs = True

    def _loaded(self) -> None:
        if not self._over:
            self._ready = True
            self._events.on_ready(self._version.ready())

    def _compute(self, batch: wire.RunBatch, took_s: float) -> None:
        self._computed = _Computed(batch, took_s, self._process.clock.monotonic_s())
        self._set_timer(self._computed)

    def _set_timer(self, computed: _Computed) -> None:
        if computed.timer is not None:
            computed.timer.cancel()
        left_s = computed.ends_s - self._process.clock.monotonic_s()
        computed.timer = self._process.call_later(left_s, self._computed_all, computed)

    def _computed_all(self, computed: _Computed) -> None:
        """Answer a batch and begin the next."""
        self._computed = None
        if self._next:
            self._compute(*self._next.pop(0))
        self._ran(computed.batch, computed.took_s)

    def _ran(self, batch: wire.RunBatch, took_s: float) -> None:
        if self._over or self._hangs:
            return
        poison = next(filter(None, map(_poison_of, batch.rows)), None)
        if poison is None:
            outputs = [row_output(row) for row in batch.rows]
            self._events.on_batch(wire.BatchRan(batch.number, took_s, outputs))
        elif poison is EngineEnding.RAISES:
            self._events.on_batch(wire.BatchRaised(batch.number, took_s, "ValueError"))
        elif poison is EngineEnding.HANGS:
            self._hangs = True
        else:
            self.crash(f"a row ended it: {poison.name}", _EXITS.get(poison, STEP_FAILED))

    def _end(self, exit_: EngineExit) -> None:
        if not self._over:
            self._over = True
            self._ended(self)
            self._events.on_exit(exit_)


def _poison_of(row: Sequence[RawTensor]) -> EngineEnding | None:
    kind = int.from_bytes(row[0].data[:8], "little")
    return EngineEnding(kind) if kind else None
