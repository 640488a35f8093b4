"""Flight recorder of a worker: its last engine steps and batches, with their members, in bounded memory.

Two rings in pages that the system provides as they are first written: a head of ``_HEAD`` per step, and the
32-bit words of the members, first a handle per output token, then a pair (handle, tokens) per prefill or per
request of a batch of rows. A step is lost when either ring overwrites it. A step costs one packed head and a
copy of its columns, no object.
"""

from __future__ import annotations

import math
import mmap
import struct
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from msgspec import Struct

from fairway.mirror import Mirror
from fairway.v1 import worker_pb2
from services.ports.clock import Clock
from services.runtime.telemetry.metrics import Metrics
from services.worker.engine_protocol import Stepped
from services.worker.policy.step_pace import StepPace
from services.worker.streams.live_row import LiveRow
from services.worker.streams.live_sequence import WorkerSequence

MAX_STEPS: Final = 128 * 1024
MAX_WORDS: Final = 4 * 1024 * 1024
MAX_SEQUENCES: Final = 32 * 1024
MAX_ENGINES: Final = 256
MAX_MOMENTS: Final = 32  # most moments of one sequence
SEQUENCE_BYTES: Final = 1280  # most memory of a sequence, as measured with the longest ids and all moments
PAGE_SCANNED: Final = 1024  # most steps that one read looks at: it runs between two steps' tokens
PAGE_MEMBERS: Final = 8192

# end (monotonic), duration, prediction, first word, prefilled tokens, KV blocks, running, waiting, output
# tokens, pairs, engine
_HEAD: Final = struct.Struct("<dffQIIIIIHH")
# index in _KINDS, time; packed, since an object per moment takes seven times the memory
_MOMENT: Final = struct.Struct("<Bd")
_KINDS: Final = ("PREEMPTED", "YIELDED", "PARKED", "RESUMED")
_WORD: Final = (1 << 32) - 1
Key = tuple[int, int]  # engine, handle


class RecordedSequence(Struct, gc=False):
    """See RecordedSequence in worker.proto. Times are monotonic seconds; 0: it has not happened."""

    number: int
    engine: int
    request_id: str = ""
    choice: int = 0
    tenant: str = ""
    accepted_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    moments: bytes = b""  # ``_MOMENT`` of each, the oldest first


_SEQUENCE: Final = Mirror(
    RecordedSequence,
    worker_pb2.RecordedSequence,
    apart=("accepted_s", "first_token_s", "ended_s", "moments"),
)


class _Head(Struct, frozen=True, gc=False):
    end_s: float
    took_s: float
    predicted_s: float
    start: int  # virtual offset of its first word
    prefill_tokens: int
    kv_blocks_used: int
    running: int
    waiting: int
    outputs: int
    pairs: int
    engine: int


class StepRecorder:
    """Single writer: the worker's event loop. Steps are numbered from 1."""

    def __init__(
        self,
        clock: Clock,
        metrics: Metrics | None = None,
        *,
        max_steps: int = MAX_STEPS,
        max_words: int = MAX_WORDS,
        max_sequences: int = MAX_SEQUENCES,
    ) -> None:
        self._clock = clock
        self._max_steps, self._max_words, self._max_sequences = max_steps, max_words, max_sequences
        self._heads = mmap.mmap(-1, max_steps * _HEAD.size)
        self._words = memoryview(mmap.mmap(-1, 4 * max_words)).cast("I")
        self._count = 0  # number of the newest step
        self._first = 1  # number of the oldest step that is held
        self._written = 0  # virtual offset of the next word
        self._since_s = clock.monotonic_s()
        self._sequences: OrderedDict[Key, RecordedSequence] = OrderedDict()
        self._by_request: dict[str, list[Key]] = {}
        self._engines: OrderedDict[int, worker_pb2.RecordedEngine] = OrderedDict()
        self._last_engine = 0
        self.spent_s = 0.0  # time spent in recording
        self._export(metrics if metrics is not None else Metrics())

    @property
    def held_steps(self) -> int:
        return self._count - self._first + 1

    @property
    def size_bytes(self) -> int:
        """The most memory that it takes: both rings, and all sequences with all their moments."""
        rings = self._max_steps * _HEAD.size + 4 * self._max_words
        return rings + self._max_sequences * SEQUENCE_BYTES

    def engine(
        self, version_digest: str, model: str, *, rows: bool = False, kv_blocks_total: int = 0
    ) -> EngineRecorder:
        """Return the recorder of a process that has started."""
        self._last_engine = self._last_engine % 0xFFFF + 1
        entry = worker_pb2.RecordedEngine(
            number=self._last_engine,
            version_digest=version_digest,
            model=model,
            rows=rows,
            kv_blocks_total=kv_blocks_total,
        )
        self._engines[entry.number] = entry
        if len(self._engines) > MAX_ENGINES:
            self._engines.popitem(last=False)
        return EngineRecorder(self, entry.number, self._clock)

    def read(self, request_id: str = "", first_step: int = 0) -> worker_pb2.ReadStepsResponse:
        """Return a page of a request's steps, the oldest first; without a request, of all steps. It looks at
        ``PAGE_SCANNED`` steps at most."""
        unix_s = self._clock.unix_s()
        zero_s = unix_s - self._clock.monotonic_s()
        page = worker_pb2.ReadStepsResponse(
            since_unix_us=_unix_us(self._since_s, zero_s), now_unix_us=round(unix_s * 1e6)
        )
        own = self._by_request.get(request_id) if request_id else None
        if request_id and own is None:
            return page
        named = {key: self._sequences[key] for key in own or ()}
        start_s = min((each.accepted_s for each in named.values()), default=0.0)
        end_s = max((each.ended_s or math.inf for each in named.values()), default=math.inf)
        first = max(first_step, self._first, self._after(start_s))
        members = 0
        for number in range(first, self._count + 1):
            if number - first >= PAGE_SCANNED or members >= PAGE_MEMBERS:
                page.next_step = number
                break
            head = self._head(number)
            if head.end_s - head.took_s > end_s:
                break
            step = self._step(number, head, own, zero_s)
            if step is not None:
                page.steps.append(step)
                members += step.size
                named.update(self._named(step))
        used = dict.fromkeys(engine for engine, _ in named)
        page.engines.extend(self._engines[number] for number in used if number in self._engines)
        page.sequences.extend(_message(each, zero_s) for each in named.values())
        return page

    def check_integrity(self) -> None:
        """Raise AssertionError when a bound is passed, or an index and its ring disagree."""
        assert 0 <= self.held_steps <= self._max_steps
        assert len(self._sequences) <= self._max_sequences
        assert sum(map(len, self._by_request.values())) == len(self._sequences)
        oldest = max(0, self._written - self._max_words)
        ends_s = list[float]()
        for number in range(self._first, self._count + 1):
            head = self._head(number)
            ends_s.append(head.end_s)
            assert head.start >= oldest, "the members of a held step are overwritten"
            assert head.start + head.outputs + 2 * head.pairs <= self._written
        assert ends_s == sorted(ends_s), "steps are not in the order of their ends"

    # --- calls of ``EngineRecorder`` -----------------------------------------------------------------

    def append(
        self,
        engine: int,
        times_s: tuple[float, float, float],
        counts: tuple[int, int, int, int],
        members: tuple[Sequence[int], Mapping[int, int]],
    ) -> None:
        """Record a step. ``times_s``: its end, duration and prediction; ``counts``: prefilled tokens, KV
        blocks, running and waiting sequences; ``members``: a handle per output token, and the tokens of
        each prefill or the rows of each request by handle."""
        handles, pairs = members
        try:
            words = array("I", handles)
            words.extend(chain.from_iterable(pairs.items()))
        except OverflowError:  # after four billion sequences of one engine
            words = array("I", [word & _WORD for word in chain(handles, *pairs.items())])
        size, most = len(words), self._max_words
        if size > most or len(pairs) > 0xFFFF:  # no real step is as large as the ring
            return
        start = self._written
        at = start % most
        if at + size > most:  # the members of one step are contiguous
            start, at = start + most - at, 0
        self._words[at : at + size] = words
        self._written = start + size
        self._drop()
        place = self._count % self._max_steps * _HEAD.size
        _HEAD.pack_into(self._heads, place, *times_s, start, *counts, len(handles), len(pairs), engine)
        self._count += 1

    def add_sequence(self, sequence: RecordedSequence) -> None:
        key = sequence.engine, sequence.number
        if key not in self._sequences:
            self._by_request.setdefault(sequence.request_id, []).append(key)
        self._sequences[key] = sequence
        if len(self._sequences) > self._max_sequences:
            old, dropped = self._sequences.popitem(last=False)
            mine = self._by_request[dropped.request_id]
            mine.remove(old)
            if not mine:
                del self._by_request[dropped.request_id]

    def sequence(self, key: Key) -> RecordedSequence | None:
        return self._sequences.get(key)

    # --- inside ----------------------------------------------------------------------------------------

    def _drop(self) -> None:
        """Count out the steps that the next one overwrites, while their heads can be read."""
        oldest, words = self._count - self._max_steps + 2, self._written - self._max_words
        while self._first <= self._count:
            if self._first >= oldest and self._head(self._first).start >= words:
                break
            self._since_s = self._end_of(self._first)
            self._first += 1

    def _head(self, number: int) -> _Head:
        return _Head(*_HEAD.unpack_from(self._heads, (number - 1) % self._max_steps * _HEAD.size))

    def _end_of(self, number: int) -> float:
        return self._head(number).end_s

    def _after(self, start_s: float) -> int:
        """Return the number of the first held step that ended at ``start_s`` or later."""
        low, high = self._first, self._count + 1
        while low < high:
            middle = (low + high) // 2
            if self._end_of(middle) < start_s:
                low = middle + 1
            else:
                high = middle
        return low

    def _step(
        self, number: int, head: _Head, own: Iterable[Key] | None, zero_s: float
    ) -> worker_pb2.RecordedStep | None:
        """Return a held step; None without a member of ``own``, if that is given."""
        at = head.start % self._max_words
        words = self._words[at : at + head.outputs + 2 * head.pairs].tolist()
        handles, pairs = words[: head.outputs], words[head.outputs :]
        prefilled = dict(zip(pairs[::2], pairs[1::2], strict=True))
        if own is not None and not any(
            engine == head.engine and (handle & _WORD in prefilled or handle & _WORD in handles)
            for engine, handle in own
        ):
            return None
        engine = self._engines.get(head.engine)
        sampled = Counter(handles)
        if engine is not None and engine.rows:
            sampled, prefilled = Counter(prefilled), {}
        members = list(dict.fromkeys(chain(prefilled, sampled)))
        return worker_pb2.RecordedStep(
            number=number,
            engine=head.engine,
            start_unix_us=_unix_us(head.end_s - head.took_s, zero_s),
            took_us=_microseconds(head.took_s),
            predicted_us=_microseconds(head.predicted_s),
            prefill_tokens=head.prefill_tokens,
            kv_blocks_used=head.kv_blocks_used,
            running=head.running,
            waiting=head.waiting,
            size=len(members),
            members=members,
            prefilled=[prefilled.get(each, 0) for each in members],
            sampled=[sampled[each] for each in members],
        )

    def _named(self, step: worker_pb2.RecordedStep) -> Iterator[tuple[Key, RecordedSequence]]:
        for number in step.members:
            key = step.engine, number
            yield key, self._sequences.get(key) or RecordedSequence(number, step.engine)

    def _export(self, metrics: Metrics) -> None:
        metrics.counted(
            "fairway_worker_recorded_steps_total",
            "Steps and batches of the flight recorder: recorded so far; of these, overwritten by newer ones",
            lambda: ((("recorded",), self._count), (("overwritten",), self._first - 1)),
            ("which",),
        )
        metrics.counted(
            "fairway_worker_recorder_seconds_total",
            "Time of the worker's event loop in the flight recorder; compare with the time of its steps",
            lambda: (((), self.spent_s),),
        )


def _message(sequence: RecordedSequence, zero_s: float) -> worker_pb2.RecordedSequence:
    return _SEQUENCE.to_proto(
        sequence,
        accepted_unix_us=_unix_us(sequence.accepted_s, zero_s),
        first_token_unix_us=_unix_us(sequence.first_token_s, zero_s),
        ended_unix_us=_unix_us(sequence.ended_s, zero_s),
        moments=[
            worker_pb2.RecordedMoment(kind=_KINDS[kind], unix_us=_unix_us(at_s, zero_s))
            for kind, at_s in _MOMENT.iter_unpack(sequence.moments)
        ],
    )


def _unix_us(at_s: float, zero_s: float) -> int:
    """Return the Unix time of a monotonic one; 0 is for what has not happened. ``zero_s``: the Unix time of
    the monotonic clock's zero."""
    return max(0, round((at_s + zero_s) * 1e6)) if at_s else 0


def _microseconds(seconds: float) -> int:
    return min(round(seconds * 1e6), _WORD)


class EngineRecorder:
    """What one engine process, or one batcher, records."""

    __slots__ = ("_clock", "_number", "_owner", "_pace", "_rows")

    def __init__(self, owner: StepRecorder, number: int, clock: Clock) -> None:
        self._owner = owner
        self._number = number
        self._clock = clock
        self._pace = StepPace()
        self._rows = 0

    def stepped(self, event: Stepped) -> None:
        """Record a step that has just ended."""
        handles, prefilled = event.handles, event.prefilled
        if not handles and not prefilled:
            return
        owner, clock = self._owner, self._clock
        now_s = clock.monotonic_s()
        work = event.prefill_tokens, len(handles), event.attended_tokens
        owner.append(
            self._number,
            (now_s, event.step_s, self._pace.predicted_s(*work)),
            (event.prefill_tokens, event.kv_blocks_used, event.running, event.waiting),
            (handles, prefilled),
        )
        self._pace.observe(*work, event.step_s)
        for handle in event.preempted:
            self._note(handle, "PREEMPTED", now_s)
        owner.spent_s += clock.monotonic_s() - now_s

    def started(self, sequence: WorkerSequence) -> None:
        """Record a sequence that was accepted."""
        self._owner.add_sequence(self._of(sequence))

    def noted(self, sequence: WorkerSequence, kind: str) -> None:
        """Record what holds a sequence up, or that it goes on."""
        self._note(sequence.number, kind, self._clock.monotonic_s())

    def ended(self, sequence: WorkerSequence, reason: str) -> None:
        """Record the end of a sequence, whose steps are all recorded."""
        entry = self._owner.sequence((self._number, sequence.number & _WORD)) or self._of(sequence)
        entry.first_token_s = sequence.first_token_s or 0.0
        entry.ended_s, entry.reason = self._clock.monotonic_s(), reason
        entry.cached_tokens = min(sequence.cached_tokens, sequence.prompt_tokens)
        entry.output_tokens = sequence.output_tokens
        self._owner.add_sequence(entry)

    def ran(self, rows: Sequence[LiveRow], *, began_s: float, predicted_s: float, waiting: int) -> None:
        """Record a batch of rows that was answered: the rows of each request under a number of its own."""
        owner, now_s = self._owner, self._clock.monotonic_s()
        entries = dict[str, RecordedSequence]()
        counts = Counter[int]()
        for row in rows:
            spec = row.spec
            entry = entries.get(spec.request_id)
            if entry is None:
                self._rows = self._rows % _WORD + 1
                entry = entries[spec.request_id] = RecordedSequence(
                    self._rows, self._number, spec.request_id, spec.row, spec.tenant_id, row.accepted_s
                )
                entry.ended_s, entry.reason = now_s, "answered"
                owner.add_sequence(entry)
            entry.prompt_tokens += row.length
            counts[entry.number] += 1
        times_s = now_s, now_s - began_s, predicted_s
        owner.append(self._number, times_s, (0, 0, len(rows), waiting), ((), counts))
        owner.spent_s += self._clock.monotonic_s() - now_s

    def _of(self, sequence: WorkerSequence) -> RecordedSequence:
        spec = sequence.spec
        return RecordedSequence(
            sequence.number & _WORD,
            self._number,
            spec.generation.request_id,
            spec.choice,
            spec.tenant_id,
            accepted_s=sequence.accepted_s,
            prompt_tokens=sequence.prompt_tokens,
        )

    def _note(self, handle: int, kind: str, now_s: float) -> None:
        entry = self._owner.sequence((self._number, handle & _WORD))
        if entry is not None and len(entry.moments) < MAX_MOMENTS * _MOMENT.size:
            entry.moments += _MOMENT.pack(_KINDS.index(kind), now_s)
