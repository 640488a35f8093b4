"""A probe asks the engine, judges each answer, and ends once: passed, wrong, late or cut off."""

from __future__ import annotations

import asyncio
import math
import struct

import pytest

from services.core.estimates.traffic_shapes import RequestShape, SamplingKind
from services.core.fixed_cost.rows import RawTensor
from services.core.fixed_cost.signature import ANY, TensorSpec
from services.runtime.supervisor import Supervisor
from services.worker.engine_protocol import (
    BatchRaised,
    BatchRan,
    Command,
    Ready,
    RowCosts,
    RunBatch,
    SampledLogprobs,
    Stepped,
    Submit,
)
from services.worker.policy.lifecycle import FINAL_REASONS
from services.worker.policy.probes import EngineSpeed, plan_probe, plan_row_probe
from services.worker.slots.version_probe import ProbeContext, ProbeFailed, PromptProbe, RowProbe
from tests.support.clocks import HandClock

SHAPES = (RequestShape(20, 3, SamplingKind.LOGPROBS), RequestShape(40, 2, SamplingKind.GREEDY))
READY = Ready(4, 16, 64, 100, 0, 0)  # both prompts do not fit together: two rounds


class WaitingClock(HandClock):
    """A task sleeps until the clock is moved past its time."""

    async def sleep(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            await asyncio.sleep(0)


class Bench:
    """What a probe sends, and how it ends."""

    def __init__(self) -> None:
        self.clock = WaitingClock()
        self.supervisor = Supervisor(self.clock)
        self.sent: list[Command] = []
        self.ends: list[ProbeFailed | None] = []
        self.takes = True
        self.context = ProbeContext(self._send, self.ends.append, self.clock, self.supervisor)

    def _send(self, command: Command) -> bool:
        self.sent.append(command)
        return self.takes

    def prompts(self) -> PromptProbe:
        probe = PromptProbe(plan_probe(SHAPES, READY, EngineSpeed(64, 0.0)), self.context, vocab_size=100)
        probe.begin()
        return probe

    def rows(self) -> RowProbe:
        costs = RowCosts(0.001, 0.0, 0.0, 4096, 0)
        inputs = (TensorSpec("input_ids", "INT64", (ANY,), has_length=True),)
        shapes = (RequestShape(12, 0, SamplingKind.ROW), RequestShape(5, 0, SamplingKind.ROW))
        probe = RowProbe(plan_row_probe(shapes, inputs, costs, max_tokens=64, memory_bytes=0), self.context)
        probe.begin()
        return probe

    @property
    def failure(self) -> ProbeFailed:
        (found,) = self.ends
        assert found is not None
        return found


def stepped(handle: int, *tokens: int, logprob: float | None = None, **ended: str) -> Stepped:
    entries = [SampledLogprobs(logprob, [], [])] if logprob is not None else []
    return Stepped(
        1, 0.25, [handle] * len(tokens), list(tokens),
        {handle: ended["reason"]} if "reason" in ended else {},  # type: ignore[dict-item]
        0, 0, 0, 0,
        logprobs={handle: entries} if entries else {},
        errors={handle: ended["error"]} if "error" in ended else {},
    )  # fmt: skip


async def test_a_version_passes_once_every_round_is_answered() -> None:
    bench = Bench()
    probe = bench.prompts()
    assert [one.handle for one in bench.sent if isinstance(one, Submit)] == [1]
    probe.on_stepped(stepped(1, 5, 6, logprob=-1.0))
    assert "the prompt of 20 tokens (0 of 2 answered)" in probe.waits_for()
    probe.on_stepped(stepped(1, 7, reason="length"))
    assert [one.handle for one in bench.sent if isinstance(one, Submit)] == [1, 2]
    assert bench.ends == []
    probe.on_stepped(stepped(2, 8, 9, reason="length"))
    assert bench.ends == [None]
    bench.clock.now_s += 1e6
    await asyncio.sleep(0)
    assert bench.ends == [None]
    await bench.supervisor.close()


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (stepped(1, reason="error", error="a fault"), "the prompt of 20 tokens: a fault"),
        (stepped(1, reason="not_finite"), "the prompt of 20 tokens: the model returned no finite numbers"),
        (stepped(1, 5, reason="length"), "1 of 3 tokens"),
        (stepped(1, 5, 6, 100, reason="length"), "outside of the vocabulary"),
        (stepped(1, 5, logprob=math.nan), "log probabilities that are not finite"),
    ],
)
async def test_a_wrong_answer_is_final(event: Stepped, message: str) -> None:
    bench = Bench()
    probe = bench.prompts()
    probe.on_stepped(event)
    assert bench.failure.reason == "PROBE_FAILED"
    assert bench.failure.reason in FINAL_REASONS
    assert message in bench.failure.message
    probe.on_stepped(stepped(1, 5, 6, 7, reason="length"))  # what still comes changes nothing
    assert len(bench.ends) == 1
    await bench.supervisor.close()


async def test_an_engine_that_does_not_answer_in_time_may_be_tried_again() -> None:
    bench = Bench()
    bench.prompts()
    await asyncio.sleep(0)
    bench.clock.now_s += 10.0
    for _ in range(3):
        await asyncio.sleep(0)
    assert bench.failure.reason == "PROBE_TIMEOUT"
    assert bench.failure.reason not in FINAL_REASONS
    assert "no answer within 10 s" in bench.failure.message
    assert "the prompt of 20 tokens" in bench.failure.message
    await bench.supervisor.close()


async def test_an_engine_that_takes_no_command_fails() -> None:
    bench = Bench()
    bench.takes = False
    bench.prompts()
    assert bench.failure.reason == "PROBE_CRASHED"
    assert bench.failure.reason not in FINAL_REASONS
    await bench.supervisor.close()


def output(*values: float) -> tuple[RawTensor, ...]:
    return (RawTensor("embedding", "FP32", (len(values),), struct.pack(f"<{len(values)}f", *values)),)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (BatchRan(0, 0.5, [output(1.0), output(2.0)]), ""),
        (BatchRan(0, 0.5, [output(1.0)]), "outputs of 1 rows"),
        (BatchRan(0, 0.5, [output(1.0), output(math.inf)]), "not finite"),
        (BatchRan(0, 0.5, [output(1.0), ()], {1: "too wide"}), "too wide"),
        (BatchRaised(0, 0.5, "ValueError"), "a batch of 2 rows of 12 tokens: the model raised ValueError"),
    ],
)
async def test_a_batch_of_rows_is_judged(event: BatchRan | BatchRaised, message: str) -> None:
    bench = Bench()
    probe = bench.rows()
    (batch,) = bench.sent
    assert isinstance(batch, RunBatch)
    assert (batch.number, batch.width, len(batch.rows)) == (0, 12, 2)
    probe.on_batch(event)
    if message:
        assert bench.failure.reason == "PROBE_FAILED"
        assert bench.failure.reason in FINAL_REASONS
        assert message in bench.failure.message
    else:
        assert bench.ends == [None]
    await bench.supervisor.close()
