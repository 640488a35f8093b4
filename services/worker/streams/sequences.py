"""The token path of one engine: its sequences, their credits and their ends.

A table lives as long as its engine process. One loop without a task switch handles a step's tokens; a plain
token costs a look-up, an append and a string concatenation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.core.errors import ConstraintRefused
from services.core.generation import (
    NOT_FINITE,
    FinishReason,
    RunFacts,
    SequenceEnd,
    StartSpec,
    TokenLogprobs,
)
from services.core.poison.suspicion import LossCause, StepRole
from services.ports.clock import Clock
from services.worker import engine_protocol as wire
from services.worker.detokenizer import TextStream, Vocabulary
from services.worker.policy.engine_failures import StallDetector, role_of
from services.worker.streams.charges import UsageAccounting
from services.worker.streams.kv import PoolLimits, PoolStats, Reservations
from services.worker.streams.live_sequence import SlotState, WorkerSequence, microseconds
from services.worker.streams.outbox import Outbox
from services.worker.streams.sequence_slots import Prefills, SequenceSlots
from services.worker.telemetry import VersionTelemetry

MAX_CREDIT: Final = 2**31 - 1
CHARGE_S: Final = 0.25  # interval at which running sequences' output is charged; a heartbeat is four of them
# The client's stream ends with these reasons, so text that was held back becomes final. With other reasons
# the sequence is placed again and continues with its own held-back text.
FLUSHED: Final = frozenset(
    {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.DEADLINE,
        FinishReason.SLOW_READER,
        FinishReason.ERROR,
    }
)


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """One version of an engine: what its sequences are counted for."""

    version_digest: str
    model: str = ""  # the deployment
    telemetry: VersionTelemetry | None = None
    adapter: int = 0  # number of its adapter in the engine; 0: it is the base's computation


class ServedVersions:
    """The versions that one engine serves: those whose computation is the same.

    In order of their arrival, never empty. Single writer: the sequence table.

    ``engine`` names the engine as long as it runs, whichever versions join and leave.
    """

    def __init__(self, first: ServedVersion) -> None:
        self.engine = first.version_digest
        self._versions = {first.version_digest: first}

    def __iter__(self) -> Iterator[str]:
        return iter(self._versions)

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, version_digest: str) -> bool:
        return version_digest in self._versions

    @property
    def first(self) -> str:
        """The one that the engine's cached blocks are reported with."""
        return next(iter(self._versions))

    @property
    def shared_as(self) -> str:
        """The engine's name for the scheduler; empty while it is that of its only version."""
        return "" if list(self._versions) == [self.engine] else self.engine

    def add(self, version: ServedVersion) -> None:
        assert version.version_digest not in self._versions, "the engine serves the version already"
        self._versions[version.version_digest] = version

    def remove(self, version_digest: str) -> None:
        assert len(self._versions) > 1, "an engine without a version"
        del self._versions[version_digest]

    def adapter_of(self, version_digest: str) -> int:
        return self._versions[version_digest].adapter

    def model_of(self, version_digest: str) -> str:
        return self._versions[version_digest].model

    def note_ended(self, sequence: WorkerSequence, reason: str) -> None:
        """Record the end of a sequence in the metrics of its version."""
        telemetry = self._versions[sequence.version_digest].telemetry
        if telemetry is not None:
            telemetry.ended(sequence, reason)


def submit_command(sequence: WorkerSequence, adapter: int = 0) -> wire.Submit:
    """Return the engine's command for a start, with the number of its version's adapter."""
    spec = sequence.spec
    generation = spec.generation
    return wire.Submit(
        handle=sequence.number,
        prompt=generation.prompt,
        sampling=generation.sampling,
        limits=generation.limits,
        credit_limit=sequence.credit_limit,
        choice=spec.choice,
        produced_ids=spec.produced_ids,
        priority=-generation.priority.rank,
        request_id=generation.request_id,
        apart_tokens=spec.apart_tokens,
        embed=spec.embed,
        scored_tokens=spec.scored_tokens,
        adapter=adapter,
        tenant=spec.tenant_id if spec.kv_share else "",
        kv_share=spec.kv_share,
        probe=spec.probe,
    )


def with_texts(token: int, entry: wire.SampledLogprobs, text: str, vocabulary: Vocabulary) -> TokenLogprobs:
    """Return the entry of a token, with the text that became final with it."""
    alone, part = vocabulary.alone, vocabulary.part
    parts = tuple(part(other) for other in entry.top_ids)
    return TokenLogprobs(
        sampled=entry.sampled,
        top_ids=tuple(entry.top_ids),
        top_logprobs=tuple(entry.top_logprobs),
        top_tokens=tuple(alone(other) for other in entry.top_ids),
        token=alone(token),
        text=text,
        rank=entry.rank,
        token_bytes=part(token),
        top_bytes=parts if any(parts) else (),
    )


def begin_scores(sequence: WorkerSequence, vocabulary: Vocabulary) -> None:
    """Let the log-probabilities of the sequence's prompt begin behind those that an earlier run sent."""
    generation = sequence.spec.generation
    if generation.sampling.prompt_logprobs is None:
        return
    sequence.scored = sequence.spec.scored_tokens
    sequence.prompt_text = vocabulary.open(generation.prompt.ids[: sequence.scored])


def add_scores(event: wire.Stepped, live: Mapping[int, WorkerSequence], vocabulary: Vocabulary) -> None:
    """Add what a step scored to the pending output of its sequences: the next tokens of their prompts."""
    for number, entries in event.prompt_logprobs.items():
        sequence = live.get(number)
        if sequence is None or (text := sequence.prompt_text) is None:
            continue
        first = sequence.scored
        ids = sequence.spec.generation.prompt.ids[first : first + len(entries)]
        for token, entry in zip(ids, entries, strict=True):
            sequence.pending_ids.append(token)
            if sequence.pending_ends is not None:
                sequence.pending_ends.append(len(sequence.pending_text))
            sequence.pending_logprobs.append(with_texts(token, entry, text.feed(token), vocabulary))
        sequence.scored += len(entries)
        sequence.outbox.touch(sequence)


def end_of(
    sequence: WorkerSequence,
    reason: FinishReason,
    error: tuple[str, str],
    loss: tuple[LossCause, StepRole],
    embedding: bytes,
    run: RunFacts,
) -> SequenceEnd:
    """Return the end of a sequence. ``error``: its reason and message; ``loss``: its part in a step that
    ended its engine; ``embedding``: empty for a generation."""
    return SequenceEnd(
        reason=reason,
        stop=sequence.text.stop,
        output_tokens=sequence.output_tokens,
        cached_tokens=min(sequence.cached_tokens, sequence.prompt_tokens),
        engine_wait_us=microseconds(sequence.accepted_s, sequence.prefill_started_s),
        prefill_us=run.prefill_us,
        error_reason=error[0],
        error_message=error[1],
        device_us=sequence.device_us,
        loss_cause=loss[0],
        step_role=loss[1],
        embedding=embedding,
        run=run,
    )


def engine_end(event: wire.Stepped, sequence: WorkerSequence) -> tuple[FinishReason, tuple[str, str]]:
    """Return the reason by which the engine finished a sequence, with the reason and message of an error."""
    message = event.errors.get(sequence.number, "")
    match event.finished[sequence.number]:
        case "constraint":
            return FinishReason.ERROR, (ConstraintRefused.reason, message)
        case "error":
            began = sequence.prefill_started_s is not None
            return FinishReason.ERROR, ("INTERNAL" if began else "INVALID_INPUT", message)
        case "not_finite":  # possibly the worker's fault: another worker may continue it
            return FinishReason.ENGINE_LOST, (NOT_FINITE, message)
        case reason:
            return FinishReason(reason), ("", "")


def last_rows(event: wire.Stepped) -> dict[int, int]:
    """Return the row of the last token of each finished sequence, by number; -1 without a token."""
    if not event.finished:
        return {}
    rows = dict(zip(event.handles, range(len(event.handles)), strict=True))
    return {number: rows.get(number, -1) for number in event.finished}


class SequenceTable:
    """Single writer: the worker's event loop. ``send`` passes a command to the engine, False if it cannot.
    ``members`` returns the handles of the step that runs, for an engine that hangs.

    ``slots`` contains the batch slots, ``kv`` the reservations of running sequences, ``prefills`` those of
    them without a token, ``charges`` what they used.
    """

    def __init__(
        self,
        version: ServedVersion,
        *,
        limits: PoolLimits,
        vocabulary: Vocabulary,
        send: Callable[[wire.Command], bool],
        members: Callable[[], Collection[int]] = tuple,
        clock: Clock,
        charges: UsageAccounting,
        changed: Callable[[], None],
        slow_reader_s: float = 30.0,
        used_handles: int = 0,
    ) -> None:
        """``version``: the first that the engine serves; its metrics have the engine's steps. The engine has
        seen ``used_handles``, from 1 on."""
        self.versions = ServedVersions(version)
        self.limits = limits
        self.itl_target_s = 0.0  # the tightest of an objective that its versions have; 0: none
        self.stats = PoolStats()
        self.kv = Reservations(limits)
        self.had_non_finite = False  # a sequence ended because its logits were not finite
        self.prefills = Prefills()
        self.slots = SequenceSlots(limits.max_sequences)
        self._vocabulary = vocabulary
        self._texts = vocabulary.texts
        self._send = send
        self._members = members
        self._clock = clock
        self.charges = charges
        self._changed = changed
        self._slow_reader_s = slow_reader_s
        self._telemetry = version.telemetry
        self._live: dict[int, WorkerSequence] = {}
        self._last_number = used_handles
        self._charged_s = clock.monotonic_s()
        self._silence = StallDetector(clock.monotonic_s(), limits.full_step_s)

    def __len__(self) -> int:
        return len(self._live)

    def sequences(self) -> Iterable[WorkerSequence]:
        return self._live.values()

    @property
    def running(self) -> int:
        """Return how many have a slot and a token."""
        return self.slots.taken - len(self.prefills)

    @property
    def waiting(self) -> int:
        """Return how many have no token yet, or wait to get a slot again."""
        return len(self.prefills) + self.slots.returning

    @property
    def stalled(self) -> bool:
        """Whether the engine is stalled: running sequences wait for it, and new ones are rejected."""
        return self._silence.stalled

    def resize(self, kv_blocks_total: int) -> None:
        """Set the engine's present or requested block count. Running sequences keep their reservations."""
        if kv_blocks_total != self.limits.kv_blocks_total:
            self.limits = replace(self.limits, kv_blocks_total=kv_blocks_total)
            self.kv.resize(kv_blocks_total)
            self._room_changed()

    # --- the gateway's side ---------------------------------------------------------------------

    def has_room(self, spec: StartSpec) -> bool:
        return self.slots.admits(spec) and self.kv.has_room(spec)

    def start(self, outbox: Outbox, handle: int, spec: StartSpec) -> bool:
        """Reserve, submit and accept a sequence; False, with nothing changed, if the engine takes no command.

        The caller has checked ``has_room``.
        """
        sequence = self._new_sequence(outbox, handle, spec)
        resumed_text = sequence.text.resume(spec.produced_ids, spec.delivered_chars)
        adapter = self.versions.adapter_of(sequence.version_digest)
        if not sequence.text.stop and not self._send(submit_command(sequence, adapter)):
            return False
        self._last_number = sequence.number
        self._live[sequence.number] = sequence
        if sequence.has_credit:
            self._make_slot(spec)
            self._run(sequence)
        else:
            self._wait_for_reader(sequence)
        outbox.accept(sequence)
        if resumed_text:
            sequence.pending_text = resumed_text
            outbox.touch(sequence)
        if sequence.text.stop:  # the earlier run found the stop string, but its end was lost
            self._end(sequence, FinishReason.STOP)
            self.charges.settle((sequence.number,))  # it was never submitted
        self._changed()
        return True

    def credit(self, grants: Sequence[tuple[WorkerSequence, int]]) -> None:
        """Raise the output limits of sequences of this table."""
        raised: list[WorkerSequence] = []
        for sequence, tokens in grants:
            sequence.credit_limit = min(sequence.credit_limit + tokens, MAX_CREDIT)
            sequence.watch()
            if sequence.slot is SlotState.RUNNING:
                raised.append(sequence)
            elif sequence.slot is SlotState.PARKED and sequence.has_credit:
                sequence.unblock(self._clock.monotonic_s())
                self.slots.move(sequence, SlotState.RETURNING)
        if raised:
            self._send(wire.Credit([each.number for each in raised], [each.credit_limit for each in raised]))
        if len(raised) < len(grants):
            self._room_changed()

    def cancel(self, sequences: Sequence[WorkerSequence]) -> None:
        """Remove the sequences now; the engine frees their blocks before its next step."""
        for sequence in sequences:
            self._forget(sequence)
            self._note_ended(sequence, FinishReason.CANCELLED)
        self._send(wire.Cancel([sequence.number for sequence in sequences]))
        self._room_changed()

    def sweep(self, now_s: float) -> None:
        """End sequences past their deadline or without credit for too long. Called several times a second."""
        self._watch_engine(now_s)
        ended: list[tuple[WorkerSequence, FinishReason]] = []
        for sequence in self._live.values():
            if now_s >= sequence.deadline_s:
                ended.append((sequence, FinishReason.DEADLINE))
            elif (since_s := sequence.blocked_since_s) is not None and now_s - since_s >= self._slow_reader_s:
                ended.append((sequence, FinishReason.SLOW_READER))
        if ended:
            self._send(wire.Cancel([sequence.number for sequence, _ in ended]))
            for sequence, reason in ended:
                self._end(sequence, reason)
            self._room_changed()

    def _watch_engine(self, now_s: float) -> None:
        """Stop admission when the engine stalls; if the stall lasts, end its sequences with ENGINE_LOST."""
        if self._silence.begins(now_s):
            self._changed()
        if self._live and self._silence.abandons(now_s):
            self._send(wire.Cancel(list(self._live)))  # the first command that it reads when it runs again
            self._lose_all(LossCause.OUTSIDE, self._members())
            self._changed()

    # --- the engine's side ----------------------------------------------------------------------

    def on_stepped(self, event: wire.Stepped) -> None:
        """Pass on a step's tokens. A sequence that is missing here was cancelled during the step."""
        live = self._live
        texts = self._texts
        scores = event.probe_scores
        self._on_message(event.step_s)
        self._note_step(event)
        self.charges.note_step(event, live)
        ends = last_rows(event)
        for number in ends:  # their last token may need to stay without text
            if number in live:
                live[number].fast = False
        if event.cached:
            self._note_cached(event)
        if event.prefill_tokens:
            self.prefills.note_step(event.prefill_tokens, began_s=self._clock.monotonic_s() - event.step_s)
        if event.prompt_logprobs:
            add_scores(event, live, self._vocabulary)
        for row, (number, token) in enumerate(zip(event.handles, event.tokens, strict=True)):
            sequence = live.get(number)
            if sequence is None:
                continue
            if scores and sequence.spec.probe:
                sequence.pending_scores.append(scores[row])
            if sequence.fast and (text := texts[token]) is not None:
                sequence.pending_text += text
            else:
                self._feed(sequence, token, event, is_end=ends.get(number) == row)
                if sequence.text.stop:
                    continue
            sequence.pending_ids.append(token)
            if sequence.pending_ends is not None:
                sequence.pending_ends.append(len(sequence.pending_text))
            sequence.tokens = tokens = sequence.tokens + 1
            if tokens >= sequence.notice_tokens:
                self._notice(sequence)
            if not sequence.queued:
                sequence.queued = True
                outbox = sequence.outbox
                dirty = outbox.dirty
                dirty.append(sequence)
                if len(dirty) == 1:
                    outbox.wake()
        if event.finished:
            self._finish(event)
        if event.settled:
            self.charges.settle(event.settled)

    def on_heartbeat(self, event: wire.EngineHeartbeat) -> None:
        self._on_message()
        self.stats.note_levels(event)

    def on_resized(self, event: wire.Resized) -> None:
        self._on_message()
        self.resize(event.kv_blocks_total)

    def reset_silence(self) -> None:
        """Reset the stall detection after a pause of this process: the engine's messages are still unread."""
        self._on_message()

    def _on_message(self, step_s: float = 0.0) -> None:
        if self._silence.on_message(self._clock.monotonic_s(), step_s):
            self._changed()

    def lost(self, cause: LossCause = LossCause.OUTSIDE, members: Collection[int] = ()) -> None:
        """End every sequence with ENGINE_LOST after the engine process ended; the table is not used again.

        ``members``: the handles of the step that ran.
        """
        self.charges.share_uncharged(
            sequence for sequence in self._live.values() if sequence.slot is SlotState.RUNNING
        )
        self._lose_all(cause, members)
        self.charges.settle_all()
        self.stats.kv_blocks_used = 0
        self._changed()

    def running_of(self, version_digest: str) -> int:
        """Return how many sequences of one of its versions live."""
        if len(self.versions) == 1:
            return len(self._live)
        return sum(sequence.version_digest == version_digest for sequence in self._live.values())

    def versions_of(self, numbers: Iterable[int]) -> frozenset[str]:
        """Return the versions of these sequences, as far as they live."""
        return frozenset(self._live[number].version_digest for number in numbers if number in self._live)

    def leave(self, version_digest: str) -> None:
        """Stop serving one of several versions; its sequences end with ENGINE_LOST, to continue elsewhere."""
        left = [one for one in self._live.values() if one.version_digest == version_digest]
        if left:
            self._send(wire.Cancel([sequence.number for sequence in left]))
        for sequence in left:
            self._end(sequence, FinishReason.ENGINE_LOST)
        self.versions.remove(version_digest)
        self._room_changed()

    def charge(self, *, at_once: bool) -> None:
        """Charge the output of running sequences, at once or when the interval has passed.

        Reports do not charge it each time: that would list the tenant of every running sequence, which would
        be most of the scheduler's work. The rest of a sequence's output is charged at its end.
        """
        now_s = self._clock.monotonic_s()
        if not at_once and now_s - self._charged_s < CHARGE_S:
            return
        self._charged_s = now_s
        for sequence in self._live.values():
            self.charges.add_output(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError if a reservation leaked, or a sequence is missing in its outbox."""
        live = self._live.values()
        running = [sequence for sequence in live if sequence.slot is SlotState.RUNNING]
        self.kv.check_integrity(running)
        self.prefills.check_integrity(running)
        self.slots.check_integrity(live)
        for sequence in live:
            assert sequence.outbox.live.get(sequence.handle) is sequence, "its stream does not know it"
            assert sequence.has_credit or sequence.slot is SlotState.PARKED, "it can make no token here"

    # --- inside ---------------------------------------------------------------------------------

    def _new_sequence(self, outbox: Outbox, handle: int, spec: StartSpec) -> WorkerSequence:
        generation, limits = spec.generation, spec.generation.limits
        text = TextStream(
            self._vocabulary.open(generation.prompt.ids if generation.continues_prompt else ()),
            stops=limits.stop,
            min_tokens=limits.min_tokens,
            spelled={token: self._vocabulary.alone(token) for token in limits.spelled_ids},
        )
        now_s = self._clock.monotonic_s()
        blocks = self.kv.needed_blocks(spec)
        sequence = WorkerSequence(
            spec=spec,
            outbox=outbox,
            handle=handle,
            number=self._last_number + 1,
            text=text,
            model=self.versions.model_of(spec.grant.version_digest),
            prompt_tokens=len(generation.prompt.ids),
            tokens=spec.prefill_tokens,
            credit_limit=min(len(spec.produced_ids) + spec.initial_credit_tokens, MAX_CREDIT),
            reserved_blocks=blocks,
            reserved_tokens=blocks * self.limits.block_size,
            notice_tokens=0,
            accepted_s=now_s,
            accepted_steps=self.stats.sums(),
            deadline_s=math.inf if spec.time_left_s is None else now_s + spec.time_left_s,
            prefill_left=spec.prefill_tokens,
            charged_output=len(spec.produced_ids),
        )
        if spec.unmerged:
            sequence.pending_ends = []
        begin_scores(sequence, self._vocabulary)
        sequence.watch()
        return sequence

    def _feed(self, sequence: WorkerSequence, token: int, event: wire.Stepped, *, is_end: bool) -> None:
        """Handle a token that is not plain: first, partial character, with log-probabilities or stops.

        ``is_end``: it is the last of a finished sequence. Ends the sequence if it completed a stop string.
        """
        if sequence.first_token_s is None:
            self.stats.decode_tokens -= 1  # a prefill produced it
            self._note_prefilled(sequence, event)
        text = sequence.text
        # An end-of-sequence or stop token is not part of the text.
        has_text = not (is_end and event.finished[sequence.number] == "stop")
        if has_text:
            sequence.pending_text += text.feed(token)
        if entries := event.logprobs.get(sequence.number):
            fed = text.fed if has_text else ""
            sequence.pending_logprobs.append(with_texts(token, entries.pop(0), fed, self._vocabulary))
        if not has_text:
            return
        if text.stop:
            sequence.pending_ids.append(token)
            if sequence.pending_ends is not None:
                sequence.pending_ends.append(len(sequence.pending_text))
            sequence.tokens += 1
            sequence.outbox.touch(sequence)
            if sequence.number not in event.finished:
                self._send(wire.Cancel([sequence.number]))
            self._end(sequence, FinishReason.STOP)
            self._changed()
        else:
            plain = text.plain and sequence.spec.generation.sampling.logprobs is None and bool(self._texts)
            sequence.fast = plain and sequence.number not in event.finished

    def _finish(self, event: wire.Stepped) -> None:
        for number in event.finished:
            if (sequence := self._live.get(number)) is not None:
                reason, error = engine_end(event, sequence)
                self.had_non_finite |= error[0] == NOT_FINITE
                if reason is FinishReason.LENGTH and sequence.ends_with_prefill:
                    self._note_prefilled(sequence, event)
                self._end(sequence, reason, error=error, embedding=event.embeddings.get(number, b""))
        self._room_changed()

    def _lose_all(self, cause: LossCause, members: Collection[int]) -> None:
        """End every sequence with ENGINE_LOST and its part in the step that ran."""
        for number, sequence in list(self._live.items()):
            running = sequence.slot is SlotState.RUNNING
            role = role_of(number, members, cause, running=running)
            self._end(sequence, FinishReason.ENGINE_LOST, loss=(cause, role))

    def _end(
        self,
        sequence: WorkerSequence,
        reason: FinishReason,
        *,
        error: tuple[str, str] = ("", ""),
        loss: tuple[LossCause, StepRole] = (LossCause.OUTSIDE, StepRole.NONE),
        embedding: bytes = b"",
    ) -> None:
        """Queue a sequence's end and release its reservation."""
        if reason in FLUSHED and (rest := sequence.text.finish()):
            sequence.pending_text += rest
            sequence.outbox.touch(sequence)
        if sequence.text.stop:
            reason = FinishReason.STOP
        self._forget(sequence)
        self._note_ended(sequence, reason, error[0])
        run = sequence.facts(self.stats.sums(), self._clock.monotonic_s())
        sequence.outbox.end(sequence, end_of(sequence, reason, error, loss, embedding, run))

    def _forget(self, sequence: WorkerSequence) -> None:
        del self._live[sequence.number]
        self.charges.add_output(sequence)
        self.slots.take(sequence)
        if sequence.slot is SlotState.RUNNING:
            self.kv.remove(sequence)
            self.prefills.remove(sequence)

    def _note_ended(self, sequence: WorkerSequence, reason: FinishReason, error: str = "") -> None:
        """Record the end in usage accounting and telemetry."""
        self.charges.add_ended(sequence, reason, self._clock.monotonic_s())
        self.versions.note_ended(sequence, "not_finite" if error == NOT_FINITE else reason.value)

    def _notice(self, sequence: WorkerSequence) -> None:
        """Update a sequence that needs one more block or used its credit; report the free capacity."""
        running = sequence.slot is SlotState.RUNNING
        if sequence.tokens > sequence.reserved_tokens:
            self.kv.grow(sequence, reserved=running)
        sequence.watch()
        if not sequence.has_credit and sequence.slot is not SlotState.PARKED:
            if running:
                self._leave(sequence)
            else:  # the token after ``Park`` used the last credit
                self.slots.take(sequence)
            self._wait_for_reader(sequence)
            if self.slots.spare < 0 and (longest := self.slots.longest_parked()) is not None:
                self._send(wire.Cancel([longest.number]))
                self._end(longest, FinishReason.SLOW_READER)
        self._room_changed()

    def _note_step(self, event: wire.Stepped) -> None:
        self.stats.note_step(event)
        added, evicted = event.prefix_added, event.prefix_removed
        if (added or evicted) and self.kv.change_cached(added, evicted, self._live.values()):
            self._changed()
        if self._telemetry is not None:
            self._telemetry.stepped(event, shared_lost_blocks=self.kv.lost_blocks)

    def _note_cached(self, event: wire.Stepped) -> None:
        """Subtract cached tokens from the prefill, and cached blocks from the reservation."""
        for number, tokens in event.cached.items():
            sequence = self._live.get(number)
            if sequence is not None and sequence.slot is SlotState.RUNNING:
                if self.kv.attach(sequence, tokens):
                    self._changed()
                self.prefills.note_cached(sequence, tokens)

    def _note_prefilled(self, sequence: WorkerSequence, event: wire.Stepped) -> None:
        now_s = self._clock.monotonic_s()
        sequence.first_token_s, sequence.first_steps = now_s, self.stats.sums()
        if sequence.prefill_started_s is None:
            sequence.prefill_started_s = max(now_s - event.step_s, sequence.accepted_s)
        if sequence.slot is SlotState.RUNNING:
            self.prefills.remove(sequence)
            self.kv.share_computed(sequence)
        self.charges.add_prefill(sequence)

    # --- slots ----------------------------------------------------------------------------------

    def _room_changed(self) -> None:
        """Give free slots and KV to the returning sequences, then report the rest."""
        while (sequence := self.slots.next_back(self.kv.has_room_again)) is not None:
            self._make_slot(sequence.spec)
            self.slots.take(sequence)
            sequence.returned(self._clock.monotonic_s())
            self._run(sequence)
            self._send(wire.Credit([sequence.number], [sequence.credit_limit]))
        self._changed()

    def _make_slot(self, spec: StartSpec) -> None:
        """Free a slot for a sequence: another one yields its slot if none is free."""
        if self.slots.taken >= self.slots.most and (victim := self.slots.victim(spec)) is not None:
            self._leave(victim)
            victim.yield_slot(self._clock.monotonic_s())
            self.slots.put(victim, SlotState.RETURNING)
            self._send(wire.Park([victim.number]))

    def _run(self, sequence: WorkerSequence) -> None:
        """Give a slot and a reservation to a sequence that is in no group."""
        self.slots.put(sequence, SlotState.RUNNING)
        self.kv.add(sequence)
        if sequence.first_token_s is None:
            self.prefills.add(sequence)

    def _leave(self, sequence: WorkerSequence) -> None:
        """Take slot and reservation from a running sequence. Its KV stays until the blocks are needed."""
        self.slots.take(sequence)
        self.kv.remove(sequence)
        self.prefills.remove(sequence)

    def _wait_for_reader(self, sequence: WorkerSequence) -> None:
        """Park a sequence that is in no group until it has credit."""
        sequence.blocked_since_s = self._clock.monotonic_s()
        self.slots.put(sequence, SlotState.PARKED)
