"""The import of a model with its progress: bytes, rate and the time that is left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fairway.cli.errors import CliError
from fairway.cli.fleet.options import SMOLLM2, SMOLLM2_SOURCE, DefaultModel, UpOptions, smollm2_changes
from fairway.cli.fleet.progress import StartProgress
from fairway.cli.state import StateDir
from fairway.cli.terminal.cells import show_bytes
from fairway.importing.sources import Changes, Imported, ImportRefused, Phase, import_source

Show = Callable[[float | None, str, str], None]  # ratio, phase, figures


class _Stopped(Exception):
    """The user interrupts the import."""


@dataclass(slots=True)
class Rate:
    """How fast the bytes of a phase come, and how long the rest takes."""

    phase: str = ""
    began_s: float = 0.0
    began_bytes: int = 0  # there from an earlier attempt

    def describe(self, phase: str, done: int, total: int, now_s: float) -> str:
        if phase != self.phase:
            self.phase, self.began_s, self.began_bytes = phase, now_s, done
        elapsed_s, new = now_s - self.began_s, done - self.began_bytes
        if not total or elapsed_s <= 0 or new <= 0:
            return ""
        left_s = (total - done) * elapsed_s / new
        rate = show_bytes(int(new / elapsed_s))
        return f"{show_bytes(done)} of {show_bytes(total)}, {rate}/s, {left_s:.0f} s left"


@dataclass(slots=True)
class _Reporter:
    """Receives progress in the importing thread, and ends it once the user has interrupted."""

    show: Show
    stopped: threading.Event = field(default_factory=threading.Event)
    rate: Rate = field(default_factory=Rate)

    def __call__(self, phase: Phase, done: int, total: int) -> None:
        if self.stopped.is_set():
            raise _Stopped
        figures = self.rate.describe(phase, done, total, time.monotonic())
        self.show(done / total if total else None, phase, figures)


async def fetched(
    source: str, cache: Path, show: Show, changes: Changes, *, most_bytes_per_s: int = 0
) -> Imported:
    """Return the checkpoint of a source; ``show`` is called in another thread. Raises CliError."""
    reporter = _Reporter(show)
    try:
        return await asyncio.to_thread(
            import_source, source, cache, reporter, changes, most_bytes_per_s=most_bytes_per_s
        )
    except asyncio.CancelledError:
        reporter.stopped.set()
        raise
    except ImportRefused as error:
        raise CliError(
            "IMPORT_REFUSED", f"cannot import {source}: {error}", next_step=error.next_step
        ) from error
    except OSError as error:
        raise CliError(
            "IMPORT_FAILED",
            f"cannot import {source}: {error}",
            next_step="mend what it names, then run it again",
        ) from error


async def with_model(options: UpOptions, state: StateDir, progress: StartProgress) -> UpOptions:
    """Return options with the folder of their model: where it cannot be fetched, that of the tiny model."""
    if not options.is_fetched:
        return options
    loop = asyncio.get_running_loop()

    def show(ratio: float | None, phase: str, figures: str) -> None:
        loop.call_soon_threadsafe(progress.event, SMOLLM2, "starting", f"{phase} {figures}".rstrip())

    try:
        found = await fetched(SMOLLM2_SOURCE, state.imports, show, smollm2_changes())
    except CliError as error:
        problem = " ".join(f"{error.message}; {error.next_step}".split())
        progress.event(SMOLLM2, "failed", f"the tiny model is served instead: {problem}")
        return replace(options, model=DefaultModel.TINY)
    progress.event(SMOLLM2, "ready", "; ".join(found.facts))
    return replace(options, model_dir=str(found.folder))
