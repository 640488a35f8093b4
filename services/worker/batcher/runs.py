"""The batches that run: one in each process, and one more between the layers of the batch that serves.

A batch is announced by its number, so that the end of a process names the rows that ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.core.fixed_cost.rows import BatchWindow
from services.ports.clock import Clock
from services.worker.batcher.policy.cost_curve import CostCurve
from services.worker.batcher.policy.isolation import RunPlace
from services.worker.batcher.search import RowSearch
from services.worker.engine_protocol import RunBatch
from services.worker.slots.engine_process import RunningEngine
from services.worker.streams.live_row import LiveRow


@dataclass(slots=True, eq=False)
class BatchRun:
    """A batch that a process was sent. Times are of the worker's monotonic clock."""

    number: int
    rows: tuple[LiveRow, ...]
    # Tokens to which its rows are padded, or that stand for them where they are packed.
    width: int
    # Why it started.
    cause: str
    began_s: float
    # Longest time until its answer.
    limit_s: float
    # The search that it is a part of; such a batch has no window.
    search: RowSearch | None = None
    hung: bool = False
    # How its start was derived; None: of a search, or between layers.
    window: BatchWindow | None = None
    # Rows that it might have had; 0: as many as the limits allow.
    most_rows: int = 0
    # Whether it was sent while another one ran.
    between: bool = False
    # What batches between its layers were predicted to take, and took.
    lent_s: float = 0.0
    paused_s: float = 0.0
    # Earliest next search for rows to run between its layers.
    look_s: float = 0.0


class BatchRuns:
    """Single writer: the batcher."""

    def __init__(self, curve: CostCurve, clock: Clock) -> None:
        self._curve = curve
        self._clock = clock
        self._last = 0
        self._runs: dict[RunPlace, BatchRun] = {}
        self._between: BatchRun | None = None
        self.processes: dict[RunPlace, RunningEngine] = {}

    def __iter__(self) -> Iterator[BatchRun]:
        yield from self._runs.values()
        if self._between is not None:
            yield self._between

    def __contains__(self, place: RunPlace) -> bool:
        return place in self._runs

    @property
    def serving(self) -> BatchRun | None:
        """The batch that runs in the process that serves."""
        return self._runs.get(RunPlace.SERVING)

    @property
    def has_between(self) -> bool:
        """Whether a batch runs between the layers of the serving one."""
        return self._between is not None

    def start(
        self,
        place: RunPlace,
        rows: Sequence[LiveRow],
        width: int,
        cause: str,
        *,
        search: RowSearch | None = None,
        window: BatchWindow | None = None,
        most_rows: int = 0,
    ) -> None:
        """Send a batch to a process that runs none."""
        assert place not in self._runs, "one batch at a time"
        run = self._new(rows, width, cause)
        run.search, run.window, run.most_rows = search, window, most_rows
        self._runs[place] = run
        self._send(place, run)

    def start_between(self, rows: Sequence[LiveRow], width: int, cause: str) -> None:
        """Send a batch to run between the layers of the serving one, which ends after it."""
        serving = self._runs[RunPlace.SERVING]
        assert self._between is None, "one batch between layers at a time"
        run = self._new(rows, width, cause)
        serving.limit_s += run.limit_s
        serving.lent_s += self._curve.mean_s(width, len(rows))
        run.between, run.limit_s = True, serving.began_s + serving.limit_s - run.began_s
        self._between = run
        self._send(RunPlace.SERVING, run)

    def answered(self, place: RunPlace, number: int, run_s: float) -> BatchRun | None:
        """Remove and return the batch with this number, which took ``run_s``; None: there is none.

        A batch between layers that outlasts the serving one has come too late to run between them: it is the
        serving one from then on.
        """
        if place is RunPlace.SERVING and (between := self._between) is not None and between.number == number:
            self._between = None
            if (serving := self.serving) is not None:
                serving.paused_s += run_s
            return between
        run = self._runs.get(place)
        if run is None or run.number != number:
            return None
        del self._runs[place]
        if place is RunPlace.SERVING and self._between is not None:
            self._runs[place], self._between = self._between, None
        return run

    def ended(self, place: RunPlace) -> list[BatchRun]:
        """Remove and return the batches of a process that ended."""
        self.processes.pop(place, None)
        found = [] if (run := self._runs.pop(place, None)) is None else [run]
        if place is RunPlace.SERVING and self._between is not None:
            found.append(self._between)
            self._between = None
        return found

    def clear(self) -> None:
        """Forget all batches."""
        self._runs.clear()
        self._between = None

    def kill_hung(self, now_s: float) -> None:
        """Kill each process with a batch beyond its limit. Any of its batches may be the one that hangs."""
        for place, run in self._runs.items():
            if run.hung or now_s - run.began_s <= run.limit_s:
                continue
            run.hung = True
            if place is RunPlace.SERVING and self._between is not None:
                self._between.hung = True
            self.processes[place].kill(f"a batch of {len(run.rows)} rows took over {run.limit_s:.1f} s")

    def reset_silence(self) -> None:
        """Start the time limits again after a pause of this process: messages are still unread."""
        for run in self:
            run.began_s = self._clock.monotonic_s()

    def _new(self, rows: Sequence[LiveRow], width: int, cause: str) -> BatchRun:
        self._last += 1
        limit_s = self._curve.limit_s(width, len(rows))
        return BatchRun(self._last, tuple(rows), width, cause, self._clock.monotonic_s(), limit_s)

    def _send(self, place: RunPlace, run: BatchRun) -> None:
        command = RunBatch(run.number, [row.spec.inputs for row in run.rows], run.width)
        if not self.processes[place].send(command):
            self.processes[place].kill("the process takes no batches")
