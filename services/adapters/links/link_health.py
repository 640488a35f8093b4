"""Health of a gateway's stream to a worker: silence, unanswered starts, idleness."""

from __future__ import annotations

from typing import Final

from services.adapters.links.frame_dispatch import SinkTable

CHECK_S: Final = 1.0  # interval of checks
ANSWER_S: Final = 5.0  # longest time without a response to a start, from a worker that sends heartbeats


class LinkHealth:
    """Judges one stream by its sinks and the time of its last message. Times are of one monotonic clock."""

    def __init__(self, sinks: SinkTable, now_s: float, *, silence_s: float, idle_s: float) -> None:
        """A worker silent for ``silence_s`` is lost; a stream without sequences ends after ``idle_s``."""
        self._sinks = sinks
        self._silence_s = silence_s
        self._idle_s = idle_s
        self._received_s = self._busy_s = now_s

    def received(self, now_s: float) -> None:
        """Record that a message of the worker was received, which may be a heartbeat."""
        self._received_s = now_s

    def reason_to_end(self, now_s: float, *, checked_s: float) -> str | None:
        """Return the reason to end the stream: it is silent, starts are unanswered, or it is idle. None if
        healthy. ``checked_s`` is the time of the owner's last check.

        A late check means that this process stalled, so that received messages are still unread: every wait
        for the worker starts again.
        """
        if now_s - checked_s > 2 * CHECK_S:
            self._received_s = now_s
            self._sinks.excuse(now_s)
        if len(self._sinks):
            self._busy_s = now_s
        if now_s - self._received_s > self._silence_s:
            return f"the worker sent nothing for {self._silence_s:g} s"
        if (unanswered_s := self._sinks.unanswered_s(now_s)) > ANSWER_S:
            return f"the worker sends heartbeats but answered no start for {unanswered_s:.0f} s"
        if now_s - self._busy_s > self._idle_s:
            return "the stream was idle"
        return None
