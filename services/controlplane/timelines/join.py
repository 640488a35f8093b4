"""One timeline from its parts: the gateway's record, the scheduler's decisions, the workers' steps.

The reference clock is the gateway's where the end of the request is known; otherwise it is this process's,
which each answer of a worker is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from google.protobuf.field_mask_pb2 import FieldMask

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import scheduler_pb2, slis_pb2, worker_pb2
from services.controlplane.timelines.policy.clocks import Correction, Interval, correction_of, laid_out
from services.core.errors import NotFound

_QUEUE: Final = 2  # stages of StageClock: from here on the scheduler, then the worker has the request
_DISPATCH: Final = 3
_DECODE: Final = 6
# Fields that the tenant of a request may see; the others are about the fleet.
_TIMELINE: Final = FieldMask(paths=("kept_time", "scheduler_clock"))
_FINISHED: Final = FieldMask(paths=(
    "request_id", "face", "tenant", "model", "version_digest", "priority", "reason", "received_unix_us",
    "stages_us", "prompt_tokens", "cached_tokens", "output_tokens",
))  # fmt: skip
_DECISION: Final = FieldMask(paths=("choice", "outcome", "queued_time", "wait", "attempt"))


@dataclass(frozen=True, slots=True)
class WorkerSteps:
    """The answers of one worker, and when the first was requested and received, by this process's clock."""

    worker_id: str
    pages: Sequence[worker_pb2.ReadStepsResponse]
    sent_unix_us: int
    received_unix_us: int


def joined(
    request_id: str,
    finished: slis_pb2.FinishedRequest | None,
    explained: scheduler_pb2.ExplainResponse | None,
    workers: Iterable[WorkerSteps],
    notes: Sequence[str],
) -> pb.GetTimelineResponse:
    """Return the parts on one clock."""
    timeline = pb.GetTimelineResponse(request_id=request_id, notes=notes)
    if finished is not None:
        timeline.finished.CopyFrom(finished)
    if explained is not None:
        timeline.rows.extend(explained.rows)
        timeline.decisions.extend(explained.decisions)
        _correct_decisions(timeline)
    found = [one for one in workers if one.pages]
    single = sum(_is_own(each, request_id) for one in found for each in one.pages[0].sequences) == 1
    for one in found:
        _add_host(timeline, one, single=single)
    return timeline


def visible_to(timeline: pb.GetTimelineResponse, tenant: str) -> pb.GetTimelineResponse:
    """Return the timeline as the tenant may see it: nothing of others but their number in each step.

    Raises NotFound for another tenant's request, as for one that does not exist.
    """
    owners = {timeline.finished.tenant} if timeline.HasField("finished") else set[str]()
    owners |= {one.tenant for one in timeline.decisions} | {one.tenant for one in timeline.rows}
    own_id = timeline.request_id
    owners |= {one.tenant for host in timeline.workers for one in host.sequences if _is_own(one, own_id)}
    if owners != {tenant}:
        raise unknown(own_id)
    seen = pb.GetTimelineResponse(request_id=own_id)
    if timeline.HasField("finished"):
        _FINISHED.MergeMessage(timeline.finished, seen.finished)
    _TIMELINE.MergeMessage(timeline, seen)
    for decision in timeline.decisions:
        _DECISION.MergeMessage(decision, seen.decisions.add())
    for number, host in enumerate(timeline.workers, start=1):
        seen.workers.append(_own_part(host, own_id, f"worker {number}"))
    return seen


def unknown(request_id: str) -> NotFound:
    """Return the error for a request without any record."""
    return NotFound(
        f"there is no record of the request {request_id}: it is unknown, or too old for the recorders"
    )


def when(unix_us: float) -> str:
    """Return a time of day for a note."""
    return f"{datetime.fromtimestamp(unix_us / 1e6, UTC):%H:%M:%S.%f}"[:-3] + " UTC"


def _is_own(sequence: worker_pb2.RecordedSequence, request_id: str) -> bool:
    return sequence.request_id == request_id


def _stages_until(finished: slis_pb2.FinishedRequest, stage: int) -> int:
    return finished.received_unix_us + sum(finished.stages_us[:stage])


def _correct_decisions(timeline: pb.GetTimelineResponse) -> None:
    """Move the decisions to the gateway's clock: it waited in its queue stage while they were taken."""
    if not timeline.decisions or not timeline.HasField("finished"):
        return
    finished, decisions = timeline.finished, timeline.decisions
    starts = [one.queued_time.ToMicroseconds() for one in decisions]
    ends = [start + one.wait.ToMicroseconds() for start, one in zip(starts, decisions, strict=True)]
    last = _DISPATCH if len(decisions) == 1 else len(finished.stages_us)
    outer = Interval(_stages_until(finished, _QUEUE), _stages_until(finished, last))
    found = correction_of(outer, Interval(min(starts), max(ends)))
    for start_us, decision in zip(starts, decisions, strict=True):
        decision.queued_time.FromMicroseconds(max(0, start_us + found.offset_us))
    timeline.scheduler_clock.CopyFrom(_clock(found))


def _clock(found: Correction) -> pb.ClockCorrection:
    return pb.ClockCorrection(offset_us=found.offset_us, error_us=found.error_us)


def _add_host(timeline: pb.GetTimelineResponse, worker: WorkerSteps, *, single: bool) -> None:
    """Add a worker's pages. ``single``: the request has one sequence in all."""
    host = timeline.workers.add(worker_id=worker.worker_id)
    sequences: dict[tuple[int, int], worker_pb2.RecordedSequence] = {}
    engines: dict[int, worker_pb2.RecordedEngine] = {}
    for page in worker.pages:
        sequences |= {(one.engine, one.number): one for one in page.sequences}
        engines |= {one.number: one for one in page.engines}
        host.steps.extend(page.steps)
    own = [one for one in sequences.values() if _is_own(one, timeline.request_id)]
    finished = timeline.finished if timeline.HasField("finished") else None
    found = _correction(worker, own, finished, single=single)
    host.clock.CopyFrom(_clock(found))
    host.engines.extend(engines.values())
    host.sequences.extend(sequences.values())
    _shift(host, found.offset_us)
    for engine in engines:
        steps = [one for one in host.steps if one.engine == engine]
        spans = laid_out([Interval(one.start_unix_us, one.start_unix_us + one.took_us) for one in steps])
        for step, span in zip(steps, spans, strict=True):
            step.start_unix_us = max(0, span.start_us)


def _correction(
    worker: WorkerSteps,
    own: Sequence[worker_pb2.RecordedSequence],
    finished: slis_pb2.FinishedRequest | None,
    *,
    single: bool,
) -> Correction:
    if finished is None or not own:
        now_us = worker.pages[0].now_unix_us
        return correction_of(Interval(worker.sent_unix_us, worker.received_unix_us), Interval(now_us, now_us))
    first = own[0]
    if single and first.first_token_unix_us:
        outer = Interval(_stages_until(finished, _DISPATCH), _stages_until(finished, _DECODE))
        return correction_of(outer, Interval(first.accepted_unix_us, first.first_token_unix_us))
    outer = Interval(finished.received_unix_us, _stages_until(finished, len(finished.stages_us)))
    starts = [one.accepted_unix_us for one in own]
    ends = [one.ended_unix_us or one.accepted_unix_us for one in own]
    return correction_of(outer, Interval(min(starts), max(ends)))


def _shift(host: pb.TimelineHost, offset_us: int) -> None:
    if not offset_us:
        return
    for sequence in host.sequences:
        for name in ("accepted_unix_us", "first_token_unix_us", "ended_unix_us"):
            if at_us := getattr(sequence, name):
                setattr(sequence, name, max(0, at_us + offset_us))
        for moment in sequence.moments:
            moment.unix_us = max(0, moment.unix_us + offset_us)
    for step in host.steps:
        step.start_unix_us = max(0, step.start_unix_us + offset_us)


def without_neighbours(host: pb.TimelineHost, request_id: str) -> None:
    """Drop the sequences of other requests; each step still has its size."""
    own = {(one.engine, one.number) for one in host.sequences if _is_own(one, request_id)}
    kept = [one for one in host.sequences if _is_own(one, request_id)]
    del host.sequences[:]
    host.sequences.extend(kept)
    for step in host.steps:
        places = [place for place, number in enumerate(step.members) if (step.engine, number) in own]
        for column in (step.members, step.prefilled, step.sampled):
            values = [column[place] for place in places]
            del column[:]
            column.extend(values)


def _own_part(host: pb.TimelineHost, request_id: str, name: str) -> pb.TimelineHost:
    """Return what the owner of the request sees of a worker."""
    seen = pb.TimelineHost()
    seen.CopyFrom(host)
    without_neighbours(seen, request_id)
    seen.worker_id = name
    # Workers count the sequences and steps of all requests: the owner's begin at 1.
    numbers = {(one.engine, one.number): place for place, one in enumerate(seen.sequences, start=1)}
    for sequence in seen.sequences:
        sequence.number = numbers[sequence.engine, sequence.number]
    for place, step in enumerate(seen.steps, start=1):
        step.number, step.prefill_tokens = place, sum(step.prefilled)
        step.members[:] = [numbers[step.engine, number] for number in step.members]
        # The load of the worker is the operators', and the prediction is a linear function of it.
        step.predicted_us = step.kv_blocks_used = step.running = step.waiting = 0
    for engine in seen.engines:
        engine.kv_blocks_total = 0
    return seen
