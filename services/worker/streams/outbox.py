"""The pending output of one gateway's stream, merged until its writer takes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from services.core.fixed_cost.rows import RowEnd
from services.core.generation import NotAdmittedReason, SequenceEnd
from services.core.rollouts.routes import Withdrawal
from services.ports.streams import StepFrame
from services.worker.streams.live_row import LiveRow
from services.worker.streams.live_sequence import WorkerSequence

MAX_FRAME_TOKENS = 8192  # per frame; the rest waits for the next
MAX_FRAME_ROW_BYTES = 4 * 1024 * 1024  # most output bytes of a frame, unless it has only one row
LOGPROBS_WEIGHT = 32  # a token with log-probabilities counts as this many
MAX_FRAME_LOGPROBS = MAX_FRAME_TOKENS // LOGPROBS_WEIGHT  # tokens of one sequence in a frame that have some


class Outbox:
    """Single-threaded: engine events append, the stream's only writer takes. ``wake`` wakes the writer.

    The pending output is bounded by the sequences' credits: the engine produces no tokens beyond them.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.live: dict[int, WorkerSequence] = {}  # sequences by the gateway's handle
        self.rows: dict[int, LiveRow] = {}  # rows by the gateway's handle
        self.dirty: list[WorkerSequence] = []  # sequences with pending output, each once
        self._accepted: list[int] = []
        self._not_admitted: list[tuple[int, NotAdmittedReason]] = []
        self._withdrawn: dict[str, Withdrawal] = {}  # what refused starts named, by version
        self._ended: list[tuple[WorkerSequence, SequenceEnd]] = []
        self._ended_rows: dict[int, RowEnd] = {}

    def accept(self, sequence: WorkerSequence) -> None:
        self.live[sequence.handle] = sequence
        self._accepted.append(sequence.handle)
        self.wake()

    def refuse(self, handle: int, reason: NotAdmittedReason) -> None:
        self._not_admitted.append((handle, reason))
        self.wake()

    def withdraw(self, withdrawal: Withdrawal) -> None:
        """Send it with the refusal that follows."""
        self._withdrawn[withdrawal.version_digest] = withdrawal

    def touch(self, sequence: WorkerSequence) -> None:
        """Mark a sequence as having pending output."""
        if not sequence.queued:
            sequence.queued = True
            self.dirty.append(sequence)
            self.wake()

    def end(self, sequence: WorkerSequence, end: SequenceEnd) -> None:
        """Queue a sequence's end, to be sent after its pending output."""
        del self.live[sequence.handle]
        self._ended.append((sequence, end))
        self.wake()

    def end_row(self, handle: int, end: RowEnd) -> None:
        """Queue a row's end."""
        self.rows.pop(handle, None)
        self._ended_rows[handle] = end
        self.wake()

    def drop_row(self, handle: int) -> LiveRow | None:
        """Drop the pending end of a row; return the row if it had not ended."""
        self._ended_rows.pop(handle, None)
        return self.rows.pop(handle, None)

    def drop(self, handle: int) -> WorkerSequence | None:
        """Drop all pending output of a handle; return its sequence if it was still running."""
        sequence = self.live.pop(handle, None)
        if sequence is not None:
            sequence.dropped = True
        self._accepted = [other for other in self._accepted if other != handle]
        for ended, _ in self._ended:
            ended.dropped = ended.dropped or ended.handle == handle
        return sequence

    @property
    def only_accepted(self) -> bool:
        """Whether nothing but acceptances is pending."""
        return bool(self._accepted) and not (
            self.dirty or self._ended or self._not_admitted or self._ended_rows
        )

    def take(self) -> StepFrame | None:
        """Return everything pending, up to the size of a frame; None if there is nothing."""
        if not (self.dirty or self._ended or self._accepted or self._not_admitted or self._ended_rows):
            return None
        frame = StepFrame(accepted=self._accepted, not_admitted=self._not_admitted)
        frame.withdrawn, self._withdrawn = list(self._withdrawn.values()), {}
        self._accepted, self._not_admitted = [], []
        self._take_tokens(frame)
        self._take_rows(frame)
        if self._ended:
            waiting = [pair for pair in self._ended if pair[0].queued and not pair[0].dropped]
            frame.finished = [
                (sequence.handle, end)
                for sequence, end in self._ended
                if not sequence.queued and not sequence.dropped
            ]
            self._ended = waiting
        return frame if frame.changes else None

    def _take_rows(self, frame: StepFrame) -> None:
        size = 0
        for handle in list(self._ended_rows):
            end = self._ended_rows[handle]
            size += sum(len(tensor.data) for tensor in end.outputs)
            if frame.rows and size > MAX_FRAME_ROW_BYTES:
                return
            del self._ended_rows[handle]
            frame.rows.append((handle, end))

    def _take_tokens(self, frame: StepFrame) -> None:
        dirty, self.dirty = self.dirty, []
        room = MAX_FRAME_TOKENS
        longer: list[WorkerSequence] = []  # sequences that wait behind the others for the next frame
        for index, sequence in enumerate(dirty):
            if room <= 0:
                longer = dirty[index:] + longer
                break
            if sequence.dropped:
                sequence.queued = False
                continue
            if len(sequence.pending_logprobs) > MAX_FRAME_LOGPROBS:
                _take_first(frame, sequence)
                longer.append(sequence)
                room -= MAX_FRAME_TOKENS
                continue
            sequence.queued = False
            pending = sequence.pending_ids
            count = len(pending)
            room -= count
            if sequence.pending_scores:
                _take_scores(frame, sequence, count)
            if sequence.pending_logprobs:
                room -= count * LOGPROBS_WEIGHT
            if sequence.pending_ends is not None and count > 1:
                _take_each(frame, sequence, sequence.pending_ends)
            if sequence.pending_logprobs:
                frame.logprobs[len(frame.handles)] = sequence.pending_logprobs
                sequence.pending_logprobs = []
            count = len(pending)
            frame.handles.append(sequence.handle)
            frame.offsets.append(sequence.scored + sequence.tokens - sequence.prompt_tokens - count)
            frame.counts.append(count)
            frame.ids += pending
            frame.texts.append(sequence.pending_text)
            pending.clear()
            sequence.pending_text = ""
            if sequence.pending_ends is not None:
                sequence.pending_ends.clear()
        self.dirty = longer
        if frame.probe_scores:
            _fill_scores(frame)


def _take_each(frame: StepFrame, sequence: WorkerSequence, ends: Sequence[int]) -> None:
    """Take all but the last pending token, each in an entry of its own."""
    pending, text, start = sequence.pending_ids, sequence.pending_text, 0
    offset = sequence.scored + sequence.tokens - sequence.prompt_tokens - len(pending)
    for index, end in enumerate(ends[:-1]):
        if sequence.pending_logprobs:
            frame.logprobs[len(frame.handles)] = sequence.pending_logprobs[index : index + 1]
        frame.handles.append(sequence.handle)
        frame.offsets.append(offset + index)
        frame.counts.append(1)
        frame.ids.append(pending[index])
        frame.texts.append(text[start:end])
        start = end
    del pending[:-1], sequence.pending_logprobs[:-1]
    sequence.pending_text = text[start:]


def _take_scores(frame: StepFrame, sequence: WorkerSequence, count: int) -> None:
    """Take the scores of its first pending tokens, before these; tokens of the prompt have none."""
    _fill_scores(frame)
    unscored = len(sequence.pending_ids) - len(sequence.pending_scores)
    scores = [math.nan] * unscored + sequence.pending_scores
    frame.probe_scores += scores[:count]
    sequence.pending_scores = scores[count:]


def _fill_scores(frame: StepFrame) -> None:
    """Let each token of the frame have an entry: tokens that no probe judges have no number."""
    frame.probe_scores += [math.nan] * (len(frame.ids) - len(frame.probe_scores))


def _take_first(frame: StepFrame, sequence: WorkerSequence) -> None:
    """Take what a frame holds of a long output with log-probabilities; its text comes with the last of it."""
    pending, logprobs = sequence.pending_ids, sequence.pending_logprobs
    if sequence.pending_scores:
        _take_scores(frame, sequence, MAX_FRAME_LOGPROBS)
    frame.logprobs[len(frame.handles)] = logprobs[:MAX_FRAME_LOGPROBS]
    frame.handles.append(sequence.handle)
    frame.offsets.append(sequence.scored + sequence.tokens - sequence.prompt_tokens - len(pending))
    frame.counts.append(MAX_FRAME_LOGPROBS)
    frame.ids += pending[:MAX_FRAME_LOGPROBS]
    frame.texts.append("")
    del pending[:MAX_FRAME_LOGPROBS], logprobs[:MAX_FRAME_LOGPROBS]
    if sequence.pending_ends is not None:
        del sequence.pending_ends[:MAX_FRAME_LOGPROBS]
