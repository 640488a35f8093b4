"""Dispatches step frames to sinks: the receiving end of a worker's stream, independent of the transport."""

from __future__ import annotations

from collections.abc import Iterable

from services.core.generation import TokenLogprobs
from services.ports.streams.worker_stream import StepFrame
from services.ports.worker import RowSink, SequenceSink

NONE: tuple[TokenLogprobs, ...] = ()


class SinkTable:
    """The sinks of one stream by handle. A handle is never reused, so a late entry finds no sink."""

    def __init__(self) -> None:
        self._sinks: dict[int, SequenceSink] = {}
        self._rows: dict[int, RowSink] = {}
        self._sent_s: dict[int, float] = {}  # starts without a response, in the order sent
        self._last = 0

    def __len__(self) -> int:
        return len(self._sinks) + len(self._rows)

    def __contains__(self, handle: int) -> bool:
        return handle in self._sinks

    def add(self, sink: SequenceSink) -> int:
        """Return the handle under which the sink is called from now on."""
        self._last += 1
        self._sinks[self._last] = sink
        return self._last

    def add_row(self, sink: RowSink) -> int:
        """The same for a row, which no response precedes its end."""
        self._last += 1
        self._rows[self._last] = sink
        return self._last

    def drop(self, handle: int) -> bool:
        """Remove the sink; it is not called again. Return whether it was there."""
        self._sent_s.pop(handle, None)
        return self._sinks.pop(handle, None) is not None or self._rows.pop(handle, None) is not None

    def sent(self, handles: Iterable[int], now_s: float) -> None:
        """Record that these starts were sent. A worker responds to each at once, whatever its load."""
        for handle in handles:
            if handle in self._sinks:
                self._sent_s[handle] = now_s

    def unanswered_s(self, now_s: float) -> float:
        """Return for how long the earliest start has been without a response; 0 if there is none."""
        return max(0.0, now_s - next(iter(self._sent_s.values()), now_s))

    def excuse(self, now_s: float) -> None:
        """Count unanswered starts from now, because nothing was read before."""
        self._sent_s = dict.fromkeys(self._sent_s, now_s)

    def dispatch(self, frame: StepFrame) -> None:
        """Call every sink that the frame names, in the frame's order."""
        sinks = self._sinks
        for handle in frame.accepted:
            self._sent_s.pop(handle, None)
            if (sink := sinks.get(handle)) is not None:
                sink.on_accepted()
        for handle, reason in frame.not_admitted:
            self._sent_s.pop(handle, None)
            if (refused := sinks.pop(handle, None) or self._rows.pop(handle, None)) is not None:
                refused.on_not_admitted(reason)
        if frame.handles:
            self._dispatch_tokens(frame)
        for handle, end in frame.finished:
            if (sink := sinks.pop(handle, None)) is not None:
                sink.on_finished(end)
        for handle, row_end in frame.rows:
            if (row := self._rows.pop(handle, None)) is not None:
                row.on_row_ended(row_end)

    def lose_all(self, message: str) -> None:
        """Notify every sink, once, that its worker was lost."""
        sinks, self._sinks = self._sinks, {}
        rows, self._rows = self._rows, {}
        self._sent_s.clear()
        lost: list[SequenceSink | RowSink] = [*sinks.values(), *rows.values()]
        for sink in lost:
            sink.on_lost(message)

    def _dispatch_tokens(self, frame: StepFrame) -> None:
        get = self._sinks.get
        ids = frame.ids
        logprobs = frame.logprobs
        at = 0
        columns = zip(frame.handles, frame.offsets, frame.counts, frame.texts, strict=True)
        for entry, (handle, offset, count, text) in enumerate(columns):
            end = at + count
            sink = get(handle)
            if sink is not None:
                sink.on_tokens(offset, ids[at:end], text, logprobs.get(entry, NONE) if logprobs else NONE)
            at = end


class NotStarted:
    """Implements ``ports.worker.RunningSequence`` for a sequence that never reached a worker."""

    def credit(self, tokens: int) -> None:
        return

    def cancel(self) -> None:
        return
