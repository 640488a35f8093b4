"""Whether a gateway's stream to a worker goes on: what was heard on it, what is asked, and who needs it."""

from __future__ import annotations

from typing import Final

from services.adapters.links.frame_dispatch import SinkTable

CHECK_S: Final = 1.0  # between two looks
ANSWER_S: Final = 5.0  # for how long a worker that beats may leave a start unanswered


class LinkHealth:
    """Judges one stream by its sinks and by when it was heard. All times are of one monotonic clock."""

    def __init__(self, sinks: SinkTable, now_s: float, *, silence_s: float, idle_s: float) -> None:
        """A worker silent for ``silence_s`` is lost; a stream without sequences ends after ``idle_s``."""
        self._sinks = sinks
        self._silence_s = silence_s
        self._idle_s = idle_s
        self._heard_s = self._busy_s = now_s

    def heard(self, now_s: float) -> None:
        """The worker said something, be it a heartbeat."""
        self._heard_s = now_s

    def why_over(self, now_s: float, *, looked_s: float) -> str | None:
        """Return why the stream ends: it fell silent, its worker does not hear, or nobody needs it. None
        while it goes on. ``looked_s`` is when the owner looked last.

        An owner that looks late stood still itself, and what was said meanwhile waits unread: every wait
        for the worker begins anew.
        """
        if now_s - looked_s > 2 * CHECK_S:
            self._heard_s = now_s
            self._sinks.excuse(now_s)
        if len(self._sinks):
            self._busy_s = now_s
        if now_s - self._heard_s > self._silence_s:
            return f"the worker said nothing for {self._silence_s:g} s"
        if (unanswered_s := self._sinks.unanswered_s(now_s)) > ANSWER_S:
            return f"the worker beats, and did not answer a start for {unanswered_s:.0f} s"
        if now_s - self._busy_s > self._idle_s:
            return "the stream was idle"
        return None
