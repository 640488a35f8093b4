"""What each sequence was charged of the engine's step time. Single writer: the engine.

A steady run of steps, in which the same sequences decode one token each, needs no work per sequence: charges
are sums over the steps, and the difference of the sums since a sequence joined, with its length, gives its
part. So a sequence needs work when it joins, leaves or is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from services.worker.engine.execute.executor import Batch, PrefillChunk
from services.worker.engine.sequence import SequenceState
from services.worker.policy.device_share import (
    MeasuredCosts,
    StepPrices,
    StepWork,
    attended_before,
    prices,
)

REPORT_S: Final = 0.05  # step time between two reports of all sequences
_HANDLE: Final = attrgetter("handle")
_NOTHING: Final[tuple[dict[int, int], list[int]]] = {}, []


class StepMembers(NamedTuple):
    """How a batch differs from one that decodes the sequences of the batch before it, as of its launch."""

    decodes: int
    attended: int  # tokens of KV that the decodes read
    left: Sequence[SequenceState] = ()
    joined: Sequence[SequenceState] = ()
    lengths: Sequence[int] = ()  # lengths of those that joined
    chunks: Sequence[PrefillChunk] = ()
    prefill_tokens: int = 0
    scored: Sequence[int] = ()  # tokens of each chunk whose log-probabilities it computes
    # Handle, rows and length of every decode in a batch with proposals; their lengths are irregular.
    verified: Sequence[tuple[int, int, int]] = ()


NOBODY: Final = StepMembers(0, 0)


class _Sums(NamedTuple):
    """Charges of all steps so far to a decode: per sequence, per token of its length, and per token times
    the number of the step."""

    sequence_s: float = 0.0
    token_s: float = 0.0
    aged_s: float = 0.0


class StepMeter:
    """Charges by handle, from the launch of a sequence's first batch until it is settled.

    ``launched`` is called for each batch in order, and ``ended`` for each in the same order.
    """

    def __init__(self, costs: MeasuredCosts | None = None) -> None:
        self._costs = costs if costs is not None else MeasuredCosts()
        # Decodes of the batch that was launched last, unless their lengths are irregular; also as a set.
        self._decodes: list[SequenceState] = []
        self._present: set[SequenceState] = set()
        self._sums = _Sums()
        self._number = 0  # number of the step that charges have reached
        # By handle: the length of a sequence less the number of the step, and the sums before it joined.
        self._runs: dict[int, tuple[int, _Sums]] = {}
        self._pending: dict[int, float] = {}  # charged since the last report
        self._reported: dict[int, float] = {}  # charged until then
        self._ending: list[int] = []  # ended, not settled
        # The steady run under way: its sequences, KV tokens that its first step reads, its steps, their time.
        self._steady = (0, 0)
        self._steady_steps = 0
        self._steady_s = 0.0
        self._unreported_s = 0.0  # step time since the last report, without the steady run

    @property
    def any_ending(self) -> bool:
        """Whether the next report settles a sequence."""
        return bool(self._ending)

    def end(self, handle: int) -> None:
        """A sequence was cancelled. The next report settles it."""
        self._ending.append(handle)

    def launched(self, batch: Batch, attended: int) -> StepMembers | None:
        """Return who takes part in a batch; None if the same decode as in the batch before, and nobody else.

        ``attended``: tokens of KV that its decodes read.
        """
        decodes, chunks = batch.decodes, batch.prefills
        if decodes == self._decodes and not chunks and not batch.proposals:
            return None
        tokens = batch.prefill_tokens if chunks else 0
        scored = [len(chunk.scored) for chunk in chunks]
        if batch.proposals:
            left, self._decodes, self._present = self._decodes, [], set()
            verified = [
                (sequence.handle, 1 + len(batch.proposals.get(index, ())), len(sequence.tokens))
                for index, sequence in enumerate(decodes)
            ]
            return StepMembers(len(decodes), attended, left, (), (), chunks, tokens, scored, verified)
        if decodes == self._decodes:
            return StepMembers(len(decodes), attended, (), (), (), chunks, tokens, scored)
        present, before = set(decodes), self._present
        self._decodes, self._present = decodes, present
        gone, joined = sorted(before - present, key=_HANDLE), sorted(present - before, key=_HANDLE)
        lengths = [len(sequence.tokens) for sequence in joined]
        return StepMembers(len(decodes), attended, gone, joined, lengths, chunks, tokens, scored)

    def ended(self, members: StepMembers | None, step_s: float) -> float:
        """Charge a step; return what of it its prefills were charged."""
        if members is None:
            self._steady_steps += 1
            self._steady_s += step_s
            return 0.0
        if not members.decodes and not members.chunks:
            return 0.0
        self._fold()
        for sequence in members.left:
            self._leave(sequence.handle)
        for sequence, length in zip(members.joined, members.lengths, strict=True):
            self._runs[sequence.handle] = length - self._number, self._sums
        self._steady = members.decodes, members.attended
        if members.chunks or members.verified:
            return self._charge(members, step_s)
        self._steady_steps, self._steady_s = 1, step_s
        return 0.0

    def report(self, ended: Collection[int], *, airborne: bool) -> tuple[dict[int, int], list[int]]:
        """Return ``device_us`` and ``settled`` of ``Stepped``.

        ``ended`` are reported as finished now. If a batch is ``airborne``, it may compute a row of theirs, so
        they are settled with the next report.
        """
        is_due = self._unreported_s + self._steady_s >= REPORT_S
        if not (is_due or ended or self._ending):
            return _NOTHING
        settled, self._ending = self._ending, []
        (self._ending if airborne else settled).extend(ended)
        self._fold()
        charged = self._take_all() if is_due else {}
        for handle in settled:
            self._leave(handle)
            total_s = self._reported.pop(handle, 0.0) + self._pending.pop(handle, 0.0)
            charged[handle] = round(total_s * 1e6)
        return charged, settled

    # --- inside -------------------------------------------------------------------------------------------

    def _charge(self, members: StepMembers, step_s: float) -> float:
        """Charge a step that is not steady; the steady run that may follow begins after it."""
        chunks, verified = members.chunks, members.verified
        work = StepWork(
            members.decodes + len(chunks),
            sum(rows for _, rows, _ in verified) if verified else members.decodes,
            members.attended,
            members.prefill_tokens,
            sum([attended_before(chunk.start, chunk.end) for chunk in chunks]),
            sum(members.scored),
        )
        price = prices(self._costs.costs, work, step_s)
        self._costs.add(work, step_s)
        self._unreported_s += step_s
        for handle, rows, length in verified:
            self._add(handle, price.decode(rows, length))
        if not verified:
            self._advance(price, 0.0, 1)
            self._steady = members.decodes, members.attended + members.decodes
        prefill_s = 0.0
        for chunk, scored in zip(chunks, members.scored, strict=True):
            share_s = price.chunk(chunk.start, chunk.end, scored)
            prefill_s += share_s
            self._add(chunk.sequence.handle, share_s)
        return prefill_s

    def _fold(self) -> None:
        """Charge the steady run so far, with the mean length of each sequence in it."""
        steps, steady_s = self._steady_steps, self._steady_s
        if not steps:
            return
        self._steady_steps, self._steady_s = 0, 0.0
        decodes, attended = self._steady
        age = (steps - 1) / 2
        work = StepWork(decodes, decodes, attended + decodes * age)
        self._advance(prices(self._costs.costs, work, steady_s), age, steps)
        self._costs.add(work, steady_s, steps)
        self._unreported_s += steady_s
        self._steady = decodes, attended + decodes * steps

    def _advance(self, price: StepPrices, age: float, steps: int) -> None:
        """Add charges to the sums; ``age``: steps until the mean length."""
        sums = self._sums
        self._sums = _Sums(
            sums.sequence_s + price.sequence_s + price.row_s,
            sums.token_s + price.attended_s,
            sums.aged_s + price.attended_s * (self._number + age),
        )
        self._number += steps

    def _add(self, handle: int, share_s: float) -> None:
        self._pending[handle] = self._pending.get(handle, 0.0) + share_s

    def _leave(self, handle: int) -> None:
        """Charge a sequence for its run, which is over. No effect without one."""
        if (run := self._runs.pop(handle, None)) is not None:
            self._add(handle, self._due(run))

    def _due(self, run: tuple[int, _Sums]) -> float:
        offset, before = run
        now = self._sums
        tokens_s = offset * (now.token_s - before.token_s) + now.aged_s - before.aged_s
        return now.sequence_s - before.sequence_s + tokens_s

    def _take_all(self) -> dict[int, int]:
        """Return the charges of all that were charged since the last report."""
        self._unreported_s = 0.0
        for handle, run in self._runs.items():
            self._add(handle, self._due(run))
        self._sums = start = _Sums()  # so that rounding does not add up
        self._runs = {handle: (offset, start) for handle, (offset, _) in self._runs.items()}
        charged: dict[int, int] = {}
        for handle, share_s in self._pending.items():
            self._reported[handle] = total_s = self._reported.get(handle, 0.0) + share_s
            charged[handle] = round(total_s * 1e6)
        self._pending = {}
        return charged
