"""What happened in a run, in order: a digest always, the lines only for a reader."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b


class Trace:
    """Two runs with the same digest recorded the same events at the same times."""

    def __init__(self, now_s: Callable[[], float], show: Callable[[str], None] | None = None) -> None:
        self._now_s = now_s
        self._show = show
        self._digest = blake2b(digest_size=16)
        self.events = 0

    def note(self, subject: str, event: str, detail: str = "") -> None:
        """Add an event: who, what and with what."""
        now_s = self._now_s()
        self.events += 1
        self._digest.update(f"{now_s!r}\0{subject}\0{event}\0{detail}\n".encode())
        if self._show is not None:
            self._show(f"{now_s:12.6f}  {subject:14} {event:20} {detail}")

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()
