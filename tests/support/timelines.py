"""A timeline for tests, and what its trace has to hold."""

import json
from collections import defaultdict
from typing import Any

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import slis_pb2


def sample_timeline() -> pb.GetTimelineResponse:
    """A request of 64 tokens that is prefilled in two steps, decodes, is preempted, and shares its steps with
    a large prompt and, in the last, a slow one."""
    start_us = 1_798_718_400_000_000
    stages_us = [1200, 800, 20_000, 900, 2100, 30_000, 145_000, 100]
    found = pb.GetTimelineResponse(
        request_id="req_" + "a" * 24,
        finished=slis_pb2.FinishedRequest(
            request_id="req_" + "a" * 24,
            tenant="acme",
            model="chat",
            version_digest="sha256:" + "a" * 64,
            reason="FINISHED",
            received_unix_us=start_us,
            stages_us=stages_us,
            prompt_tokens=64,
            output_tokens=6,
        ),
        notes=["the recorder of worker worker-3 begins at 12:00:00.000 UTC: earlier steps are overwritten"],
    )
    decision = found.decisions.add(
        tenant="acme", outcome="GRANTED", worker_id="worker-3", looks=9, looks_without_room=7
    )
    decision.ranked.add(worker_id="worker-3", score=0.9)
    decision.queued_time.FromMicroseconds(start_us + 2100)
    decision.wait.FromMicroseconds(19_000)
    host = found.workers.add(worker_id="worker-3")
    host.clock.offset_us, host.clock.error_us = -7_000_000, 400
    host.engines.add(number=1, version_digest="sha256:" + "a" * 64, model="chat", kv_blocks_total=64)
    own = host.sequences.add(
        number=7,
        engine=1,
        request_id=found.request_id,
        tenant="acme",
        accepted_unix_us=start_us + 23_500,
        first_token_unix_us=start_us + 54_000,
        ended_unix_us=start_us + 199_500,
        reason="length",
        prompt_tokens=64,
        output_tokens=6,
    )
    own.moments.add(kind="PREEMPTED", unix_us=start_us + 66_000)
    host.sequences.add(number=8, engine=1, request_id="req_" + "b" * 24, tenant="beta")
    host.sequences.add(number=9, engine=1)
    _add_steps(host, start_us)
    return found


def _add_steps(host: pb.TimelineHost, start_us: int) -> None:
    steps = (
        (1, 25_000, 14_000, {7: (32, 0), 8: (480, 0)}),
        (2, 39_500, 14_500, {7: (32, 1), 8: (480, 0)}),
        (3, 54_500, 5_000, {7: (0, 1), 8: (0, 1)}),
        (4, 60_000, 5_500, {7: (0, 1), 8: (0, 1), 9: (0, 1)}),
        (9, 120_000, 8_000, {7: (67, 1), 8: (0, 1)}),
        (10, 128_000, 5_000, {7: (0, 1)}),
        (11, 133_000, 66_000, {7: (0, 1), 8: (0, 1)}),
    )
    for number, at_us, took_us, members in steps:
        host.steps.add(
            number=number,
            engine=1,
            start_unix_us=start_us + at_us,
            took_us=took_us,
            predicted_us=5_000 if number > 4 else 0,
            prefill_tokens=sum(prefilled for prefilled, _ in members.values()),
            kv_blocks_used=12,
            running=len(members),
            size=len(members),
            members=members,
            prefilled=[prefilled for prefilled, _ in members.values()],
            sampled=[sampled for _, sampled in members.values()],
        )


def check_trace(trace: dict[str, Any]) -> None:
    """Raise AssertionError unless Perfetto draws every event of the trace where it belongs."""
    json.loads(json.dumps(trace, allow_nan=False))
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "i", "s", "f"}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    tracks = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    flows = defaultdict[int, list[dict[str, Any]]](list)
    for event in timed:
        at = event["pid"], event["tid"]
        assert at in named
        assert event["pid"] in processes
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            tracks[at].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
    for bars in tracks.values():
        open_ends = list[int]()
        for start, end in bars:  # in order of start, the longest first
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "bars of one track cross"
            open_ends.append(end)
    for begun, ended in flows.values():
        assert (begun["ph"], ended["ph"], ended["bp"]) == ("s", "f", "e")
        assert begun["ts"] <= ended["ts"]
        for event in (begun, ended):
            bars = tracks[event["pid"], event["tid"]]
            assert any(low <= event["ts"] <= high for low, high in bars), "an arrow without a bar"
