"""The import of a model with its progress: bytes, rate and the time that is left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fairway.cli.errors import CliError
from fairway.cli.targets import DEFAULT_STATE_DIR
from fairway.cli.terminal.bars import Bars
from fairway.cli.terminal.cells import show_bytes
from fairway.importing.sources import Imported, ImportRefused, Phase, import_source

IMPORTS: Final = DEFAULT_STATE_DIR / "imports"


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

    show: Callable[[float | None, str, str], None]  # ratio, phase, figures
    stopped: threading.Event = field(default_factory=threading.Event)
    rate: Rate = field(default_factory=Rate)

    def __call__(self, phase: Phase, done: int, total: int) -> None:
        if self.stopped.is_set():
            raise _Stopped
        figures = self.rate.describe(phase, done, total, time.monotonic())
        self.show(done / total if total else None, phase, figures)


async def fetched(source: str, cache: Path, bars: Bars, *, chat_template: str = "") -> Imported:
    """Return the checkpoint of a source, with bars meanwhile. Raises CliError."""
    reporter = _Reporter(lambda ratio, phase, figures: bars.update(source, ratio, phase, figures))
    try:
        return await asyncio.to_thread(import_source, source, cache, reporter, chat_template=chat_template)
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
            next_step="mend what it names, then run it again: what was fetched is kept",
        ) from error
