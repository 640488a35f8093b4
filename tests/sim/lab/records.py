"""Records of requests, as a client of a simulated fleet would write them."""

from __future__ import annotations

from random import Random

from services.core.records import Priority
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.lab.report.measure import RecordCollector, Slo
from simulator.lab.report.report import Course, Header, LabReport, Mark, Sample, Timeline, WorkerSample, build


def finished(
    *,
    sent_s: float = 0.0,
    tenant: str = "acme",
    priority: Priority = Priority.STANDARD,
    ttft_s: float = 0.5,
    gaps: tuple[tuple[float, int], ...] = (),
    queue_s: float = 0.0,
    prompt_tokens: int = 100,
    cached_tokens: int = 0,
) -> RequestRecord:
    """Return a finished request: one token at first, then ``gaps`` of (seconds, tokens)."""
    record = RequestRecord(
        0, SimRequest(tenant, prompt_tokens, 1, arrival_s=sent_s, priority=priority), sent_s
    )
    record.first_token_s = sent_s + ttft_s
    record.gap_s = [gap_s for gap_s, _ in gaps]
    record.gap_tokens = [tokens for _, tokens in gaps]
    record.output_tokens = 1 + sum(record.gap_tokens)
    record.last_token_s = record.ended_s = record.first_token_s + sum(record.gap_s)
    record.queue_s = queue_s
    record.cached_tokens = cached_tokens
    record.outcome = "finished"
    return record


def refused(
    reason: str, *, sent_s: float = 0.0, after_s: float = 0.1, queue_s: float = 0.0, tenant: str = "acme"
) -> RequestRecord:
    record = RequestRecord(
        0, SimRequest(tenant, 100, 1, arrival_s=sent_s), sent_s, outcome=reason, queue_s=queue_s
    )
    record.ended_s = sent_s + after_s
    return record


def sample_report(
    *, names: tuple[str, ...] = ("acme", "globex"), seconds: int = 60, seed: int = 1
) -> LabReport:
    """Return a report of a made-up run with everything in it."""
    rng = Random(seed)
    collector, timeline = RecordCollector(Slo()), Timeline()
    for number in range(seconds * 5):
        at_s, tenant = number / 5, names[number % len(names)]
        if number % 17 == 0:
            collector.take(refused("QUEUE_TIMEOUT", sent_s=at_s, queue_s=2.0, tenant=tenant))
        gaps = tuple((rng.uniform(0.01, 0.05), 1) for _ in range(20))
        taken = finished(sent_s=at_s, tenant=tenant, ttft_s=2.5, queue_s=2.0, gaps=gaps, cached_tokens=30)
        collector.take(taken)
    for second in range(seconds):
        workers = [
            WorkerSample(f"worker-{index}", second * 100 * (index + 1), second * 10, second * 0.5, 3, 1, 0.4)
            for index in range(3)
        ]
        timeline.add(Sample(float(second), second % 7, 0.3, tuple(workers)))
    header = Header(
        "made-up", "a <made-up> run", 3, "a10", seed, seconds, 0.0, (Mark("a fault", 10.0, 20.0),)
    )
    course = Course(seconds + 3.0, ("tokens were lost",), "ab" * 32)
    return build(
        header, collector, timeline, course, weights={}, bound_tokens=5000.0, figures={"gray_detect_s": None}
    )
