"""A request over time, from ``GetTimeline``: lines for people, and trace events that Perfetto opens.

The trace is in the JSON form of Chrome's trace events (Trace Event Format, Google, 2016): complete events (X)
that are disjoint or nested on each track, instants (i), flows (s, f), names of tracks (M); microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import mean
from typing import Any, Final

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import scheduler_pb2, slis_pb2, worker_pb2

STAGES: Final = ("validate", "admit", "queue", "dispatch", "engine wait", "prefill", "decode", "send")
SLOW_RATIO: Final = 2.0  # a step that takes so many times its prediction is shown by itself
GAP_RATIO: Final = 5.0  # time without a step that is shown, in steps before it
MAX_NEIGHBOURS: Final = 64  # tracks of other requests per worker in a trace
_REQUEST, _SCHEDULER, _FIRST_WORKER = 1, 2, 3  # processes of a trace
_DISPATCH: Final = 3

Step = worker_pb2.RecordedStep
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """Something that the request did, or that happened to it. Times are microseconds."""

    at_us: int  # time since the start of the timeline
    took_us: int
    what: str
    where: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another request in the steps of this one; tokens are those of the shared steps."""

    request_id: str
    tenant: str
    worker_id: str
    steps: int
    prefilled_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class _Share:
    """A step, and the part of one sequence in it."""

    step: Step
    place: int

    @property
    def prefilled(self) -> int:
        return self.step.prefilled[self.place]

    @property
    def sampled(self) -> int:
        return self.step.sampled[self.place]

    @property
    def end_us(self) -> int:
        return self.step.start_unix_us + self.step.took_us

    @property
    def is_slow(self) -> bool:
        return 0 < SLOW_RATIO * self.step.predicted_us < self.step.took_us

    @property
    def kind(self) -> str:
        return "prefill" if self.prefilled else "decode"

    def has_gap(self, before: _Share) -> bool:
        """Whether the time without a step since ``before`` is long enough to be shown."""
        return self.step.start_unix_us - before.end_us > GAP_RATIO * max(before.step.took_us, 1000)

    def continues(self, before: _Share) -> bool:
        """Whether both are shown together: they are of one kind, without a gap, and neither is slow."""
        return self.kind == before.kind and not (self.is_slow or before.is_slow or self.has_gap(before))

    def follows(self, before: _Share) -> bool:
        """Whether it is the next step of the engine, and of the same kind."""
        return self.step.number == before.step.number + 1 and self.kind == before.kind


def origin_us(timeline: pb.GetTimelineResponse) -> int:
    """Return the Unix time of the timeline's first event, in microseconds; 0 without any."""
    found = [one.queued_time.ToMicroseconds() for one in timeline.decisions]
    if timeline.HasField("finished"):
        found.append(timeline.finished.received_unix_us)
    for host in timeline.workers:
        found += [one.accepted_unix_us for one in host.sequences if one.request_id == timeline.request_id]
        found += [one.start_unix_us for one in host.steps[:1]]
    return min(filter(None, found), default=0)


def lines_of(timeline: pb.GetTimelineResponse) -> list[TimelineRow]:
    """Return what the request did in order of time; steps of the same kind in a row are one line."""
    origin = origin_us(timeline)
    found = [
        TimelineRow(start_us - origin, took_us, name)
        for name, start_us, took_us in _stages(timeline)
        if took_us or name == "decode"
    ]
    for one in timeline.decisions:
        at_us = one.queued_time.ToMicroseconds() - origin
        found.append(TimelineRow(at_us, one.wait.ToMicroseconds(), "placement", one.worker_id, _why(one)))
    for host, sequence in _own(timeline):
        where = host.worker_id
        for moment in sequence.moments:
            found.append(TimelineRow(moment.unix_us - origin, 0, moment.kind.lower(), where))
        shares = _shares(host).get((sequence.engine, sequence.number), [])
        rows = _engine_of(host, sequence.engine).rows
        found += [_line(run, rows, where, origin) for run in _runs(shares, _Share.continues)]
        found += [
            TimelineRow(before.end_us - origin, after.step.start_unix_us - before.end_us, "in no step", where)
            for before, after in pairwise(shares)
            if after.has_gap(before)
        ]
        if sequence.ended_unix_us:
            detail = f"{sequence.output_tokens} output tokens" if sequence.output_tokens else ""
            found.append(TimelineRow(sequence.ended_unix_us - origin, 0, sequence.reason, where, detail))
    return sorted(found, key=lambda line: (line.at_us, -line.took_us))


def neighbours_of(timeline: pb.GetTimelineResponse) -> list[Neighbour]:
    """Return the other requests of its steps: those with the most prefill beside it first."""
    found: dict[tuple[str, str], Neighbour] = {}
    own = {(host.worker_id, one.engine, one.number) for host, one in _own(timeline)}
    for host in timeline.workers:
        by_sequence = _shares(host)
        for sequence in host.sequences:
            shares = by_sequence.get((sequence.engine, sequence.number), [])
            if (host.worker_id, sequence.engine, sequence.number) in own or not shares:
                continue
            before = found.get((host.worker_id, sequence.request_id))
            found[host.worker_id, sequence.request_id] = Neighbour(
                sequence.request_id,
                sequence.tenant,
                host.worker_id,
                len(shares) + (before.steps if before else 0),
                sum(one.prefilled for one in shares) + (before.prefilled_tokens if before else 0),
                sum(one.sampled for one in shares) + (before.output_tokens if before else 0),
            )
    return sorted(found.values(), key=lambda one: (-one.prefilled_tokens, -one.steps))


def chrome_trace(timeline: pb.GetTimelineResponse) -> dict[str, Any]:
    """Return the trace as a JSON document."""
    trace = _Trace(origin_us(timeline))
    trace.process(_REQUEST, f"request {timeline.request_id}")
    trace.process(_SCHEDULER, "scheduler")
    _trace_request(trace, timeline)
    _trace_decisions(trace, timeline.decisions)
    for number, host in enumerate(timeline.workers):
        trace.process(_FIRST_WORKER + number, f"worker {host.worker_id}")
        _trace_worker(trace, _FIRST_WORKER + number, host, timeline)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "request_id": timeline.request_id,
            "origin_unix_us": trace.origin_us,
            "notes": list(timeline.notes),
        },
        "traceEvents": trace.events(),
    }


class _Trace:
    """Collects events; those of each track are written in order of their start, the longest first."""

    def __init__(self, origin_us: int) -> None:
        self.origin_us = origin_us
        self._names: list[Event] = []
        self._events: list[Event] = []
        self._flows = count(1)

    def process(self, pid: int, name: str) -> None:
        self._name("process", pid, 0, name)

    def track(self, pid: int, tid: int, name: str) -> None:
        self._name("thread", pid, tid, name)

    def bar(self, at: tuple[int, int], start_us: int, end_us: int, name: str, **args: Any) -> None:
        event = self._event("X", at, start_us, name, "fairway", args)
        event["dur"] = max(0, end_us - start_us)
        self._events.append(event)

    def instant(self, at: tuple[int, int], at_us: int, name: str, **args: Any) -> None:
        self._events.append({**self._event("i", at, at_us, name, "fairway", args), "s": "t"})

    def flow(self, name: str, start: tuple[tuple[int, int], int], end: tuple[tuple[int, int], int]) -> None:
        """Draw an arrow between bars; none backwards in time, where clocks agree only within their error."""
        (start_at, start_us), (end_at, end_us) = start, end
        if start_us > end_us:
            return
        number = next(self._flows)
        self._events.append({**self._event("s", start_at, start_us, name, "flow", {}), "id": number})
        self._events.append({**self._event("f", end_at, end_us, name, "flow", {}), "id": number, "bp": "e"})

    def events(self) -> list[Event]:
        ordered = sorted(self._events, key=lambda event: (event["ts"], -event.get("dur", 0)))
        return [*self._names, *ordered]

    def _name(self, of: str, pid: int, tid: int, name: str) -> None:
        """Name a process, or a thread of it; viewers show both in the order of their numbers."""
        values = (f"{of}_name", {"name": name}), (f"{of}_sort_index", {"sort_index": tid or pid})
        for kind, value in values:
            self._names.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": value})

    def _event(
        self, kind: str, at: tuple[int, int], at_us: int, name: str, category: str, args: dict[str, Any]
    ) -> Event:
        pid, tid = at
        ts = max(0, at_us - self.origin_us)
        return {"ph": kind, "name": name, "cat": category, "pid": pid, "tid": tid, "ts": ts, "args": args}


def _stages(timeline: pb.GetTimelineResponse) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and duration of each stage."""
    if timeline.HasField("finished"):
        at_us = timeline.finished.received_unix_us
        for name, took_us in zip(STAGES, timeline.finished.stages_us, strict=False):
            yield name, at_us, took_us
            at_us += took_us


def _own(
    timeline: pb.GetTimelineResponse,
) -> Iterator[tuple[pb.TimelineHost, worker_pb2.RecordedSequence]]:
    for host in timeline.workers:
        for sequence in host.sequences:
            if sequence.request_id == timeline.request_id:
                yield host, sequence


def _shares(host: pb.TimelineHost) -> dict[tuple[int, int], list[_Share]]:
    """Return the steps that each sequence was in, the oldest first, by engine and number."""
    found: dict[tuple[int, int], list[_Share]] = {}
    for step in host.steps:
        for place, number in enumerate(step.members):
            found.setdefault((step.engine, number), []).append(_Share(step, place))
    return found


def _engine_of(host: pb.TimelineHost, number: int) -> worker_pb2.RecordedEngine:
    return next((one for one in host.engines if one.number == number), worker_pb2.RecordedEngine())


def _runs(shares: Iterable[_Share], continues: Callable[[_Share, _Share], bool]) -> Iterator[list[_Share]]:
    """Yield steps in a row of which each continues the one before it."""
    run = list[_Share]()
    for share in shares:
        if run and not continues(share, run[-1]):
            yield run
            run = []
        run.append(share)
    if run:
        yield run


def _line(run: Sequence[_Share], rows: bool, where: str, origin: int) -> TimelineRow:
    first, last = run[0], run[-1]
    others = [one.step.size - 1 for one in run]
    least, most = min(others), max(others)
    beside = sum(one.step.prefill_tokens - one.prefilled for one in run)
    parts = list[str]()
    if first.is_slow:
        parts.append(f"slow: {first.step.predicted_us / 1e3:.1f} ms predicted")
    if rows:
        parts.append(f"{sum(one.sampled for one in run)} rows")
    elif first.prefilled:
        parts.append(f"{sum(one.prefilled for one in run)} tokens")
    span = f"{least} to {most}" if least != most else str(most)
    parts.append(f"with {span} other{'s' * (most > 1)}" if most else "alone")
    if beside:
        parts.append(f"{beside} prompt tokens of others")
    if len(run) > 1:
        took_ms = [one.step.took_us / 1e3 for one in run]
        parts.append(f"mean {mean(took_ms):.1f} ms, longest {max(took_ms):.1f} ms")
    name = "batch" if rows else f"{first.kind} in {len(run)} step{'s' * (len(run) > 1)}"
    at_us = first.step.start_unix_us - origin
    return TimelineRow(at_us, last.end_us - first.step.start_unix_us, name, where, "; ".join(parts))


def waits_of(found: scheduler_pb2.PlacementDecision) -> list[str]:
    """Return why a placement waited: what was missing at how many attempts, and what was granted first."""
    waits = []
    if found.looks_without_room:
        waits.append(f"no room at {found.looks_without_room} of {found.looks} looks")
    if found.looks_giving_way:
        waits.append(f"yielding at {found.looks_giving_way}")
    if found.looks_over_budget:
        waits.append(f"at its KV budget at {found.looks_over_budget}")
    if found.bypassed:
        waits.append(f"bypassed by {found.bypassed}")
    return waits


def _why(found: scheduler_pb2.PlacementDecision) -> str:
    parts = [f"{found.outcome}, choice {found.choice}" if found.choice else found.outcome]
    parts += waits_of(found)
    if found.ranked:
        parts.append(f"best of {len(found.ranked)}")
    return "; ".join(parts)


def _trace_request(trace: _Trace, timeline: pb.GetTimelineResponse) -> None:
    trace.track(_REQUEST, 1, "stages")
    if not timeline.HasField("finished"):
        return
    finished: slis_pb2.FinishedRequest = timeline.finished
    at, start_us = (_REQUEST, 1), finished.received_unix_us
    trace.bar(
        at,
        start_us,
        start_us + sum(finished.stages_us),
        "request",
        tenant=finished.tenant,
        model=finished.model,
        version=finished.version_digest,
        reason=finished.reason,
        prompt_tokens=finished.prompt_tokens,
        cached_tokens=finished.cached_tokens,
        output_tokens=finished.output_tokens,
    )
    for name, stage_us, took_us in _stages(timeline):
        if took_us:
            trace.bar(at, stage_us, stage_us + took_us, name)


def _trace_decisions(trace: _Trace, decisions: Iterable[scheduler_pb2.PlacementDecision]) -> None:
    """A track per placement: those of one choice may overlap, where its gateway submitted it again."""
    for number, one in enumerate(decisions, start=1):
        trace.track(_SCHEDULER, number, f"choice {one.choice}, attempt {one.attempt}")
        at_us, wait_us = one.queued_time.ToMicroseconds(), one.wait.ToMicroseconds()
        args = {"worker": one.worker_id, "why": _why(one), "prompt_tokens": one.prompt_tokens}
        trace.bar((_SCHEDULER, number), at_us, at_us + wait_us, one.outcome, **args)


def _trace_worker(trace: _Trace, pid: int, host: pb.TimelineHost, timeline: pb.GetTimelineResponse) -> None:
    tids = count(1)
    for engine in host.engines:
        at = pid, next(tids)
        trace.track(*at, f"engine {engine.number}: {engine.model} {engine.version_digest[:19]}")
        for step in host.steps:
            if step.engine == engine.number:
                _trace_step(trace, at, step, rows=engine.rows)
    by_sequence, others = _shares(host), list[tuple[list[_Share], worker_pb2.RecordedSequence]]()
    for sequence in host.sequences:
        shares = by_sequence.get((sequence.engine, sequence.number), [])
        if sequence.request_id != timeline.request_id:
            others.append((shares, sequence))
            continue
        at = pid, next(tids)
        trace.track(*at, f"this request, choice {sequence.choice}")
        _trace_own(trace, at, shares, sequence, timeline)
    others.sort(key=lambda found: -len(found[0]))
    for shares, sequence in others[:MAX_NEIGHBOURS]:
        if shares:
            at = pid, next(tids)
            trace.track(*at, f"{sequence.tenant} {sequence.request_id or '(not recorded)'}")
            for run in _runs(shares, _Share.follows):
                trace.bar(
                    at,
                    run[0].step.start_unix_us,
                    run[-1].end_us,
                    run[0].kind,
                    steps=len(run),
                    prefilled_tokens=sum(one.prefilled for one in run),
                    output_tokens=sum(one.sampled for one in run),
                )


def _trace_step(trace: _Trace, at: tuple[int, int], step: Step, *, rows: bool) -> None:
    trace.bar(
        at,
        step.start_unix_us,
        step.start_unix_us + step.took_us,
        f"batch of {sum(step.sampled)} rows" if rows else f"step of {step.size}",
        step=step.number,
        predicted_us=step.predicted_us,
        prefill_tokens=step.prefill_tokens,
        running=step.running,
        waiting=step.waiting,
        kv_blocks_used=step.kv_blocks_used,
    )


def _trace_own(
    trace: _Trace,
    at: tuple[int, int],
    shares: Sequence[_Share],
    sequence: worker_pb2.RecordedSequence,
    timeline: pb.GetTimelineResponse,
) -> None:
    """A bar from acceptance to end, which encloses one for each step of the sequence."""
    starts = [sequence.accepted_unix_us, *(one.step.start_unix_us for one in shares)]
    ends = [sequence.ended_unix_us, *(one.end_us for one in shares), *starts]
    trace.bar(
        at,
        min(starts),
        max(ends),
        f"sequence: {sequence.reason or 'runs'}",
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        output_tokens=sequence.output_tokens,
    )
    for one in shares:
        name = f"prefill {one.prefilled}" if one.prefilled else "decode"
        trace.bar(at, one.step.start_unix_us, one.end_us, name, others=one.step.size - 1)
    for moment in sequence.moments:
        trace.instant(at, moment.unix_us, moment.kind.lower())
    if sequence.first_token_unix_us:
        trace.instant(at, sequence.first_token_unix_us, "first token")
    stages = {name: start_us for name, start_us, took_us in _stages(timeline) if took_us}
    if (dispatched_us := stages.get(STAGES[_DISPATCH])) is not None:
        trace.flow("start", ((_REQUEST, 1), dispatched_us), (at, min(starts)))
