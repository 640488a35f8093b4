"""A batch from validation to its end, on owners that are killed, frozen and cut off from their stores."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from services.core import errors
from services.core.batches import BatchRecord, BatchStatus, StoredFile, batch_key, owner_key
from services.core.generation import Principal
from services.core.records import KeyRole, Meta, Tenant
from services.gateway.batches.execution import BatchExecution
from services.gateway.batches.lines import LineAnswer
from services.gateway.batches.ports import BatchPorts, BatchTimes
from services.gateway.batches.store import BatchStore, OwnedBatch, OwnershipLost
from services.ports.store import Committed, Condition, ConditionFailed, Operation
from tests.support.memory_batches import BatchStack, batch_stack
from tests.support.waiting import until

URL = "/v1/completions"
FASTER = 200.0
CALLER = Principal("k", KeyRole.TENANT, "acme")


@dataclass
class FastClock:
    """Implements ``ports.clock.Clock``: faster than the loop's. A test may move it on."""

    moved_s: float = 1e6

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time() * FASTER

    def unix_s(self) -> float:
        return self.monotonic_s() + self.moved_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / FASTER)


@dataclass
class OnceCalls:
    """``LineCalls`` with records of keys, as the gateways have them: a run of a key is joined or replayed."""

    rng: Random = field(default_factory=lambda: Random(1))
    runs: Counter[str] = field(default_factory=Counter)
    answers: dict[str, LineAnswer | errors.FairwayError] = field(default_factory=dict)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    temporary: float = 0.0
    # Lines with this field find no worker.
    unavailable: str = "away"
    most: int = 0
    active: int = 0

    async def run(self, principal: Principal, endpoint: str, body: bytes, key: str) -> LineAnswer:
        assert (principal.tenant_id, endpoint) == ("acme", URL)
        if self.rng.random() < self.temporary or json.loads(body).get(self.unavailable):
            raise errors.NoWorkerAvailable("no worker", retry_after_s=0.01)
        if key not in self.answers and key not in self.running:
            self.running[key] = asyncio.create_task(self._run(body, key))
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            if key in self.running:
                await asyncio.shield(self.running[key])
        finally:
            self.active -= 1
        answer = self.answers[key]
        if isinstance(answer, errors.FairwayError):
            raise answer
        return answer

    async def _run(self, body: bytes, key: str) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        if json.loads(body).get("hold"):
            await self.hold.wait()
        self.runs[key] += 1
        wrong = errors.InvalidInput("bad", field="x") if json.loads(body).get("bad") else None
        self.answers[key] = wrong or LineAnswer(200, body, "req_1", work=7.0)
        del self.running[key]

    def refusal(self, error: errors.FairwayError) -> LineAnswer:
        return LineAnswer(400, json.dumps({"error": error.message}).encode(), "")


@dataclass
class Rig:
    stack: BatchStack
    clock: FastClock
    calls: OnceCalls
    ports: BatchPorts
    batch: BatchRecord

    async def claim(self) -> OwnedBatch:
        """Own the batch as a new gateway, whoever had it."""
        await self.kill_owner()
        lease = await self.stack.etcd.grant_lease(600)
        held = await self.stack.store.claim("acme", self.batch.batch_id, "g", lease)
        assert held is not None
        return held

    async def kill_owner(self) -> None:
        entry = await self.stack.etcd.get(owner_key("acme", self.batch.batch_id))
        if entry is not None:
            await self.stack.etcd.revoke_lease(entry.lease_id)

    async def run(self, share: int = 8) -> BatchRecord:
        return await BatchExecution(await self.claim(), self.ports, lambda: share).run()

    async def record(self) -> BatchRecord:
        return (await self.stack.store.batch("acme", self.batch.batch_id)).record

    async def written(self) -> tuple[list[Any], list[Any]]:
        """Return the lines of the output and of the error file."""
        record = await self.record()
        found = []
        for file_id, parts in ((record.output_file_id, record.output), (record.error_file_id, record.errors)):
            data = b""
            if parts:
                file = await self.stack.files.file("acme", file_id)
                assert file.parts == parts
                data = b"".join([piece async for piece in self.stack.files.content(file)])
            found.append([json.loads(line) for line in data.splitlines()])
        return found[0], found[1]


def lines_of(bodies: Sequence[dict[str, Any]]) -> bytes:
    lines = [
        {"custom_id": f"id-{number}", "method": "POST", "url": URL, "body": body}
        for number, body in enumerate(bodies)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def rig_of(data: bytes, store: Callable[[BatchStack], BatchStore] | None = None) -> Rig:
    clock = FastClock()
    stack = batch_stack(clock)
    upload = stack.files.upload("acme")
    await upload.write(data)
    file = await stack.files.add(upload, "in.jsonl")
    await upload.close()
    batch = await stack.service.create(CALLER, file.file_id, URL, "24h", {"team": "a"})
    calls = OnceCalls()

    def status_of(batch: BatchRecord) -> BatchStatus:
        entry = stack.etcd._entries.get(batch_key("acme", batch.batch_id))  # type: ignore[attr-defined]
        return BatchStatus.CANCELLING if b'"cancelling"' in entry.value else batch.status

    ports = BatchPorts(
        store(stack) if store else stack.store,
        stack.parts,
        calls,
        clock,
        Random(2),
        tenant_of=lambda _: Tenant(Meta("acme")),
        status_of=status_of,
        count=lambda _: None,
        room_bytes=stack.files.room_bytes,
        retention_s=lambda _: 30 * 86_400.0,
        deployment_of=str,
        max_line_bytes=10_000,
        times=BatchTimes(commit_s=0.0, grace_s=0.05),
    )
    return Rig(stack, clock, calls, ports, batch)


@pytest.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    yield
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def test_every_line_is_answered_and_the_bad_ones_are_in_the_error_file() -> None:
    rig = await rig_of(lines_of([{"bad": number % 5 == 0} for number in range(40)]))
    ended = await rig.run()
    output, failed = await rig.written()
    assert ended.status is BatchStatus.COMPLETED
    assert (ended.lines, ended.completed, ended.failed) == (40, 32, 8)
    assert [line["custom_id"] for line in failed] == [f"id-{number}" for number in range(0, 40, 5)]
    assert len({line["custom_id"] for line in output}) == 32
    assert output[0]["response"] == {"status_code": 200, "request_id": "req_1", "body": {"bad": False}}
    assert output[0]["error"] is None
    assert failed[0]["response"]["status_code"] == 400
    assert len({line["id"] for line in output + failed}) == 40
    assert set(rig.calls.runs.values()) == {1}


async def test_a_batch_states_its_lines_by_deployment_and_what_they_took() -> None:
    named: list[Any] = [*["chat"] * 6, *["small"] * 3, "x" * 5000, 7, "bad"]
    rig = await rig_of(lines_of([{"model": name, "bad": name == "bad"} for name in named]))
    rig.ports = replace(rig.ports, deployment_of=lambda name: "chat" if name == "small" else name)
    ended = await rig.run()
    assert (ended.models, ended.lines) == ({"chat": 9, "bad": 1}, 12), "names that are none count nowhere"
    assert ended.work == 7.0 * 11
    assert ended.lines_left("chat") == 0.0
    half = replace(ended, status=BatchStatus.IN_PROGRESS, next_line=6)
    assert (half.lines_left("chat"), half.lines_left("other")) == (4.5, 0.0)


async def test_bad_input_fails_with_the_lines_and_runs_nothing() -> None:
    rig = await rig_of(lines_of([{}]) + b"{\n" + lines_of([{}]))
    ended = await rig.run()
    assert ended.status is BatchStatus.FAILED
    assert [(problem.code, problem.line) for problem in ended.problems] == [
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 3),
    ]
    assert not rig.calls.runs
    assert await rig.written() == ([], [])


async def test_a_line_above_the_bound_is_named() -> None:
    rig = await rig_of(lines_of([{}]) + b"x" * 20_000)
    ended = await rig.run()
    assert [(problem.code, problem.line) for problem in ended.problems] == [("line_too_long", 2)]


@pytest.mark.parametrize("seed", range(25))
async def test_kills_lose_and_double_nothing(seed: int) -> None:
    """Owners are killed at random moments, refusals come, parts are small, and every other time all results
    that wait are stored at once."""
    rng = Random(seed)
    rig = await rig_of(lines_of([{"n": number, "bad": rng.random() < 0.2} for number in range(60)]))
    rig.calls.rng, rig.calls.temporary = rng, 0.1
    times = replace(rig.ports.times, early_s=0.0 if seed % 2 else 5.0)
    rig.ports = replace(rig.ports, part_bytes=400, times=times)
    kills = 0
    while not (await rig.record()).status.is_over:
        owner = asyncio.create_task(rig.run(share=rng.randrange(1, 12)))
        await asyncio.sleep(rng.uniform(0.001, 0.06 if kills else 0.004))
        if not kills or rng.random() < 0.8:
            kills += not owner.done()
            owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)
    output, failed = await rig.written()
    found = Counter(line["custom_id"] for line in output + failed)
    assert found == Counter(f"id-{number}" for number in range(60))
    assert set(rig.calls.runs.values()) == {1}
    assert len(rig.calls.runs) == 60
    record = await rig.record()
    assert (record.completed, record.failed, record.early) == (len(output), len(failed), ())
    assert record.work == 7.0 * record.completed, "each line's once, also of results that were stored early"
    assert kills > 0


@pytest.mark.parametrize("keys", ["answers-expired", "gone"])
async def test_results_behind_a_line_without_a_worker_outlive_the_records_of_their_keys(keys: str) -> None:
    rig = await rig_of(lines_of([{"n": number, "away": number in (0, 30)} for number in range(60)]))
    rig.ports = replace(rig.ports, part_bytes=400)
    execution = BatchExecution(await rig.claim(), rig.ports, lambda: 4)
    owner = asyncio.create_task(execution.run())
    await until(lambda: len(rig.calls.runs) >= 58 and not execution._window.has_unstored)
    owner.cancel()
    await asyncio.gather(owner, return_exceptions=True)
    assert (await rig.record()).next_line == 0
    if keys == "gone":
        rig.calls.answers.clear()
    else:
        rig.calls.answers = dict.fromkeys(rig.calls.answers, errors.ResultExpired("not stored any more"))
    rig.calls.unavailable = ""
    ended = await rig.run()
    assert (ended.status, ended.completed, ended.failed, ended.early) == (BatchStatus.COMPLETED, 60, 0, ())
    assert ended.work == 7.0 * 60, "what early results took is stored with them"
    output, failed = await rig.written()
    assert [line["custom_id"] for line in output] == [f"id-{number}" for number in range(60)]
    assert failed == []
    assert set(rig.calls.runs.values()) == {1}, "each line is charged once"
    stored = {blob.digest async for page in rig.stack.blobs.stored() for blob in page}
    file = await rig.stack.files.file("acme", ended.input_file_id)
    assert stored == {part.digest for part in (*ended.output, *file.parts)}, "nothing is left"


async def test_a_frozen_owner_writes_nothing_after_another_took_over() -> None:
    rig = await rig_of(lines_of([{"hold": number == 0} for number in range(10)]))
    frozen = asyncio.create_task(BatchExecution(await rig.claim(), rig.ports, lambda: 4).run())
    await asyncio.sleep(0.05)
    held = await rig.claim()
    rig.calls.hold.set()
    ended = await BatchExecution(held, rig.ports, lambda: 4).run()
    with pytest.raises(OwnershipLost):
        await frozen
    assert await rig.record() == ended
    output, _ = await rig.written()
    assert len(output) == 10
    assert set(rig.calls.runs.values()) == {1}


async def test_cancelling_keeps_what_is_done_and_names_the_rest() -> None:
    rig = await rig_of(lines_of([{"hold": number >= 5} for number in range(20)]))
    running = asyncio.create_task(rig.run(share=3))
    await until(lambda: len(rig.calls.runs) == 5)
    cancelled = await rig.stack.service.cancel(CALLER, rig.batch.batch_id)
    assert cancelled.status is BatchStatus.CANCELLING
    ended = await asyncio.wait_for(running, 30)
    output, failed = await rig.written()
    assert ended.status is BatchStatus.CANCELLED
    assert [line["custom_id"] for line in output] == [f"id-{number}" for number in range(5)]
    assert [line["custom_id"] for line in failed] == [f"id-{number}" for number in range(5, 20)]
    assert {line["error"]["code"] for line in failed} == {"batch_cancelled"}
    assert len(rig.calls.runs) == 5
    with pytest.raises(errors.Conflict):
        await rig.stack.service.cancel(CALLER, rig.batch.batch_id)


async def test_a_batch_cancelled_before_it_is_validated_ends() -> None:
    rig = await rig_of(lines_of([{}]))
    await rig.stack.service.cancel(CALLER, rig.batch.batch_id)
    assert (await rig.run()).status is BatchStatus.CANCELLED
    assert not rig.calls.runs


async def test_what_is_left_at_the_expiry_is_named() -> None:
    rig = await rig_of(lines_of([{"hold": number >= 2} for number in range(6)]))
    running = asyncio.create_task(rig.run())
    await until(lambda: len(rig.calls.runs) == 2)
    rig.clock.moved_s += 24 * 3600
    ended = await asyncio.wait_for(running, 30)
    _, failed = await rig.written()
    assert ended.status is BatchStatus.EXPIRED
    assert [line["error"]["code"] for line in failed] == ["batch_expired"] * 4


async def test_a_key_that_is_deleted_ends_the_batch() -> None:
    rig = await rig_of(lines_of([{} for _ in range(6)]))

    def gone(_: Principal) -> Tenant:
        raise errors.Unauthenticated("the API key is not valid any more")

    rig.ports = replace(rig.ports, tenant_of=gone)
    ended = await rig.run()
    _, failed = await rig.written()
    assert ended.status is BatchStatus.FAILED
    assert [problem.code for problem in ended.problems] == ["invalid_api_key"]
    assert [line["error"]["code"] for line in failed] == ["invalid_api_key"] * 6
    assert not rig.calls.runs


class Noting(BatchStore):
    """Keeps what owners wrote."""

    def __init__(self, stack: BatchStack) -> None:
        super().__init__(stack.etcd, stack.batches._clock)
        self.written: list[BatchRecord] = []

    async def advance(
        self, held: OwnedBatch, record: BatchRecord, files: Sequence[StoredFile] = ()
    ) -> OwnedBatch:
        self.written.append(record)
        return await super().advance(held, record, files)


async def test_no_owner_can_die_between_the_last_results_and_the_end() -> None:
    rig = await rig_of(lines_of([{} for _ in range(6)]), Noting)

    def gone(_: Principal) -> Tenant:
        raise errors.Unauthenticated("the API key is not valid any more")

    rig.ports = replace(rig.ports, tenant_of=gone, part_bytes=200)
    await rig.run()
    assert isinstance(rig.ports.store, Noting)
    states = [(record.next_line == 6, record.status.is_over) for record in rig.ports.store.written]
    assert len(states) > 2
    assert [done for done, _ in states] == [over for _, over in states]


async def test_lines_at_once_are_bounded() -> None:
    rig = await rig_of(lines_of([{} for _ in range(200)]))
    await rig.run(share=5)
    assert 2 <= rig.calls.most <= 5


async def test_memory_is_bounded_while_the_first_line_hangs() -> None:
    rig = await rig_of(lines_of([{"hold": number == 0} for number in range(300)]))
    rig.ports = replace(rig.ports, ahead_lines=30)
    running = asyncio.create_task(rig.run())
    await until(lambda: len(rig.calls.runs) > 20)
    await asyncio.sleep(0.1)
    assert len(rig.calls.runs) <= 30
    rig.calls.hold.set()
    assert (await running).completed == 300


class Unsure(BatchStore):
    """Loses the answers of commits, before or after they were applied."""

    def __init__(self, stack: BatchStack, rng: Random) -> None:
        super().__init__(Lossy(stack.etcd, rng), stack.batches._clock)


class Lossy:
    def __init__(self, inner: Any, rng: Random) -> None:
        self._inner = inner
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        if self._rng.random() < 0.2:
            raise errors.StoreUnavailable("lost before")
        outcome: Committed | ConditionFailed = await self._inner.commit(operations, conditions)
        if self._rng.random() < 0.2:
            raise errors.StoreUnavailable("lost after")
        return outcome


@pytest.mark.parametrize("seed", range(5))
async def test_lost_answers_of_the_store_change_nothing(seed: int) -> None:
    rng = Random(seed)
    rig = await rig_of(lines_of([{"n": number} for number in range(30)]), lambda stack: Unsure(stack, rng))
    rig.calls.rng = rng
    ended = await rig.run(share=3)
    output, failed = await rig.written()
    assert [line["custom_id"] for line in output] == [f"id-{number}" for number in range(30)]
    assert (ended.completed, failed) == (30, [])


async def test_replaced_parts_are_deleted_at_once() -> None:
    rig = await rig_of(lines_of([{} for _ in range(50)]))
    ended = await rig.run(share=2)
    stored = [blob.digest async for page in rig.stack.blobs.stored() for blob in page]
    file = await rig.stack.files.file("acme", ended.input_file_id)
    assert sorted(stored) == sorted(part.digest for part in (*ended.output, *file.parts))


async def test_lines_without_a_worker_do_not_stop_those_of_other_models() -> None:
    rig = await rig_of(lines_of([{"n": number, "away": number in (3, 4)} for number in range(60)]))
    execution = BatchExecution(await rig.claim(), rig.ports, lambda: 4)
    running = asyncio.create_task(execution.run())
    await until(lambda: len(rig.calls.runs) >= 58)
    rig.calls.unavailable = ""
    assert (await asyncio.wait_for(running, 10.0)).completed == 60
    assert execution._waiting == 0


async def test_a_batch_ends_when_its_results_exceed_what_its_tenant_may_store() -> None:
    rig = await rig_of(lines_of([{"text": "x" * 100, "hold": number == 30} for number in range(40)]))
    rig.ports = replace(rig.ports, room_bytes=lambda _: 2000)
    ended = await asyncio.wait_for(rig.run(share=2), 10.0)
    _, failed = await rig.written()
    assert ended.status is BatchStatus.FAILED
    assert [problem.code for problem in ended.problems] == ["output_too_large"]
    assert failed[-1]["error"]["code"] == "output_too_large"
    assert (ended.completed + ended.failed, ended.completed < 40) == (40, True)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_a_batch_that_ends_while_its_input_is_checked_is_not_read_further(how: str) -> None:
    body = {"text": "x" * 5000}
    rig = await rig_of(lines_of([body for _ in range(60)]))
    asked: list[BatchStatus] = []

    def status_of(batch: BatchRecord) -> BatchStatus:
        asked.append(batch.status)
        if how == "expired":
            rig.clock.moved_s += 24 * 3600
        return BatchStatus.CANCELLING if how == "cancelled" else batch.status

    rig.ports = replace(rig.ports, status_of=status_of)
    ended = await rig.run()
    assert (ended.status, ended.lines) == (BatchStatus(how), 0)
    assert len(asked) < 3, "five pieces were left"
    assert not rig.calls.runs


async def test_an_input_is_checked_in_small_pieces() -> None:
    rig = await rig_of(lines_of([{"text": "x" * 5000} for _ in range(60)]))
    execution = BatchExecution(await rig.claim(), rig.ports, lambda: 4)
    sizes = [sum(len(line.data) for line in portion) async for portion in execution._lines(0)]
    assert sum(sizes) > 300_000
    assert max(sizes) < 64 * 1024 + 10_000


async def test_an_input_is_refused_at_the_first_line_above_the_bound_even_of_blank_ones() -> None:
    rig = await rig_of(lines_of([{}]) + b"\n" * 60_000)
    ended = await rig.run()
    assert ended.status is BatchStatus.FAILED
    assert [(problem.code, problem.line) for problem in ended.problems] == [("too_many_lines", 50_001)]
