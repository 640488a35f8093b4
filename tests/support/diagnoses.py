"""Answers of `fairway diagnose` with their samples."""

from __future__ import annotations

from fairway.v1 import common_pb2, slis_pb2
from fairway.v1 import controlplane_pb2 as cp

BEGIN_S = 1_796_000_000


def answer(*causes: tuple[str, str]) -> cp.DiagnoseLatencyResponse:
    """An answer with requests of the tenants ann and bob: ann's are longer in the window."""
    found = cp.DiagnoseLatencyResponse(
        verdict="CAUSE_FOUND",
        message="prompts_grew (ann) explains 98% of the rise",
        model="chat",
        metric="ttft",
        quantile=0.95,
        notes=["2 reports of gateways are lost: their requests are missing in the samples"],
        step_prices=[0.01, 5e-5, 1e-4, 0.0],
    )
    for span, begin_s, tokens, samples in (
        (found.baseline, BEGIN_S, 100, found.baseline_samples),
        (found.window, BEGIN_S + 60, 1600, found.window_samples),
    ):
        getattr(span, "from").FromSeconds(begin_s)
        span.to.FromSeconds(begin_s + 30)
        span.requests = span.samples = 60
        for number in range(60):
            samples.requests.append(request(number, begin_s + number / 2, tokens if number % 2 else 100))
    found.quantiles.baseline_s, found.quantiles.window_s = 0.1, 0.32
    found.stages.add(stage="engine_wait", baseline_s=0.01, window_s=0.02, share=0.05)
    found.stages.add(stage="decode")
    found.tree.add(depth=0, text="chat: p95 of ttft: 100 ms, then 320 ms")
    found.tree.add(depth=3, text="prompts_grew (ann): without it 98% of the change goes")
    for kind, subject in causes:
        found.causes.add(
            kind=kind,
            subject=subject,
            score=0.98,
            share_s=0.21,
            counterfactual_s=0.11,
            evidence=["why"],
            next="fairway queue",
        )
    return found


def request(number: int, received_s: float, tokens: int) -> slis_pb2.FinishedRequest:
    steps = slis_pb2.StepSums(steps=2, step_us=40_000, prefill_tokens=tokens, decode_tokens=2)
    return slis_pb2.FinishedRequest(
        request_id=f"req_{number}",
        tenant="ann" if number % 2 else "bob",
        model="chat",
        reason="FINISHED",
        priority=common_pb2.PRIORITY_BATCH if number % 3 else common_pb2.PRIORITY_INTERACTIVE,
        received_unix_us=round(received_s * 1e6),
        stages_us=[100, 100, 100, 100, 100, 20_000, 40_000, 100],
        prompt_tokens=tokens,
        output_tokens=5,
        weight=1.0,
        run=slis_pb2.RunFacts(worker_id=f"worker-{number % 2}", before=steps),
    )
