"""Reports of service level indicators between the wire, the stored snapshot and the core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec.structs import astuple

from fairway.mirror import Mirror, Pair
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
from services.core.generation import RunFacts, StageClock, StepSums, Usage
from services.rpc.convert.inference import PRIORITY

_STAGES = len(StageClock.__struct_fields__) - 1
_SAMPLINGS = frozenset(SamplingKind)


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


_SUMS: Final = Mirror(
    SliSums,
    pb.SliAmounts,
    {
        "ttft": Pair(
            "ttft",
            lambda ttft: [
                pb.PromptSizeSketch(size=size, sketch=_sketch_to(one)) for size, one in ttft.items()
            ],
            lambda sizes: {one.size: _sketch_from(one.sketch) for one in sizes},
        ),
        "itl": Pair("itl", lambda itl: _sketch_to(itl) if itl.count else None, _sketch_from),
    },
)
_SERIES: Final = Mirror(SliKey, pb.SliSeries, {"arm": Mirror(ArmKey, pb.SliSeries), "priority": PRIORITY})
_STEPS: Final = Mirror(StepSums, pb.StepSums)
RUN_FACTS: Final = Mirror(
    RunFacts, pb.RunFacts, {name: _STEPS.one(name, unset=True) for name in ("before", "after")}
)
_FINISHED: Final = Mirror(
    FinishedRequest,
    pb.FinishedRequest,
    {
        "priority": PRIORITY,
        "usage": Mirror(Usage, pb.FinishedRequest, apart=("device_s",)),
        "run": RUN_FACTS.one("run", unset=True),
    },
    apart=("clock",),
)


def finished_to_proto(one: FinishedRequest) -> pb.FinishedRequest:
    received_unix_us, *stages_us = astuple(one.clock)
    return _FINISHED.to_proto(one, received_unix_us=received_unix_us, stages_us=stages_us)


def finished_from_proto(message: pb.FinishedRequest) -> FinishedRequest:
    clock = StageClock(message.received_unix_us, *message.stages_us[:_STAGES])
    return _FINISHED.from_proto(message, clock=clock)


def series_to_proto(key: SliKey, sums: SliSums) -> pb.SliSeries:
    return _SERIES.to_proto(key, amounts=_SUMS.to_proto(sums))


def series_from_proto(message: pb.SliSeries) -> tuple[SliKey, SliSums]:
    return _SERIES.from_proto(message), _SUMS.from_proto(message.amounts)


def clusters_to_proto(windows: Mapping[GateWindow, Mapping[str, ArmWindow]]) -> Iterator[pb.SliCluster]:
    for window, arms in windows.items():
        for digest, arm in arms.items():
            for cluster, sums in arm.clusters.items():
                yield pb.SliCluster(
                    model=window.model,
                    step=window.step,
                    version_digest=digest,
                    cluster=cluster,
                    amounts=_SUMS.to_proto(sums),
                )


def windows_from_proto(messages: Iterable[pb.SliCluster]) -> dict[GateWindow, dict[str, ArmWindow]]:
    found: dict[GateWindow, dict[str, dict[int, SliSums]]] = {}
    for message in messages:
        arms = found.setdefault(GateWindow(message.model, message.step), {})
        arms.setdefault(message.version_digest, {})[message.cluster] = _SUMS.from_proto(message.amounts)
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


def _requests(name: str) -> Pair:
    return Pair(
        name,
        lambda requests: map(finished_to_proto, requests),
        lambda messages: tuple(map(finished_from_proto, messages)),
    )


_REPORT: Final = Mirror(
    SliReport,
    pb.SliDelta,
    {
        "cut_unix_s": Pair("cut_unix_ms", lambda unix_s: round(unix_s * 1000), lambda ms: ms / 1000),
        "series": Pair(
            "series",
            lambda series: [series_to_proto(*each) for each in series.items()],
            lambda messages: dict(map(series_from_proto, messages)),
        ),
        "windows": Pair("clusters", clusters_to_proto, windows_from_proto),
        "shapes": Pair("shapes", shapes_to_proto, shapes_from_proto),
        "requests": _requests("requests"),
        "sampled": _requests("sampled"),
    },
)
report_to_proto: Final = _REPORT.to_proto
report_from_proto: Final = _REPORT.from_proto
