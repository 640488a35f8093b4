"""Reports of service level indicators between the wire, the stored snapshot and the core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import astuple

from fairway.v1 import slis_pb2 as pb
from services.core.arms import (
    ArmKey,
    ArmWindow,
    GateWindow,
    SliKey,
    SliReport,
    SliSums,
    latency_sketch,
)
from services.core.estimates.finished import FinishedRequest
from services.core.estimates.sketch import Sketch
from services.core.estimates.traffic_shapes import RequestShape, SamplingKind, TrafficShapes
from services.core.generation import StageClock, Usage
from services.rpc.convert.inference import PRIORITIES, PRIORITY_OF

_STAGES = len(StageClock.__struct_fields__) - 1
_SAMPLINGS = frozenset(SamplingKind)


def report_to_proto(report: SliReport) -> pb.SliDelta:
    return pb.SliDelta(
        cut_unix_ms=round(report.cut_unix_s * 1000),
        series=(series_to_proto(key, sums) for key, sums in report.series.items()),
        clusters=clusters_to_proto(report.windows),
        shapes=shapes_to_proto(report.shapes),
        requests=map(finished_to_proto, report.requests),
    )


def report_from_proto(message: pb.SliDelta) -> SliReport:
    return SliReport(
        message.cut_unix_ms / 1000,
        dict(map(series_from_proto, message.series)),
        windows_from_proto(message.clusters),
        shapes_from_proto(message.shapes),
        tuple(map(_finished_from, message.requests)),
    )


def finished_to_proto(one: FinishedRequest) -> pb.FinishedRequest:
    return pb.FinishedRequest(
        request_id=one.request_id,
        face=one.face,
        tenant=one.tenant,
        model=one.model,
        version_digest=one.version_digest,
        priority=PRIORITIES[one.priority],
        reason=one.reason,
        received_unix_us=one.clock.received_unix_us,
        stages_us=astuple(one.clock)[1:],
        prompt_tokens=one.usage.prompt_tokens,
        cached_tokens=one.usage.cached_tokens,
        output_tokens=one.usage.output_tokens,
    )


def _finished_from(message: pb.FinishedRequest) -> FinishedRequest:
    return FinishedRequest(
        message.request_id,
        message.face,
        message.tenant,
        message.model,
        message.version_digest,
        PRIORITY_OF[message.priority],
        message.reason,
        StageClock(message.received_unix_us, *message.stages_us[:_STAGES]),
        Usage(message.prompt_tokens, message.output_tokens, message.cached_tokens),
    )


def series_to_proto(key: SliKey, sums: SliSums) -> pb.SliSeries:
    return pb.SliSeries(
        model=key.arm.model,
        version_digest=key.arm.version_digest,
        tenant=key.tenant,
        priority=PRIORITIES[key.priority],
        zone=key.zone,
        amounts=_sums_to(sums),
    )


def series_from_proto(message: pb.SliSeries) -> tuple[SliKey, SliSums]:
    arm = ArmKey(message.model, message.version_digest)
    key = SliKey(arm, message.tenant, PRIORITY_OF[message.priority], message.zone)
    return key, _sums_from(message.amounts)


def clusters_to_proto(windows: Mapping[GateWindow, Mapping[str, ArmWindow]]) -> Iterator[pb.SliCluster]:
    for window, arms in windows.items():
        for digest, arm in arms.items():
            for cluster, sums in arm.clusters.items():
                yield pb.SliCluster(
                    model=window.model,
                    step=window.step,
                    version_digest=digest,
                    cluster=cluster,
                    amounts=_sums_to(sums),
                )


def windows_from_proto(messages: Iterable[pb.SliCluster]) -> dict[GateWindow, dict[str, ArmWindow]]:
    found: dict[GateWindow, dict[str, dict[int, SliSums]]] = {}
    for message in messages:
        arms = found.setdefault(GateWindow(message.model, message.step), {})
        arms.setdefault(message.version_digest, {})[message.cluster] = _sums_from(message.amounts)
    return {
        window: {digest: ArmWindow(clusters) for digest, clusters in arms.items()}
        for window, arms in found.items()
    }


def shapes_to_proto(shapes: Mapping[str, TrafficShapes]) -> Iterator[pb.TrafficShape]:
    for model, found in shapes.items():
        for shape, weight in found.items():
            yield pb.TrafficShape(
                model=model,
                input_tokens=shape.input_tokens,
                output_tokens=shape.output_tokens,
                sampling=shape.sampling,
                weight=weight,
            )


def shapes_from_proto(messages: Iterable[pb.TrafficShape]) -> dict[str, TrafficShapes]:
    found: dict[str, TrafficShapes] = {}
    for one in messages:
        if one.sampling in _SAMPLINGS and one.weight > 0:
            shape = RequestShape(one.input_tokens, one.output_tokens, SamplingKind(one.sampling))
            found.setdefault(one.model, TrafficShapes()).add(shape, one.weight)
    return found


def _sums_to(sums: SliSums) -> pb.SliAmounts:
    return pb.SliAmounts(
        requests=sums.requests,
        errors=sums.errors,
        poisoned=sums.poisoned,
        started=sums.started,
        broken=sums.broken,
        finished=sums.finished,
        output_tokens=sums.output_tokens,
        tokens=sums.tokens,
        device_s=sums.device_s,
        ttft=[pb.PromptSizeSketch(size=size, sketch=_sketch_to(one)) for size, one in sums.ttft.items()],
        itl=_sketch_to(sums.itl) if sums.itl.count else None,
        session_bits=sums.session_bits,
    )


def _sums_from(message: pb.SliAmounts) -> SliSums:
    return SliSums(
        requests=message.requests,
        errors=message.errors,
        poisoned=message.poisoned,
        started=message.started,
        broken=message.broken,
        finished=message.finished,
        output_tokens=message.output_tokens,
        tokens=message.tokens,
        device_s=message.device_s,
        ttft={one.size: _sketch_from(one.sketch) for one in message.ttft},
        itl=_sketch_from(message.itl),
        session_bits=message.session_bits,
    )


def _sketch_to(sketch: Sketch) -> pb.LatencySketch:
    low, buckets = sketch.parts
    return pb.LatencySketch(
        buckets=buckets.keys(), weights=buckets.values(), low=low, total=sketch.total, most=sketch.most
    )


def _sketch_from(message: pb.LatencySketch) -> Sketch:
    sketch = latency_sketch()
    buckets = dict(zip(message.buckets, message.weights, strict=False))
    sketch.add_parts(message.low, buckets, message.total, message.most)
    return sketch
