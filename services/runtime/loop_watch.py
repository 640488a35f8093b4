"""Watches the event loop, from inside by a timer and from outside by a thread.

A loop that is stuck runs no timer, answers no health check and renews no lease. The thread sees it all the
same: it writes down where the loop stands, and ends the process when the loop does not come back, so that
whoever runs it starts a new one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

import structlog

from services.ports.clock import Clock
from services.runtime.metrics import LATENCY_S, Metrics

log = structlog.get_logger()

TICK_S: Final = 0.1
STALL_S: Final = 2.0  # reported with a stack
FATAL_S: Final = 60.0
EXIT_STUCK: Final = 70
LATE_S: Final = 1.0  # a lag of this much makes the loop unfit for work


class LoopWatch:
    """``run`` is a task of the loop; ``start`` starts the thread."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        *,
        stall_s: float = STALL_S,
        fatal_s: float = FATAL_S,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._fatal_s = fatal_s
        self._end = end
        self._beat_s = time.monotonic()
        self._lag_s = 0.0
        self._lag = metrics.histogram(
            "fairway_runtime_loop_lag_seconds",
            "From when a timer of the event loop is due until it runs, sampled ten times a second",
            bounds=LATENCY_S,
        ).cell()
        self._stalls = metrics.counter(
            "fairway_runtime_loop_stalls_total", f"Times that the event loop ran nothing for {stall_s:g} s"
        ).cell()
        self._loop_thread = 0
        self._stopped = threading.Event()

    async def run(self) -> None:
        """Measure the lag until cancelled."""
        self._loop_thread = threading.get_ident()
        while True:
            began_s = self._clock.monotonic_s()
            await self._clock.sleep(TICK_S)
            self._beat_s = now_s = self._clock.monotonic_s()
            self._lag_s = max(0.0, now_s - began_s - TICK_S)
            self._lag.observe(self._lag_s)
            if self._lag_s >= self._stall_s:
                self._stalls.add()

    def problem(self) -> str:
        """Return what a health check says: empty while timers run on time."""
        return f"the event loop is {self._lag_s:.1f} s behind" if self._lag_s >= LATE_S else ""

    def start(self) -> None:
        """Watch from a thread until ``stop``."""
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        told = False
        ticked_s = awake_s = time.monotonic()
        while not self._stopped.wait(TICK_S):
            now_s = time.monotonic()
            if now_s - ticked_s > 5 * TICK_S:  # the whole process stood still, this thread too
                awake_s = now_s
            ticked_s = now_s
            quiet_s = now_s - max(self._beat_s, awake_s)
            if quiet_s < self._stall_s:
                told = False
                continue
            if not told:
                told = True
                log.error("loop.stalled", quiet_s=round(quiet_s, 1), at=self._stack())
            if quiet_s >= self._fatal_s:
                log.critical("loop.stuck", quiet_s=round(quiet_s, 1), exit_code=EXIT_STUCK)
                self._end(EXIT_STUCK)
                return

    def _stack(self) -> list[str]:
        """Where the loop's thread stands: files, lines and functions, none of their values."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return []
        return [
            f"{entry.filename}:{entry.lineno} {entry.name}" for entry in traceback.extract_stack(frame)[-12:]
        ]
