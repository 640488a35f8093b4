"""The line of sequences that hold no KV."""

from __future__ import annotations

from bisect import bisect_left, insort

from services.worker.engine.sequence import SequenceState


class WaitQueue:
    """Sequences in (priority, arrival) order, long prompts apart. Head and push of the newest are cheap.

    ``is_long`` of a sequence stays while it is here.
    """

    def __init__(self) -> None:
        self._short: list[SequenceState] = []  # last is first, so that taking the head moves nothing
        self._long: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def head(self, *, long: bool) -> SequenceState | None:
        """Return the first, or with ``long`` false the first that is not long."""
        first = self._short[-1] if self._short else None
        if long and self._long and (first is None or self._long[-1].order < first.order):
            return self._long[-1]
        return first

    def push(self, sequence: SequenceState) -> None:
        insort(self._line(sequence), sequence, key=_last_first)

    def remove(self, sequence: SequenceState) -> None:
        line = self._line(sequence)
        index = bisect_left(line, _last_first(sequence), key=_last_first)
        assert line[index] is sequence, f"sequence {sequence.handle} is not queued"
        del line[index]

    def _line(self, sequence: SequenceState) -> list[SequenceState]:
        return self._long if sequence.is_long else self._short


def _last_first(sequence: SequenceState) -> tuple[int, int]:
    priority, arrival = sequence.order
    return -priority, -arrival
