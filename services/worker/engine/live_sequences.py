"""The sequences that live in an engine: what a step does to each of them, and how they end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from services.worker.engine.execute.executor import NOT_FINITE, Batch, Samples, unknown_token
from services.worker.engine.plan.planner import Planner
from services.worker.engine.sequence import SequenceState, Status
from services.worker.engine.step_meter import StepMembers
from services.worker.engine_protocol import FinishReason, SampledLogprobs
from services.worker.policy.speculation import Verified

FIRST_OF_PROMPT: Final = SampledLogprobs(0.0, [], [])  # nothing precedes it
_HANDLE: Final = attrgetter("handle")
PromptLogprobs = dict[int, list[SampledLogprobs]]  # log-probabilities of prompt tokens by handle


@dataclass(frozen=True, slots=True)
class Work:
    """What a step is measured by: its decodes read ``attended_tokens`` of KV; ``cached`` is by handle what of
    a prompt came from a cache, in the step that first computes it; ``prefilled`` by handle the tokens of each
    prefill."""

    decodes: int = 0
    prefill_tokens: int = 0
    attended_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    prefilled: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """The results of a step, in the columns of ``Stepped``."""

    handles: list[int]
    tokens: list[int]
    logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    verified: list[Verified] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs = field(default_factory=dict)
    probe_scores: list[float] = field(default_factory=list)


def outcome_of(
    sampled: list[SequenceState], samples: Samples, kept: list[int], prompt_logprobs: PromptLogprobs
) -> Outcome:
    """Return the columns of the rows that were kept, of the sequences that were sampled."""
    tokens, probed = samples.tokens, samples.probe_scores
    if len(kept) < len(sampled):
        sampled, tokens = [sampled[row] for row in kept], [tokens[row] for row in kept]
        probed = [probed[row] for row in kept] if probed else probed
    handles = list(map(_HANDLE, sampled))
    outcome = Outcome(handles, tokens, prompt_logprobs=prompt_logprobs, probe_scores=probed)
    if samples.logprobs:
        for row, sequence in zip(kept, sampled, strict=True):
            if row in samples.logprobs:
                outcome.logprobs.setdefault(sequence.handle, []).append(samples.logprobs[row])
    return outcome


@dataclass(slots=True)
class Flight:
    """A batch, and the sequence of each row that it samples. It began when it was planned, or when the one
    before it had ended.

    ``members``: as the step meter returned them. ``foreseen``: its sequences are where its tokens bring
    them, with unknown ones in their place.
    """

    batch: Batch
    sampled: list[SequenceState]
    work: Work
    began_s: float
    members: StepMembers | None
    foreseen: bool = False


class LiveSequences:
    """The live sequences by handle. ``take_ended`` and ``take_gone`` return each ended sequence once."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._live: dict[int, SequenceState] = {}
        self._finished: dict[int, FinishReason] = {}
        self._errors: dict[int, str] = {}
        self._embeddings: dict[int, bytes] = {}
        self._gone: list[int] = []  # handles that are no longer live and still have to be reported

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, handle: int) -> bool:
        return handle in self._live

    @property
    def any_ended(self) -> bool:
        return bool(self._finished)

    def add(self, sequence: SequenceState) -> None:
        """Plan a sequence from now on."""
        self._live[sequence.handle] = sequence
        self._planner.add(sequence)

    def compiled(self, handle: int, refusal: str) -> None:
        """Plan a sequence whose constraint was compiled, or fail it if that is refused."""
        sequence = self._live[handle]
        if refusal:
            self._fail(sequence, refusal, "constraint")
        else:
            self._planner.compiled(sequence)

    def masked(self, handle: int) -> None:
        """Plan a sequence whose mask was computed in the separate thread."""
        self._planner.masked(self._live[handle])

    def end_at_once(self, handle: int, reason: FinishReason, error: str = "") -> None:
        """Record the end of a sequence that never ran."""
        self._finished[handle] = reason
        if error:
            self._errors[handle] = error

    def credit(self, handle: int, limit: int) -> None:
        """Raise the output limit of a sequence, if it has not just finished."""
        if (sequence := self._live.get(handle)) is not None:
            self._planner.credit(sequence, limit)

    def park(self, handle: int) -> None:
        """Let a sequence make one token more, if it has not just finished; then it waits for credit."""
        if (sequence := self._live.get(handle)) is not None:
            sequence.cut_credit(sequence.output_tokens + 1)

    def cancel(self, handle: int) -> bool:
        """Remove a sequence without reporting how it ends; return whether that was not reported before."""
        sequence = self._live.pop(handle, None)
        if sequence is not None:
            self._planner.remove(sequence)
        self._errors.pop(handle, None)
        self._embeddings.pop(handle, None)
        return self._finished.pop(handle, None) is not None or sequence is not None

    def hand_back(self, sequences: Iterable[SequenceState]) -> None:
        """Record the sequences that the planner removed."""
        for sequence in sequences:
            self._report(sequence, "preempted")

    def take_ended(self) -> tuple[dict[int, FinishReason], dict[int, str], dict[int, bytes]]:
        """Return the reasons, the errors and the embeddings by handle, since the call before."""
        ended = self._finished, self._errors, self._embeddings
        self._finished, self._errors, self._embeddings = {}, {}, {}
        return ended

    def take_gone(self) -> list[int]:
        """Return the handles of those that were live, since the call before."""
        gone, self._gone = self._gone, []
        return gone

    # --- what a batch does ---------------------------------------------------------------------------

    def commit(self, flight: Flight, samples: Samples) -> Outcome:
        """Append the tokens of the rows that stand, then finish, stall or keep each sequence."""
        if flight.foreseen:
            return self._commit_foreseen(flight, samples)
        batch, sampled = flight.batch, flight.sampled
        self._planner.computed(batch.prefills)
        scores = self._scored(batch, samples)
        accepted = accepted_proposals(batch, samples)
        rows = standing_rows(batch, accepted, len(sampled)) if accepted else range(len(sampled))
        kept: list[int] = []
        for row in rows:
            sequence = sampled[row]
            if sequence.status is not Status.DECODING:
                continue  # an earlier row of it was its last, or a command came
            if row in samples.late:  # its last token is computed once more
                sequence.computed = len(sequence.tokens) - 1
                continue
            if self._ended(sequence, samples, row):
                continue
            token, length = samples.tokens[row], len(sequence.tokens)
            sequence.computed = length
            sequence.tokens.append(token)
            kept.append(row)
            if length + 1 >= sequence.pause_at or token in sequence.stop_ids:
                self._pause(sequence, token)
        for index in accepted:
            self._planner.give_back(batch.decodes[index])
        if batch.prefills:
            self._planner.publish(batch.prefills)
        outcome = outcome_of(sampled, samples, kept, scores)
        outcome.verified += (
            Verified(batch.decodes[index].handle, len(batch.proposals[index]), count)
            for index, count in accepted.items()
        )
        return outcome

    def foresee(self, flight: Flight) -> None:
        """Bring the sequences to where the batch brings them. Those that may end by it are not planned."""
        flight.foreseen = True
        self._planner.computed(flight.batch.prefills)
        for row, sequence in enumerate(flight.sampled):
            if sequence.status is Status.FINISHED:
                continue  # a command or the token before this one ended it
            length = len(sequence.tokens)
            sequence.computed = length
            sequence.tokens.append(unknown_token(row))
            if length + 1 >= sequence.pause_at:
                self._planner.hold(sequence)

    def _commit_foreseen(self, flight: Flight, samples: Samples) -> Outcome:
        """Put the tokens in their places, then finish or stall the sequences that end or have no credit left.

        A row of the batch that follows, whose sequence ends here, is computed for nothing.
        """
        kept: list[int] = []
        scores = self._scored(flight.batch, samples)
        for row, sequence in enumerate(flight.sampled):
            if sequence.status is Status.FINISHED:
                continue
            if self._ended(sequence, samples, row):
                continue
            token = sequence.tokens[-1] = samples.tokens[row]
            kept.append(row)
            if sequence.status is Status.HELD or token in sequence.stop_ids:
                self._pause(sequence, token)
        if flight.batch.prefills:
            self._planner.publish(flight.batch.prefills)
        return outcome_of(flight.sampled, samples, kept, scores)

    def _scored(self, batch: Batch, samples: Samples) -> PromptLogprobs:
        """Return by handle what the chunks add to the log-probabilities of prompts; each is reported once,
        however often its row is computed. A sequence without a number fails."""
        found: PromptLogprobs = {}
        for index, chunk in enumerate(batch.prefills):
            sequence = chunk.sequence
            if not sequence.is_unscored or sequence.status is Status.FINISHED:
                continue
            entries = samples.scores.get(index, [])
            if any(math.isnan(entry.sampled) for entry in entries):
                self._fail(sequence, NOT_FINITE, "not_finite")
                continue
            if not sequence.scored:
                entries = [FIRST_OF_PROMPT, *entries]
            sequence.scored += len(entries)
            if entries:
                found[sequence.handle] = entries
        return found

    # --- ends ----------------------------------------------------------------------------------------

    def _pause(self, sequence: SequenceState, token: int) -> None:
        """Finish or stall a sequence whose last token may be its last."""
        produced = sequence.output_tokens
        if token in sequence.stop_ids and produced > sequence.limits.min_tokens:
            self._finish(sequence, "stop")
        elif produced >= sequence.limits.max_tokens:
            self._finish(sequence, "length")
        elif not sequence.has_credit:
            self._planner.stall(sequence)

    def _ended(self, sequence: SequenceState, samples: Samples, row: int) -> bool:
        """End the sequence if its row has no token: it failed, or ends with its prefill."""
        if samples.errors and row in samples.errors:
            self._fail(sequence, samples.errors[row], "not_finite")
        elif samples.unmasked and row in samples.unmasked:
            self._fail(sequence, samples.unmasked[row], "constraint")
        elif sequence.embeds:
            self._embeddings[sequence.handle] = samples.embeddings[row]
            self._finish(sequence, "length")
        elif not sequence.limits.max_tokens:
            self._finish(sequence, "length")
        else:
            return False
        return True

    def _fail(self, sequence: SequenceState, why: str, reason: FinishReason) -> None:
        self._errors[sequence.handle] = why
        self._finish(sequence, reason)

    def _finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        self._planner.remove(sequence, is_sound=reason != "not_finite")
        self._report(sequence, reason)

    def _report(self, sequence: SequenceState, reason: FinishReason) -> None:
        del self._live[sequence.handle]
        self._gone.append(sequence.handle)
        self._finished[sequence.handle] = reason


def accepted_proposals(batch: Batch, samples: Samples) -> dict[int, int]:
    """Return how many proposals are accepted, by index in ``decodes``, of each decode that has any.

    Every row is sampled with the key of its position, and a proposal is accepted when it equals what was
    sampled before it. So the result is that of one token after the other, at every temperature. Leviathan,
    Kalai and Matias (Fast Inference from Transformers via Speculative Decoding, ICML'23) accept with a
    probability instead, which keeps the distribution but not the tokens.

    A row whose sample failed or is late accepts nothing: it is the last that stands.
    """
    accepted: dict[int, int] = {}
    extra = 0  # rows of proposals before this decode's first
    void = {*samples.errors, *samples.unmasked, *samples.late} if batch.proposals else set()
    for index, proposed in sorted(batch.proposals.items()):
        first = index + extra
        sampled = samples.tokens[first : first + len(proposed)]
        pairs = zip(proposed, sampled, range(first, first + len(proposed)), strict=True)
        equal = (token == other and row not in void for token, other, row in pairs)
        accepted[index] = next((count for count, same in enumerate(equal) if not same), len(proposed))
        extra += len(proposed)
    return accepted


def standing_rows(batch: Batch, accepted: Mapping[int, int], rows: int) -> list[int]:
    """Return which sampling rows stand: the first of each decode, and one for each accepted proposal."""
    standing: list[int] = []
    row = 0
    for index in range(len(batch.decodes)):
        standing += range(row, row + 1 + accepted.get(index, 0))
        row += 1 + len(batch.proposals.get(index, ()))
    standing += range(row, rows)
    return standing
