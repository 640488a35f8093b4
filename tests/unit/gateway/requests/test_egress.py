"""Egress rates at work: credit and answers wait, the rest of a request does not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.core import errors
from services.core.generation import FinishReason, OutputLimits, StartSpec, TokenLogprobs
from services.core.records import Meta, Tenant
from services.gateway.events import Accepted, Finished
from services.gateway.requests.egress import TICK_S, ChargedReplay, EgressGate, StreamEgress
from services.ports.clock import Clock
from services.ports.worker import SequenceSink
from services.runtime.telemetry.metrics import Metrics
from tests.support.clocks import HandClock
from tests.support.waiting import until
from tests.unit.gateway.requests.test_request import CLOCK, Harness, Script, Sink, emit, ended

TOKENS = 64


class Worker:
    """Runs sequences as fast as their credit permits; its readers take every token at once."""

    def __init__(self, *, impatient: bool = False) -> None:
        """``impatient``: it ends the first run as a slow reader's when credit is already on its way."""
        self.started: list[StartSpec] = []
        self.runs: list[PacedRun] = []
        self._impatient = impatient

    def start(self, spec: StartSpec, sink: SequenceSink) -> PacedRun:
        self.started.append(spec)
        self.runs.append(PacedRun(spec, sink, impatient=self._impatient and not self.runs))
        asyncio.get_running_loop().call_soon(self.runs[-1].begin)
        return self.runs[-1]


class PacedRun:
    def __init__(self, spec: StartSpec, sink: SequenceSink, *, impatient: bool) -> None:
        self.limit = len(spec.produced_ids) + spec.initial_credit_tokens
        self.cancelled = False
        self._impatient = impatient
        self._sink, self._at = sink, len(spec.produced_ids)
        self._most = spec.generation.limits.max_tokens

    def begin(self) -> None:
        self._sink.on_accepted()
        self._step()

    def credit(self, tokens: int) -> None:
        self.limit += tokens
        if self._impatient:
            self.end(FinishReason.SLOW_READER)

    def cancel(self) -> None:
        self.cancelled = True

    def end(self, reason: FinishReason) -> None:
        self.cancelled = True
        self._sink.on_finished(ended(self._at, reason))

    def _step(self) -> None:
        if self.cancelled:
            return
        if self._at < self.limit:
            self._at += 1
            self._sink.on_tokens(self._at - 1, [99 + self._at], "x", ())
        if self._at == self._most:
            self.end(FinishReason.LENGTH)
        asyncio.get_running_loop().call_later(0.001, self._step)


class Reader(Sink):
    """Takes every token at once, and notes when."""

    def __init__(self, harness: Harness) -> None:
        super().__init__()
        self.at_s: list[float] = []
        self._harness = harness

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        super().on_tokens(choice, offset, ids, text, logprobs)
        self.at_s += [CLOCK.monotonic_s()] * len(ids)
        self._harness.request.credit(choice, len(ids))


class Tenants:
    """The records of tenants, which a test changes, and the time that earns them tokens."""

    def __init__(self, *, tenant: int = 0, stream: int = 0, clock: Clock = CLOCK) -> None:
        self.metrics = Metrics()
        self.gate = EgressGate(lambda _: self.record, lambda: 1, clock, self.metrics)
        self.set(tenant=tenant, stream=stream)

    def set(self, *, tenant: int = 0, stream: int = 0) -> None:
        self.record = Tenant(Meta("acme"), egress_tokens_per_second=tenant, stream_tokens_per_second=stream)

    def harness(self, *scripts: Script, worker: Worker | None = None, choices: int = 1) -> EgressHarness:
        return EgressHarness(self, *scripts, worker=worker, choices=choices)


class EgressHarness(Harness):
    def __init__(self, tenants: Tenants, *scripts: Script, worker: Worker | None, choices: int) -> None:
        super().__init__(*scripts, choices=choices, timeout_s=30.0)
        self.egress = StreamEgress(tenants.gate, "acme")
        self.sink = self.reader = Reader(self)
        ports = replace(self.ports, gate=tenants.gate)
        self.use(ports if worker is None else replace(ports, workers=worker))


async def test_a_stream_receives_its_rate_with_all_its_tokens() -> None:
    harness = Tenants(stream=40).harness(worker=Worker())
    began_s = CLOCK.monotonic_s()
    end = await harness.run()
    assert isinstance(end, Finished)
    assert harness.sink.tokens == {0: list(range(100, 100 + TOKENS))}
    for at, at_s in enumerate(harness.reader.at_s):
        assert at <= 41 + 40 * (at_s - began_s), "never ahead of its rate"


async def test_choices_share_the_rate_of_their_stream_and_another_tenant_does_not_wait() -> None:
    slow = Tenants(stream=100).harness(worker=Worker(), choices=3)
    fast = Tenants().harness(worker=Worker())
    began_s = CLOCK.monotonic_s()
    running = asyncio.create_task(slow.run())
    await fast.run()
    assert not running.done()
    await running
    assert CLOCK.monotonic_s() - began_s >= (3 * TOKENS - 101) / 100 - 0.1


async def test_the_rate_of_a_tenant_changes_under_its_streams() -> None:
    tenants, worker = Tenants(clock=HandClock()), Worker()
    harness = tenants.harness(worker=worker)
    running = asyncio.create_task(harness.run())
    await until(lambda: len(harness.reader.at_s) > 4)
    assert worker.started[0].initial_credit_tokens == 8, "without a rate: the whole window"
    tenants.set(tenant=1)
    await until(lambda: worker.runs[0].limit <= len(harness.reader.at_s))
    stood = len(harness.reader.at_s)
    await asyncio.sleep(5 * TICK_S)
    assert len(harness.reader.at_s) == stood, "nothing is earned while the clock stands"
    tenants.set()
    await running
    assert harness.sink.tokens == {0: list(range(100, 100 + TOKENS))}


async def test_a_sequence_without_paid_credit_is_no_slow_reader() -> None:
    tenants, worker = Tenants(tenant=1, clock=HandClock()), Worker()
    harness = tenants.harness(worker=worker)
    running = asyncio.create_task(harness.run())
    await until(lambda: len(harness.reader.at_s) == 2)  # what the bucket held
    worker.runs[0].end(FinishReason.SLOW_READER)
    await asyncio.sleep(3 * TICK_S)
    assert len(worker.runs) == 1, "it is placed again once a token is paid for"
    tenants.set()
    assert isinstance(await running, Finished)
    assert harness.sink.tokens == {0: list(range(100, 100 + TOKENS))}
    assert worker.started[1].produced_ids == (100, 101)


async def test_credit_that_comes_too_late_for_the_last_token_makes_no_slow_reader() -> None:
    worker = Worker(impatient=True)
    harness = Tenants(tenant=1).harness(worker=worker)
    harness.spec = replace(harness.spec, limits=OutputLimits(2))
    assert isinstance(await harness.run(), Finished)
    assert harness.sink.tokens == {0: [100, 101]}
    assert len(worker.runs) == 2


async def test_a_reader_that_does_not_read_is_one_also_under_a_rate() -> None:
    harness = Tenants(tenant=1000).harness(emit(8, ended(8, FinishReason.SLOW_READER)))
    harness.sink = Sink()
    assert isinstance(await harness.run(), errors.SlowReader)


async def test_credit_that_a_sequence_does_not_use_is_returned() -> None:
    tenants = Tenants(tenant=4, clock=HandClock())
    for _ in range(5):  # each is offered what the bucket of 5 tokens has left, and uses one of them
        async with asyncio.timeout(20):
            assert isinstance(await tenants.harness(emit(1, ended(1))).run(), Finished)


async def test_a_request_whose_first_token_is_not_paid_for_is_not_placed() -> None:
    tenants = Tenants(tenant=1, clock=HandClock())
    tenants.gate.charge("acme", 50)
    harness = tenants.harness(worker=Worker())
    task = harness.start()
    await asyncio.sleep(3 * TICK_S)
    assert not harness.placement.asked
    harness.request.cancel()
    await task
    tenants.set()
    await until(lambda: not tenants.gate.waiting)


async def test_an_answer_waits_for_the_debt_of_the_one_before() -> None:
    clock = HandClock()
    tenants = Tenants(tenant=100, clock=clock)
    egress = StreamEgress(tenants.gate, "acme")
    await egress.answer(151)
    second = asyncio.create_task(egress.answer(1))
    for _ in range(5):
        await asyncio.sleep(2 * TICK_S)
        assert not second.done()
        clock.now_s += 0.1  # 10 tokens of a debt of 50
    clock.now_s += 0.1
    await second
    held = {s.labels["tenant"]: s.value for s in next(iter(tenants.metrics.collect())).samples}
    assert held["acme"] == pytest.approx(0.6)


async def test_a_replay_is_charged_and_not_held() -> None:
    tenants = Tenants(tenant=100, clock=HandClock())
    egress, sink = StreamEgress(tenants.gate, "acme"), Sink()
    for replayed in (False, True):
        replay = ChargedReplay(sink, egress)
        replay.on_accepted(Accepted("req", "m", "sha256:x", 1, 0, 3, replayed=replayed))
        replay.on_tokens(int(replayed), 0, range(150), "", ())
        answer = asyncio.create_task(egress.answer(1))
        await asyncio.sleep(3 * TICK_S)
        assert answer.done() is not replayed
        answer.cancel()
    assert [len(ids) for ids in sink.tokens.values()] == [150, 150]
