"""Windows of steps are what the same steps are one by one: every token, every time, every block."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.core.estimates.cost_model import CostModel
from services.core.prefix import prefix_chain
from services.worker import engine_protocol as wire
from services.worker.engine.step_meter import REPORT_S
from simulator.engine.sim_engine import SimEngine, SimEngineSpec
from simulator.engine.tokens import output_tokens
from simulator.kernel.loop import VirtualTimeLoop, run
from tests.support.submits import make_submit

COST = CostModel(
    name="test",
    base_s=0.004,
    prefill_token_s=0.0001,
    decode_sequence_s=0.0003,
    attended_token_s=0.000001,
    weight_read_s=0.003,
    prefill_attended_token_s=0.0000001,
)
SPEC = SimEngineSpec(
    cost=COST, kv_blocks=40, block_size=16, token_budget=64, max_sequences=6, vocab_size=101, eos_id=7
)


@dataclass
class Told:
    """What an agent heard, and when each of it happened."""

    tokens: list[tuple[int, int, float]] = field(default_factory=list)  # handle, token, end of its step
    finished: list[tuple[int, str, float]] = field(default_factory=list)
    prefixes: list[tuple[int, int]] = field(default_factory=list)  # sum over names, so that order is free
    cached: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)  # names in the cache
    steps: int = 0
    messages: int = 0
    step_s: float = 0.0
    prefill_tokens: int = 0
    attended_tokens: int = 0
    preemptions: int = 0
    computing_s: float = 0.0
    device_us: dict[int, int] = field(default_factory=dict)
    settled: list[int] = field(default_factory=list)

    def observe(self, ends_s: list[float], event: wire.Stepped) -> None:
        rows = len(event.handles) // len(ends_s)
        for index, (handle, token) in enumerate(zip(event.handles, event.tokens, strict=True)):
            self.tokens.append((handle, token, ends_s[index // rows]))
        self.finished += [(handle, reason, ends_s[-1]) for handle, reason in sorted(event.finished.items())]
        assert self.held.isdisjoint(event.prefix_added)
        self.held |= set(event.prefix_added)
        assert self.held.issuperset(event.prefix_removed)
        self.held -= set(event.prefix_removed)
        self.cached |= event.cached
        assert event.step == self.steps + len(ends_s)
        self.steps = event.step
        self.messages += 1
        self.step_s += event.step_s
        self.prefill_tokens += event.prefill_tokens
        self.attended_tokens += event.attended_tokens
        self.preemptions = event.preemptions
        if event.prefill_tokens or event.attended_tokens:
            self.computing_s += event.step_s
        assert not event.device_us.keys() & set(self.settled), "charged after it was settled"
        self.device_us |= event.device_us
        self.settled += event.settled


class _Clock:
    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def monotonic_s(self) -> float:
        return self._loop.now_s

    def unix_s(self) -> float:
        return self._loop.now_s

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def play(spec: SimEngineSpec, script: list[tuple[float, Any]], *, until_s: float = 120.0) -> Told:
    """Return what comes of commands and faults at their times."""
    told = Told()

    async def main() -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        engine = SimEngine(
            spec,
            clock=_Clock(loop),
            call_at=loop.at,
            report=lambda event: None,
            output_length=lambda submit: submit.sampling.seed % 1000 or None,
            observe=told.observe,
        )
        engine.start()
        for at_s, act in script:
            loop.at(at_s, act if callable(act) else engine.send, *([engine] if callable(act) else [act]))
        await asyncio.sleep(until_s)
        engine.check_integrity()
        told.prefixes.append((engine.pool.prefix_blocks, engine.pool.blocks_used))

    run(main())
    return told


def submit(
    handle: int, prompt: int, *, length: int, max_tokens: int, credit: int = 1 << 30, shared: int = 0
) -> wire.Submit:
    """Return a request whose output ends at ``length`` if that is not above ``max_tokens``."""
    ids = [*range(shared), *(handle * 13 % 50 + index % 40 for index in range(max(0, prompt - shared)))]
    names = list(prefix_chain(99, ids))
    return make_submit(
        handle,
        ids,
        credit,
        seed=handle * 1000 + length,
        max_tokens=max_tokens,
        prefix_hashes=names,
        prefix_root=99,
    )


def same(script: list[tuple[float, Any]], spec: SimEngineSpec = SPEC) -> tuple[Told, Told]:
    """Assert that windows change nothing but how many messages there are."""
    one_by_one, together = play(replace(spec, coalesce_s=0.0), script), play(spec, script)
    assert together.tokens == one_by_one.tokens
    assert together.finished == one_by_one.finished
    assert together.cached == one_by_one.cached
    assert together.held == one_by_one.held
    assert together.prefixes == one_by_one.prefixes
    assert together.step_s == pytest.approx(one_by_one.step_s)
    for name in ("steps", "prefill_tokens", "attended_tokens", "preemptions"):
        assert getattr(together, name) == getattr(one_by_one, name), name
    assert sorted(together.settled) == sorted(one_by_one.settled)
    for told in (together, one_by_one):
        assert len(told.settled) == len(set(told.settled))
        live_s = REPORT_S + SPEC.full_step_s * 3  # of sequences that wait for credit: not reported yet
        charged_s = sum(told.device_us.values()) / 1e6
        assert told.computing_s - live_s <= charged_s <= told.computing_s + 1e-4
    for handle in together.settled:
        charge_us = pytest.approx(one_by_one.device_us[handle], rel=0.02, abs=2.0)
        assert together.device_us[handle] == charge_us
    return one_by_one, together


def test_a_pool_changes_its_size_in_a_window_as_it_does_between_steps() -> None:
    script: list[tuple[float, Any]] = [
        (0.0, submit(handle, 60, length=400, max_tokens=90)) for handle in range(1, 6)
    ]
    script += [(0.31, wire.Resize(14)), (0.9, wire.Resize(60)), (1.1, wire.Resize(30))]
    together, _ = same(script)
    assert together.preemptions > 0
    assert {handle for handle, *_ in together.finished} == {1, 2, 3, 4, 5}


times = st.floats(0.0, 3.0, allow_nan=False, width=32)
scripts = st.lists(
    st.tuples(
        times,
        st.one_of(
            st.tuples(
                st.just("submit"),
                st.integers(1, 200),  # prompt
                st.integers(1, 60),  # length
                st.integers(1, 60),  # max_tokens
                st.sampled_from([0, 1, 5, 20, 1 << 30]),  # credit
                st.sampled_from([0, 64, 128]),  # shared prefix
            ),
            st.tuples(st.just("credit"), st.integers(0, 12), st.integers(1, 60)),
            st.tuples(st.just("cancel"), st.integers(0, 12)),
            st.tuples(st.just("slow"), st.sampled_from([1.0, 3.0])),
            st.tuples(st.just("hang"), st.floats(0.001, 0.5)),
        ),
    ),
    max_size=25,
)


def _script(drawn: list[tuple[float, tuple[Any, ...]]]) -> list[tuple[float, Any]]:
    script: list[tuple[float, Any]] = []
    handle = 0
    for index, (at_s, (kind, *values)) in enumerate(sorted(drawn, key=lambda each: each[0])):
        at_s += index * 1e-5  # no two things happen at one instant, whose order nobody promises
        if kind == "submit":
            prompt, length, most, credit, shared = values
            command = submit(handle, prompt, length=length, max_tokens=most, credit=credit, shared=shared)
            script.append((at_s, command))
            handle += 1
        elif kind == "credit":
            script.append((at_s, wire.Credit([values[0]], [values[1]])))
        elif kind == "cancel":
            script.append((at_s, wire.Cancel([values[0]])))
        elif kind == "slow":
            script.append((at_s, lambda engine, factor=values[0]: engine.slow(factor)))
        else:
            script.append((at_s, lambda engine: engine.hang()))
            script.append((at_s + values[0], lambda engine: engine.unhang()))
    return script


@settings(max_examples=150)
@given(scripts)
def test_a_window_equals_its_steps(drawn: list[tuple[float, tuple[Any, ...]]]) -> None:
    same(_script(drawn))


def test_windows_save_most_of_the_messages() -> None:
    script = [(0.1 * number, submit(number, 30, length=500, max_tokens=200)) for number in range(4)]
    one_by_one, together = same(script, replace(SPEC, kv_blocks=400))
    assert one_by_one.messages == one_by_one.steps
    assert together.messages * 4 < one_by_one.messages


def test_outputs_are_the_function_of_seed_and_position() -> None:
    told = play(SPEC, [(0.0, submit(3, 20, length=10, max_tokens=50))])
    tokens = [token for _, token, _ in told.tokens]
    assert tokens == [*output_tokens(3010, 0, 9, vocab_size=101, eos_id=7), 7]
    assert [(handle, reason) for handle, reason, _ in told.finished] == [(3, "stop")]


def test_a_resume_continues_where_it_was() -> None:
    before = output_tokens(3010, 0, 4, vocab_size=101, eos_id=7)
    command = submit(3, 20, length=10, max_tokens=50)
    again = structs.replace(command, credit_limit=1 << 30, produced_ids=before)
    told = play(SPEC, [(0.0, again)])
    whole = [*output_tokens(3010, 0, 9, vocab_size=101, eos_id=7), 7]
    assert before + [token for _, token, _ in told.tokens] == whole


def test_a_slow_engine_takes_so_many_times_as_long() -> None:
    script: list[tuple[float, Any]] = [(0.0, submit(1, 20, length=999, max_tokens=40))]
    usual = play(SPEC, script)
    slowed = play(SPEC, [(0.0, lambda engine: engine.slow(3.0)), *script])
    assert slowed.step_s == pytest.approx(3 * usual.step_s, rel=1e-6)


def test_a_crashed_engine_takes_nothing_and_says_nothing() -> None:
    answers: list[bool] = []
    script: list[tuple[float, Any]] = [
        (0.0, submit(1, 20, length=999, max_tokens=500)),
        (0.2, lambda engine: engine.crash()),
        (0.3, lambda engine: answers.append(engine.send(wire.Cancel([1])))),
    ]
    told = Told()

    async def main() -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        engine = SimEngine(
            SPEC, clock=_Clock(loop), call_at=loop.at, report=lambda event: None, observe=told.observe
        )
        engine.start()
        for at_s, act in script:
            loop.at(at_s, act if callable(act) else engine.send, *([engine] if callable(act) else [act]))
        await asyncio.sleep(10.0)

    run(main())
    assert answers == [False]
    assert told.tokens
    assert max(end_s for _, _, end_s in told.tokens) < 0.2
