"""The flight recorder of a worker with a real engine process, read over the RPC of the control plane."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace

from fairway.v1 import worker_pb2
from services.adapters.grpc.worker_steps import GrpcSteps
from tests.integration.worker.harness import TOKEN, Harness, Sink, Starter, eventually
from tests.integration.worker.test_worker import LONG, SLOW


async def read(worker: Harness, request_id: str) -> tuple[worker_pb2.RecordedSequence, ...]:
    """Return the sequences of a request's steps, its own first; the steps are those of ``steps_of``."""
    pages = await GrpcSteps(TOKEN).read(worker.address, request_id)
    found = {(one.engine, one.number): one for page in pages for one in page.sequences}
    return tuple(sorted(found.values(), key=lambda one: one.request_id != request_id))


async def steps_of(worker: Harness, request_id: str) -> list[worker_pb2.RecordedStep]:
    pages = await GrpcSteps(TOKEN).read(worker.address, request_id)
    return [step for page in pages for step in page.steps]


def parts(
    steps: Sequence[worker_pb2.RecordedStep], sequence: worker_pb2.RecordedSequence
) -> list[tuple[int, int]]:
    """Return prefilled and sampled tokens of a sequence in each step."""
    found = list[tuple[int, int]]()
    for step in steps:
        for number, prefilled, sampled in zip(step.members, step.prefilled, step.sampled, strict=True):
            if (step.engine, number) == (sequence.engine, sequence.number):
                found.append((prefilled, sampled))
    return found


async def test_a_request_is_read_with_its_neighbours(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    first, second = Sink(), Sink()
    worker.client.start(worker.spec(prompt=range(48), max_tokens=LONG, tenant="beta"), second)
    await eventually(lambda: len(second.ids) > 3)
    worker.client.start(worker.spec(prompt=range(32), max_tokens=40, tenant="acme"), first)
    await first.wait()
    own, other = await read(worker, "r2")
    steps = await steps_of(worker, "r2")
    assert (own.tenant, own.reason, own.prompt_tokens, own.output_tokens) == ("acme", "length", 32, 40)
    assert (other.request_id, other.tenant, other.reason) == ("r1", "beta", "")
    assert own.accepted_unix_us < own.first_token_unix_us < own.ended_unix_us
    mine = parts(steps, own)
    assert len(mine) == len(steps), "each step has it"
    assert (sum(tokens for tokens, _ in mine), sum(tokens for _, tokens in mine)) == (32, 40)
    assert all(sampled == 1 for _, sampled in parts(steps, other))
    assert {step.size for step in steps} == {2}
    took_ms = [step.took_us / 1e3 for step in steps]
    assert sum(took_ms) >= 0.8 * 5.0 * len(steps), took_ms
    assert all(step.predicted_us for step in steps[-3:])
    ends = [step.start_unix_us + step.took_us for step in steps]
    assert ends == sorted(ends)
    assert own.accepted_unix_us <= ends[0] <= ends[-1] <= own.ended_unix_us
    assert [step.number for step in steps] == list(range(steps[0].number, steps[-1].number + 1))
    spent_s, stepped_s = worker.agent.recorder.spent_s, sum(step.took_us for step in steps) / 1e6
    print(f"recorder: {spent_s / worker.agent.recorder.held_steps * 1e6:.1f} us per step of 5 ms")
    assert spent_s < stepped_s


async def test_a_preempted_request_has_its_preemption_and_its_second_prefill(start_worker: Starter) -> None:
    worker = await start_worker(replace(SLOW, null_step_s=0.0))
    prompt_tokens, count = 2000, 32  # 4,000 of 4,096 blocks: the outputs do not fit
    assert worker.table.limits.kv_blocks_total == 4096
    sinks = [Sink() for _ in range(count)]
    for number, sink in enumerate(sinks):
        prompt = [(7 * place + 13 * number) % 500 for place in range(prompt_tokens)]
        worker.client.start(worker.spec(prompt=prompt, max_tokens=300, kv_blocks=125), sink)
    for sink in sinks:
        await sink.wait(120.0)
    kinds: dict[str, list[str]] = {}
    for number in range(1, count + 1):
        own, *_ = await read(worker, f"r{number}")
        kinds[own.request_id] = [moment.kind for moment in own.moments]
        mine = parts(await steps_of(worker, own.request_id), own)
        prefilled = sum(tokens for tokens, _ in mine)
        assert sum(tokens for _, tokens in mine) == own.output_tokens
        if not kinds[own.request_id]:
            assert (prefilled, own.reason) == (prompt_tokens, "length")
        elif own.reason == "length":
            assert prefilled >= prompt_tokens, "what left the cache is computed again"
    preempted = [name for name, found in kinds.items() if "PREEMPTED" in found]
    assert 0 < len(preempted) < count, kinds


async def test_the_steps_of_an_engine_that_died_are_still_read(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    sink = Sink()
    worker.client.start(worker.spec(max_tokens=LONG), sink)
    await eventually(lambda: len(sink.ids) > 20)
    os.kill(worker.engine_pid, signal.SIGKILL)
    await sink.wait()
    (own,) = await read(worker, "r1")
    assert own.reason == "engine_lost"
    assert len(await steps_of(worker, "r1")) >= 20
    (pages,) = [await GrpcSteps(TOKEN).read(worker.address, "r9")]
    assert not pages[0].sequences, "an unknown request has no steps"
    assert pages[0].since_unix_us <= own.accepted_unix_us
