"""The two kinds of window: derived, in production, and fixed, to compare it with. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.worker.batcher.policy.flush import Device, Flush, FlushCause, Linger, WaitingGroup, decide
from services.worker.batcher.policy.linger import Expected, LingerBound


class Window(Protocol):
    """Decides when an idle device starts a batch."""

    def decide(
        self, group: WaitingGroup, device: Device, expected: Expected, now_s: float
    ) -> Flush | Linger: ...


class DerivedWindow:
    """The production policy."""

    def decide(self, group: WaitingGroup, device: Device, expected: Expected, now_s: float) -> Flush | Linger:
        return decide(group, device, expected, now_s)


@dataclass(frozen=True, slots=True)
class FixedWindow:
    """Starts a batch when it is full or its oldest row has waited ``window_s``."""

    window_s: float

    def decide(self, group: WaitingGroup, device: Device, expected: Expected, now_s: float) -> Flush | Linger:
        most, limit = device.rows_at(group.width)
        until_s = group.oldest_s + self.window_s
        bound = LingerBound(until_s - now_s, 0.0, 0.0, 0.0, group.rows)
        if group.rows >= most:
            return Flush(most, limit, bound)
        return Flush(group.rows, FlushCause.LINGER, bound) if until_s <= now_s else Linger(until_s, bound)
