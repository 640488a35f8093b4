"""A usage outbox whose events a test reads."""

from __future__ import annotations

from services.core.usage import DeviceInterval, SequenceDeviceUse, UsageEvent


class KeptUsage:
    """Implements ``ports.usage.UsageOutbox``: keeps every event."""

    def __init__(self) -> None:
        self.sequences: list[SequenceDeviceUse] = []
        self.intervals: list[DeviceInterval] = []

    def add(self, event: UsageEvent) -> None:
        match event:
            case SequenceDeviceUse():
                self.sequences.append(event)
            case DeviceInterval():
                self.intervals.append(event)
