"""What one gateway receives of a table's sequences, checked as it comes."""

from __future__ import annotations

from services.core.generation import NotAdmittedReason, SequenceEnd
from services.core.rollouts.routes import Withdrawal
from services.ports.streams import StepFrame
from tests.unit.worker.bench import Bench


class Reader:
    """What one gateway heard, by handle."""

    def __init__(self, bench: Bench) -> None:
        self.wakes = 0
        self.stream = bench.host.open(self._wake)
        self.accepted: list[int] = []
        self.refused: dict[int, NotAdmittedReason] = {}
        self.withdrawn: list[Withdrawal] = []
        self.ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.ends: dict[int, SequenceEnd] = {}

    def _wake(self) -> None:
        self.wakes += 1

    def take(self) -> StepFrame:
        frame = self.stream.take()
        assert frame is not None
        return frame

    def read(self) -> list[StepFrame]:
        frames = []
        while (frame := self.stream.take()) is not None:
            frames.append(frame)
            self.accepted += frame.accepted
            self.refused.update(frame.not_admitted)
            self.withdrawn += frame.withdrawn
            at = 0
            for handle, offset, count, text in zip(
                frame.handles, frame.offsets, frame.counts, frame.texts, strict=True
            ):
                assert handle in self.accepted
                assert handle not in self.ends, "tokens after the last word"
                ids = self.ids.setdefault(handle, [])
                assert offset == len(ids)
                ids += frame.ids[at : at + count]
                at += count
                self.text[handle] = self.text.get(handle, "") + text
            assert at == len(frame.ids)
            for handle, end in frame.finished:
                assert handle not in self.ends
                self.ends[handle] = end
        self.wakes = 0
        return frames
