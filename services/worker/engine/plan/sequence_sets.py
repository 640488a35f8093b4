"""Where every sequence is: in a line, in the plan, or held up by something."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.worker.engine.sequence import SequenceState, Status


class SequenceSets:
    """Single writer: the planner. A sequence is in the place that its status names, and in no other.

    ``parked`` are by handle; as many as the agent submits without credit.
    """

    def __init__(self) -> None:
        self.waiting = WaitQueue()
        self.preempted = WaitQueue()
        self.suspects: list[SequenceState] = []  # suspects in order of arrival
        self.over_budget: list[SequenceState] = []
        self.compiling: list[SequenceState] = []
        self.parked: dict[int, SequenceState] = {}
        self.prefilling: list[SequenceState] = []
        self.decoding: list[SequenceState] = []
        self.held: list[SequenceState] = []
        self.masking: list[SequenceState] = []
        self.stalled: list[SequenceState] = []
        self.returning: list[SequenceState] = []  # sequences in the order of their credit
        self.long_prefills = 0  # prefilling sequences with a long prompt
        self._lists = {
            Status.SUSPECT: self.suspects,
            Status.OVER_BUDGET: self.over_budget,
            Status.COMPILING: self.compiling,
            Status.PREFILLING: self.prefilling,
            Status.DECODING: self.decoding,
            Status.HELD: self.held,
            Status.MASKING: self.masking,
            Status.STALLED: self.stalled,
            Status.RETURNING: self.returning,
        }

    @property
    def seated(self) -> int:
        """How many sequences run: they are computed in the next steps."""
        return len(self.decoding) + len(self.prefilling) + len(self.held) + len(self.masking)

    @property
    def with_kv(self) -> int:
        """How many sequences hold KV."""
        return self.seated + len(self.stalled) + len(self.returning)

    @property
    def without_kv(self) -> int:
        """How many sequences hold none."""
        lined_up = len(self.waiting) + len(self.preempted) + len(self.suspects)
        return lined_up + len(self.parked) + len(self.compiling) + len(self.over_budget)

    def holders(self) -> list[SequenceState]:
        """Return those that hold KV."""
        seated = (*self.decoding, *self.prefilling, *self.held, *self.masking)
        return [*seated, *self.stalled, *self.returning]

    def tenants(self) -> set[str]:
        """Return whose sequences are here."""
        waiting = (*self.waiting, *self.preempted, *self.parked.values())
        return {one.tenant for group in (waiting, *self._lists.values()) for one in group}

    def head(self, *, long: bool) -> SequenceState | None:
        """Return who is next, or next of those that are not long: preempted ones go first."""
        return self.preempted.head(long=long) or self.waiting.head(long=long)

    def put(self, sequence: SequenceState, status: Status) -> None:
        """Put a sequence that is nowhere in its place; ``is_long`` stays while it is there."""
        sequence.status = status
        match status:
            case Status.WAITING:
                self.waiting.push(sequence)
            case Status.PREEMPTED:
                self.preempted.push(sequence)
            case Status.PARKED:
                self.parked[sequence.handle] = sequence
            case Status.FINISHED:
                pass
            case _:
                self._lists[status].append(sequence)
                self.long_prefills += status is Status.PREFILLING and sequence.is_long

    def take(self, sequence: SequenceState) -> None:
        """Take a sequence out of its place."""
        match sequence.status:
            case Status.WAITING:
                self.waiting.remove(sequence)
            case Status.PREEMPTED:
                self.preempted.remove(sequence)
            case Status.PARKED:
                del self.parked[sequence.handle]
            case Status.FINISHED:
                raise AssertionError(f"sequence {sequence.handle} has finished")
            case status:
                self._lists[status].remove(sequence)
                self.long_prefills -= status is Status.PREFILLING and sequence.is_long

    def move(self, sequence: SequenceState, status: Status) -> None:
        """Take it out of its place and put it in another."""
        self.take(sequence)
        self.put(sequence, status)

    def check_integrity(self) -> None:
        """Raise AssertionError if a status lies or a count is off."""
        for status, group in (*self._lists.items(), (Status.PARKED, list(self.parked.values()))):
            assert all(sequence.status is status for sequence in group), f"a status is not {status}"
        assert self.long_prefills == sum(sequence.is_long for sequence in self.prefilling), "long prefills"
        without_kv = (*self.parked.values(), *self.suspects, *self.compiling, *self.over_budget)
        assert all(not sequence.blocks for sequence in without_kv), "a sequence that waits holds KV"


class WaitQueue:
    """Sequences in (priority, arrival) order, long prompts separately. Head and push of the newest are cheap.

    ``is_long`` of a sequence stays while it is here.
    """

    def __init__(self) -> None:
        self._short: list[SequenceState] = []  # last is first, so that taking the head moves nothing
        self._long: list[SequenceState] = []

    def __iter__(self) -> Iterator[SequenceState]:
        yield from self._short
        yield from self._long

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
