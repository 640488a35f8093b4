"""Placements and reports between the wire and the core."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.mirror import Mirror, Pair, enum_pair, numbers_of
from fairway.v1 import scheduler_pb2 as pb
from services.core.decisions import (
    ClassWait,
    FilterRejections,
    FleetWorker,
    PlacementDecision,
    PoolQueue,
    QueueShare,
    RankedWorker,
    WorkerPool,
)
from services.core.errors import FairwayError, InvalidInput
from services.core.estimates.capacity import Bound
from services.core.estimates.pool_load import ClassLoad, GroupLoad, PoolLoad
from services.core.fixed_cost.explained import RowsExplanation, RowTrip
from services.core.fixed_cost.slots import SlotDemand, SlotLease, SlotRefusal, SlotReturn
from services.core.fleet import (
    Granted,
    PlacementFrame,
    PlacementRefused,
    PoolMember,
    PoolPressure,
    PoolSnapshot,
    ReportedSequence,
    ReportSnapshot,
    SequenceUsage,
    TenantCounter,
    TenantTokens,
)
from services.core.generation import Grant, PlaceSpec
from services.rpc.convert.inference import DIGEST, PRIORITY, TENANT, seconds_of
from services.rpc.convert.rows import WINDOW
from services.rpc.status import by_reason


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _seconds(ms: int) -> float:
    return ms / 1000


def _ms_or_unset(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, _ms(seconds))


def _seconds_or_none(ms: int) -> float | None:
    return ms / 1000 if ms else None


def _not_negative(count: int) -> int:
    return max(0, count)


_PLACE: Final = Mirror(
    PlaceSpec,
    pb.PlaceRequest,
    {
        "priority": PRIORITY,
        "queue_ttl_s": Pair("queue_ttl_ms", _ms, _seconds),
        "deadline_left_s": Pair("deadline_left_ms", _ms_or_unset, _seconds_or_none),
        "ttft_target_s": Pair("ttft_target_ms", _ms_or_unset, _seconds_or_none),
        "tenant_weight": Pair("tenant_weight", read=lambda weight: weight or 1.0),
    },
)
_GRANT: Final = Mirror(Grant, pb.Grant, {"ttl_s": Pair("ttl_ms", _ms, _seconds)})
_PRESSURE: Final = Mirror(
    PoolPressure,
    pb.PoolPressure,
    {"digest": DIGEST, "predicted_wait_s": Pair("predicted_wait_ms", _ms, _seconds)},
)
_MEMBER: Final = Mirror(
    PoolMember,
    pb.PoolMember,
    {
        "digest": DIGEST,
        "kv_tokens_room": Pair("kv_tokens_room", _not_negative),
        "slots": Pair("slots", _not_negative),
    },
)
_OF_TENANT: Final = {"tenant": TENANT, "digest": DIGEST, "priority": PRIORITY}
_COUNTER: Final = Mirror(TenantCounter, pb.TenantCounter, _OF_TENANT)
_TOKENS: Final = Mirror(
    TenantTokens,
    pb.TenantTokens,
    {
        **_OF_TENANT,
        "prefill": Pair("prefill_tokens"),
        "output": Pair("output_tokens"),
        "cached": Pair("cached_tokens"),
    },
)
_SLOTS_OF: Final = {"tenant": TENANT, "digest": DIGEST}
_DEMAND: Final = Mirror(
    SlotDemand,
    pb.SlotDemand,
    {**_OF_TENANT, "tenant_weight": Pair("tenant_weight", read=lambda weight: weight or 1.0)},
)
_LEASE: Final = Mirror(SlotLease, pb.SlotLease, {**_SLOTS_OF, "ttl_s": Pair("ttl_ms", _ms, _seconds)})
_UNSERVED: Final = Mirror(SlotRefusal, pb.SlotRefusal, _SLOTS_OF)
_RETURN: Final = Mirror(SlotReturn, pb.SlotReturn, _SLOTS_OF)
_REPORT: Final = Mirror(
    ReportSnapshot,
    pb.ReportRequest,
    {
        "pools": Mirror(PoolSnapshot, pb.PoolReport, {"digest": DIGEST}).each("pools"),
        "tenants": _TOKENS.each("tenants"),
        "live": Mirror(ReportedSequence, pb.LiveSequence, _OF_TENANT).each("live"),
        "usage": Mirror(SequenceUsage, pb.SequenceUsage, _OF_TENANT).each("usage"),
        "counters": _COUNTER.each("counters"),
    },
)


_TRIP: Final = Mirror(RowTrip, pb.RowTrip, {"window": WINDOW.one("window", unset=True)})
_EXPLANATION: Final = Mirror(
    RowsExplanation, pb.RowsExplanation, {"priority": PRIORITY, "trips": _TRIP.each("trips")}
)
explanation_to_proto: Final = _EXPLANATION.to_proto


def place_to_proto(placement_id: int, spec: PlaceSpec, queue_ttl_s: float) -> pb.PlaceRequest:
    """Return the request; ``queue_ttl_s`` is the remaining queue time when it is sent again."""
    message = _PLACE.to_proto(spec, placement_id=placement_id)
    message.queue_ttl_ms = _ms(queue_ttl_s)
    return message


def place_from_proto(message: pb.PlaceRequest) -> tuple[int, PlaceSpec]:
    return message.placement_id, _PLACE.from_proto(message)


def connect_request(
    places: Iterable[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]
) -> pb.ConnectRequest:
    """Return one message of (placement id, spec, queue time left) and withdrawn placement ids."""
    request = pb.ConnectRequest(places=[place_to_proto(*place) for place in places])
    if cancelled:
        request.cancel.placement_ids.extend(cancelled)
    return request


def slots_to_proto(
    demands: Iterable[SlotDemand],
    returned: Iterable[SlotReturn],
    explained: Mapping[str, RowsExplanation | None],
) -> pb.ConnectRequest:
    return pb.ConnectRequest(
        slot_demands=map(_DEMAND.to_proto, demands),
        slot_returns=map(_RETURN.to_proto, returned),
        rows_explained=[
            pb.RowsExplained(request_id=name, found=None if found is None else explanation_to_proto(found))
            for name, found in explained.items()
        ],
    )


def explained_from_proto(message: pb.ConnectRequest) -> dict[str, RowsExplanation | None]:
    return {
        each.request_id: _EXPLANATION.from_proto(each.found) if each.HasField("found") else None
        for each in message.rows_explained
    }


def slots_from_proto(message: pb.ConnectRequest) -> tuple[list[SlotDemand], list[SlotReturn]]:
    return list(map(_DEMAND.from_proto, message.slot_demands)), list(
        map(_RETURN.from_proto, message.slot_returns)
    )


def grant_to_proto(grant: Grant, placement_id: int = 0) -> pb.Grant:
    """Return the grant. A gateway that forwards it to a worker sets no placement id."""
    return _GRANT.to_proto(grant, placement_id=placement_id)


def grant_from_proto(message: pb.Grant) -> Grant:
    return _GRANT.from_proto(message)


def leadership(epoch: int, leader_id: str) -> pb.Leadership:
    return pb.Leadership(epoch=epoch, leader_id=leader_id)


def frame_to_proto(frame: PlacementFrame) -> pb.ConnectResponse:
    """Return the message of a frame, without its leadership."""
    grants: list[pb.Grant] = []
    refusals: list[pb.Refusal] = []
    for outcome in frame.outcomes:
        if isinstance(outcome, Granted):
            grants.append(grant_to_proto(outcome.grant, outcome.placement_id))
        else:
            refusals.append(_refusal_to_proto(outcome.placement_id, outcome.error))
    message = pb.ConnectResponse(
        grants=grants,
        refusals=refusals,
        pressures=map(_PRESSURE.to_proto, frame.pressures or ()),
        slot_leases=map(_LEASE.to_proto, frame.leases),
        explain=frame.questions,
        slot_refusals=map(_UNSERVED.to_proto, frame.slot_refusals),
    )
    if frame.members is not None:
        message.fleet.members.extend(map(_MEMBER.to_proto, frame.members))
    return message


def frame_from_proto(message: pb.ConnectResponse, epoch: int) -> PlacementFrame:
    """Return the frame; ``epoch`` is the stream's, for messages without leadership."""
    granted = [Granted(found.placement_id, grant_from_proto(found)) for found in message.grants]
    refused = [PlacementRefused(found.placement_id, _error_of(found)) for found in message.refusals]
    beat = message.HasField("leadership")
    return PlacementFrame(
        message.leadership.epoch if beat else epoch,
        (*granted, *refused),
        pressures=tuple(map(_PRESSURE.from_proto, message.pressures)) if beat else None,
        members=tuple(map(_MEMBER.from_proto, message.fleet.members)) if message.HasField("fleet") else None,
        leases=tuple(map(_LEASE.from_proto, message.slot_leases)),
        questions=tuple(message.explain),
        slot_refusals=tuple(map(_UNSERVED.from_proto, message.slot_refusals)),
    )


def _refusal_to_proto(placement_id: int, error: FairwayError) -> pb.Refusal:
    return pb.Refusal(
        placement_id=placement_id,
        reason=error.reason,
        message=error.message,
        retry_after_ms=_ms_or_unset(error.retry_after_s),
    )


def _error_of(message: pb.Refusal) -> FairwayError:
    retry_after_s = _seconds_or_none(message.retry_after_ms)
    return by_reason(message.reason, message.message, retry_after_s=retry_after_s)


def report_to_proto(snapshot: ReportSnapshot, number: int, *, full: bool) -> pb.ReportRequest:
    """Return the report. ``full``: live sequences are listed, as in the first report of a stream."""
    if not full:
        snapshot = replace(snapshot, live=(), counters=())
    return _REPORT.to_proto(snapshot, report=number)


def report_from_proto(message: pb.ReportRequest) -> ReportSnapshot:
    """Raises InvalidInput for a version that is listed twice."""
    snapshot = _REPORT.from_proto(message)
    if len({pool.digest for pool in snapshot.pools}) != len(snapshot.pools):
        raise InvalidInput("pools name a version twice", field="pools")
    return snapshot


def counters_to_proto(counters: Iterable[TenantCounter]) -> list[pb.TenantCounter]:
    return list(map(_COUNTER.to_proto, counters))


def counters_from_proto(messages: Iterable[pb.TenantCounter]) -> tuple[TenantCounter, ...]:
    return tuple(map(_COUNTER.from_proto, messages))


_MAX_DURATION_S: Final = 1e9


def timestamp(unix_s: float) -> Timestamp:
    found = Timestamp()
    found.FromMilliseconds(round(unix_s * 1000))
    return found


def _duration(seconds: float | None) -> Duration | None:
    """Return the duration, clamped so that one worker's bad number does not fail the response."""
    if seconds is None:
        return None
    found = Duration()
    found.FromMicroseconds(round(max(0.0, min(seconds, _MAX_DURATION_S)) * 1e6))
    return found


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


_RANKED: Final = Mirror(
    RankedWorker,
    pb.RankedWorker,
    {
        "predicted_ttft_s": Pair("predicted_ttft", _duration),
        "kv_tokens_room": Pair("kv_tokens_room", lambda tokens: max(0, tokens)),
        "parts": Pair(
            "parts", lambda parts: [pb.ScorePart(scorer=name, value=value) for name, value in parts]
        ),
    },
)
decision_to_proto: Final = Mirror(
    PlacementDecision,
    pb.PlacementDecision,
    {
        "priority": PRIORITY,
        "queued_unix_s": Pair("queued_time", timestamp),
        "wait_s": Pair("wait", _duration),
        "ranked": _RANKED.each("ranked"),
        "rejections": Mirror(FilterRejections, pb.FilterRejections).each("rejections"),
    },
).to_proto

_POOL: Final = Mirror(
    WorkerPool,
    pb.ReporterPool,
    {
        "measured_step_s": Pair("measured_step", _duration),
        "predicted_step_s": Pair("predicted_step", _duration),
    },
)
worker_to_proto: Final = Mirror(
    FleetWorker,
    pb.Reporter,
    {"silent_s": Pair("last_report", _duration), "pools": _POOL.each("pools")},
).to_proto

_SHARE: Final = Mirror(
    QueueShare, pb.QueueShare, {"priority": PRIORITY, "oldest_wait_s": Pair("oldest_wait", _duration)}
)
_WAIT: Final = Mirror(
    ClassWait,
    pb.ClassWait,
    {"priority": PRIORITY, "predicted_wait_s": Pair("predicted_wait", _duration)},
)


def _due_to(due: tuple[tuple[float, float], ...] | None) -> list[pb.DueWork]:
    return [pb.DueWork(left=_duration(left_s), work=work) for left_s, work in due or ()]


def _due_from(messages: Iterable[pb.DueWork]) -> tuple[tuple[float, float], ...] | None:
    return tuple((seconds_of(one.left), one.work) for one in messages) or None


_CLASS_LOAD: Final = Mirror(
    ClassLoad,
    pb.ClassLoad,
    {
        "priority": PRIORITY,
        "target_s": Pair("target", lambda target_s: _duration(_finite(target_s)), seconds_of),
        "due": Pair("due", _due_to, _due_from),
    },
)
LOAD: Final = Mirror(
    PoolLoad,
    pb.PoolLoad,
    {
        "classes": _CLASS_LOAD.each("classes"),
        "rate": Pair("rate", lambda rate: rate or 0.0, lambda rate: rate or None),
        "rate_bound": enum_pair("rate_bound", {None: 0, **numbers_of(Bound, pb.RateBound)}),
        "groups": Mirror(GroupLoad, pb.GroupLoad).each("groups"),
    },
    apart=("capacity",),
)
pool_to_proto: Final = Mirror(
    PoolQueue,
    pb.PoolQueue,
    {
        "oldest_wait_s": Pair("oldest_wait", _duration),
        "predicted_wait_s": Pair("predicted_wait", _duration),
        "shares": _SHARE.each("shares"),
        "counters": Pair("counters", counters_to_proto),
        "waits": _WAIT.each("waits"),
        "load": LOAD.one("load", unset=True),
    },
).to_proto
