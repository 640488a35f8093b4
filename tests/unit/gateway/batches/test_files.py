"""Files: parts, bounds, tenants apart, deletion and the sweep."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from services.adapters.memory.store import MemoryStore
from services.core.batches import BATCH_ID, BATCHES, FILES, BatchStatus, FilePurpose, StoredFile
from services.core.errors import (
    Conflict,
    IdempotencyConflict,
    IntegrityError,
    InvalidInput,
    NotFound,
    OverQuota,
    ShareExceeded,
    StoreUnavailable,
)
from services.core.generation import Principal
from services.core.records import KeyRole
from services.gateway.batches.files import FileLimits, shown_name
from services.ports.store import Committed, Condition, ConditionFailed, Operation
from tests.support.clocks import QuickClock
from tests.support.memory_batches import BatchStack, running_stack

LIMITS = FileLimits(
    max_bytes=5000,
    max_tenant_bytes=8000,
    max_tenant_files=4,
    retention_s=1000.0,
    part_bytes=100,
    max_tenant_uploads=2,
    max_downloads=3,
    max_tenant_downloads=2,
)
CALLER = Principal("k", KeyRole.TENANT, "acme")


@pytest_asyncio.fixture
async def clock() -> QuickClock:
    return QuickClock(100_000.0)


@pytest_asyncio.fixture
async def stack(clock: QuickClock) -> AsyncIterator[BatchStack]:
    async with running_stack(clock, limits=LIMITS) as found:
        yield found


async def stored(stack: BatchStack, data: bytes, tenant: str = "acme", **more: Any) -> StoredFile:
    upload = stack.files.upload(tenant, more.get("key", ""))
    try:
        await upload.write(data)
        file = await stack.files.add(upload, more.get("name", "in.jsonl"))
    finally:
        await upload.close()
    await stack.seen()
    return file


class LosesAnswers:
    """A ``Store`` that applies the next commit under a prefix and loses its answer."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner
        self.losing = "none"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        outcome = await self._inner.commit(operations, conditions)
        if operations[0].key.startswith(self.losing):
            self.losing = "none"
            raise StoreUnavailable("the answer is lost")
        return outcome


async def blobs(stack: BatchStack) -> int:
    return sum([len(page) async for page in stack.blobs.stored()])


async def content(stack: BatchStack, file: StoredFile) -> bytes:
    return b"".join([piece async for piece in stack.files.content(file)])


@pytest.mark.parametrize("size", [1, 99, 100, 101, 1000])
async def test_a_file_comes_back_in_parts(stack: BatchStack, size: int) -> None:
    data = os.urandom(size)
    file = await stored(stack, data)
    assert (file.size_bytes, len(file.parts)) == (size, -(-size // 100))
    assert await content(stack, await stack.files.file("acme", file.file_id)) == data


async def test_no_tenant_reaches_the_files_of_another(stack: BatchStack) -> None:
    mine, theirs = await stored(stack, b"mine"), await stored(stack, b"mine", tenant="other")
    assert mine.parts[0].digest != theirs.parts[0].digest, "equal contents have no blob in common"
    assert [file.file_id for file in stack.files.files("acme")] == [mine.file_id]
    for call in (stack.files.file, stack.files.delete):
        with pytest.raises(NotFound):
            await call("acme", theirs.file_id)
    with pytest.raises(NotFound):
        await stack.service.create(CALLER, theirs.file_id, "/v1/embeddings", "24h", {})
    with pytest.raises(IntegrityError):  # a record that names another's part opens nothing
        await stack.parts.get("acme", mine.file_id, 0, theirs.parts[0].digest)
    with pytest.raises(IntegrityError):
        await stack.parts.get("acme", mine.file_id, 1, mine.parts[0].digest)


@pytest.mark.parametrize("file_id", ["", "../x", "file-", "file-" + "0" * 24 + "/..", "batch_" + "0" * 24])
async def test_hostile_ids_are_not_found(stack: BatchStack, file_id: str) -> None:
    with pytest.raises(NotFound):
        await stack.files.file("acme", file_id)


async def test_a_file_has_a_bound_and_leaves_nothing_above_it(stack: BatchStack) -> None:
    with pytest.raises(InvalidInput, match="5000 bytes"):
        await stored(stack, b"x" * 5001)
    with pytest.raises(InvalidInput, match="empty"):
        await stored(stack, b"")
    assert await blobs(stack) == 0


async def test_a_tenant_has_bounds(stack: BatchStack) -> None:
    await stored(stack, b"x" * 5000)
    with pytest.raises(InvalidInput, match="3000 bytes that are left"):
        await stored(stack, b"x" * 3001)
    for _ in range(3):
        await stored(stack, b"x")
    with pytest.raises(OverQuota):
        stack.files.upload("acme")
    uploads = [stack.files.upload("other") for _ in range(2)]
    with pytest.raises(ShareExceeded):
        stack.files.upload("other")
    for upload in uploads:
        await upload.close()
    await stored(stack, b"x", tenant="other")


async def test_downloads_are_bounded(stack: BatchStack) -> None:
    mine, other = await stored(stack, b"x" * 250), await stored(stack, b"y" * 250, tenant="other")
    third = await stored(stack, b"z", tenant="third")
    open_ = []
    for file, refused in ((mine, None), (mine, mine), (other, third)):
        open_.append(stack.files.content(file))
        await anext(open_[-1])
        if refused is not None:
            with pytest.raises(ShareExceeded, match="downloads"):
                await content(stack, refused)
    for pieces in open_:
        await pieces.aclose()
    assert await content(stack, third) == b"z"
    assert len(await content(stack, mine)) == 250


async def test_a_file_whose_commit_has_no_answer_keeps_its_bytes(clock: QuickClock) -> None:
    store = LosesAnswers(MemoryStore(clock))
    async with running_stack(clock, limits=LIMITS, etcd=store) as stack:
        store.losing = FILES
        with pytest.raises(StoreUnavailable):
            await stored(stack, b"x" * 250)
        await stack.seen()
        (file,) = stack.files.files("acme")
        assert await content(stack, file) == b"x" * 250


async def test_a_deleted_file_is_gone_with_its_bytes_but_not_while_a_batch_reads_it(
    stack: BatchStack,
) -> None:
    file = await stored(stack, b"x" * 250)
    batch = await stack.service.create(CALLER, file.file_id, "/v1/embeddings", "24h", {})
    await stack.seen()
    with pytest.raises(Conflict, match=batch.batch_id):
        await stack.files.delete("acme", file.file_id)
    await stack.store.delete_batch(await stack.store.batch("acme", batch.batch_id))
    await stack.seen()
    await stack.files.delete("acme", file.file_id)
    assert await blobs(stack) == 0
    with pytest.raises(NotFound):
        await stack.files.file("acme", file.file_id)


async def test_an_upload_under_a_key_is_one_file(stack: BatchStack, clock: QuickClock) -> None:
    first = await stored(stack, b"x" * 250, key="k")
    at_once = stack.files.upload("acme", "lag")
    lagging = await stored(stack, b"y" * 250, key="lag")
    await at_once.write(b"y" * 250)  # it began before the other was observed
    assert await stack.files.add(at_once, "in.jsonl") == lagging
    await at_once.close()
    await stored(stack, b"x" * 5000)
    await stored(stack, b"x")
    clock.now_s += 1.0
    assert await stored(stack, b"x" * 250, key="k") == first, "at the bounds of its tenant, too"
    for changed in ({"data": b"x" * 251}, {"data": b"z" * 250}, {"data": b"x" * 250, "name": "other"}):
        with pytest.raises(IdempotencyConflict):
            await stored(stack, key="k", **changed)
    with pytest.raises(InvalidInput, match="5000 bytes"):
        await stored(stack, b"x" * 5001, key="k")
    assert len(stack.files.files("acme")) == 4
    assert await blobs(stack) == 3 + 3 + 50 + 1
    assert await content(stack, first) == b"x" * 250
    assert (await stored(stack, b"x" * 250, tenant="other", key="k")).file_id != first.file_id


@pytest.mark.parametrize("how", ["expired", "deleted"])
async def test_a_key_whose_file_is_gone_has_the_next_one(
    stack: BatchStack, clock: QuickClock, how: str
) -> None:
    file = await stored(stack, b"old", key="k")
    repeat = stack.files.upload("acme", "k")
    if how == "expired":
        clock.now_s += 1000.0
    else:
        await stack.files.delete("acme", file.file_id)
        await stack.seen()
    await repeat.write(b"old")
    with pytest.raises(Conflict, match="send it again"):
        await stack.files.add(repeat, "in.jsonl")
    await repeat.close()
    again = await stored(stack, b"new", key="k")
    assert await content(stack, await stack.files.file("acme", file.file_id)) == b"new"
    assert again.create_unix_s == clock.now_s


async def test_an_upload_whose_answer_was_lost_is_repeated(clock: QuickClock) -> None:
    store = LosesAnswers(MemoryStore(clock))
    async with running_stack(clock, limits=LIMITS, etcd=store) as stack:
        store.losing = FILES
        with pytest.raises(StoreUnavailable):
            await stored(stack, b"x" * 250, key="k")
        await stack.seen()
        (file,) = stack.files.files("acme")
        assert await stored(stack, b"x" * 250, key="k") == file
        assert await blobs(stack) == 3


async def test_the_sweep_deletes_what_is_over_and_what_nothing_names(clock: QuickClock) -> None:
    async with running_stack(clock, limits=replace(LIMITS, retention_s=100_000.0)) as stack:
        old = await stored(stack, b"old")
        await stack.parts.put("acme", "file-" + "f" * 24, 0, b"of a gateway that died")
        clock.now_s += 7000.0
        assert await stack.files.sweep() == 0, "both are younger than an upload may last"
        clock.now_s += 83_000.0
        kept = await stored(stack, b"kept")
        clock.now_s += 10_000.0
        with pytest.raises(NotFound):
            await stack.files.file("acme", old.file_id)
        assert await stack.files.sweep() == 2
        assert await content(stack, kept) == b"kept"
        assert await blobs(stack) == 1


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a.jsonl", "a.jsonl"), ("../../etc/passwd", ".._.._etc_passwd"), ("a\0b\r\nc", "a_b__c"), ("", "file")],
)
def test_a_hostile_name_is_only_shown(name: str, shown: str) -> None:
    assert shown_name(name) == shown
    assert len(shown_name(name + "x" * 1000)) <= 255


@pytest.mark.parametrize("window", ["", "24", "h", "0h", "169h", "1.5h", "24H", "-1h", "٢h", "1" * 50 + "h"])
async def test_bad_windows_are_refused(stack: BatchStack, window: str) -> None:
    file = await stored(stack, b"x")
    with pytest.raises(InvalidInput, match="completion_window"):
        await stack.service.create(CALLER, file.file_id, "/v1/embeddings", window, {})


async def test_unfinished_batches_are_bounded(stack: BatchStack) -> None:
    file = await stored(stack, b"x")
    for _ in range(3):
        await stack.service.create(CALLER, file.file_id, "/v1/embeddings", "24h", {})
        await stack.seen()
    with pytest.raises(OverQuota):
        await stack.service.create(CALLER, file.file_id, "/v1/embeddings", "24h", {})


async def test_a_new_batch_evicts_the_one_that_ended_first_and_none_that_runs(
    stack: BatchStack, clock: QuickClock
) -> None:
    file = await stored(stack, b"x")

    async def create(principal: Principal = CALLER, file_id: str = file.file_id) -> str:
        clock.now_s += 1.0
        made = await stack.service.create(principal, file_id, "/v1/embeddings", "24h", {})
        await stack.seen()
        return made.batch_id

    results: dict[str, str] = {}

    async def end(batch_id: str) -> None:
        clock.now_s += 1.0
        held = await stack.store.claim("acme", batch_id, "g", await stack.etcd.grant_lease(60))
        assert held is not None
        over = replace(held.record, status=BatchStatus.CANCELLED, end_unix_s=clock.now_s)
        name, times = over.output_file_id, (clock.now_s, clock.now_s + 1e6)
        result = StoredFile(name, "acme", "o.jsonl", FilePurpose.BATCH_OUTPUT, *times)
        await stack.store.advance(held, over, [result])
        results[batch_id] = name
        await stack.seen()

    theirs = await stored(stack, b"x", tenant="other")
    other = await create(replace(CALLER, tenant_id="other"), theirs.file_id)
    runs, *rest = [await create() for _ in range(3)]
    for batch_id in reversed(rest):
        await end(batch_id)
    rest += [await create(), await create()]
    for batch_id in rest[2:]:
        await end(batch_id)
    newest = await create()
    assert [batch.batch_id for batch in stack.service.batches("acme")] == [
        newest,
        rest[3],
        rest[2],
        rest[0],
        runs,
    ]
    assert [batch.batch_id for batch in stack.service.batches("other")] == [other]
    with pytest.raises(NotFound):
        await stack.store.file("acme", results[rest[1]])
    assert (await stack.store.file("acme", results[rest[0]])).record.filename == "o.jsonl"


async def test_a_tenant_without_room_for_results_creates_no_batch(stack: BatchStack) -> None:
    file = await stored(stack, b"x" * 5000)
    await stack.service.create(CALLER, file.file_id, "/v1/embeddings", "24h", {})
    await stored(stack, b"x" * 3000)
    with pytest.raises(OverQuota, match="room for results"):
        await stack.service.create(CALLER, file.file_id, "/v1/embeddings", "24h", {})


@pytest.mark.parametrize("key", ["", "k-1"])
async def test_a_batch_whose_commit_has_no_answer_is_created_once(clock: QuickClock, key: str) -> None:
    store = LosesAnswers(MemoryStore(clock))
    async with running_stack(clock, limits=LIMITS, etcd=store) as stack:
        file = await stored(stack, b"x")
        store.losing = BATCHES
        batch = await stack.service.create(CALLER, file.file_id, "/v1/embeddings", "24h", {}, key=key)
        await stack.seen()
        assert stack.service.batches("acme") == [batch]


async def test_an_idempotency_key_creates_one_batch(stack: BatchStack) -> None:
    file = await stored(stack, b"x")
    again = ("/v1/embeddings", "24h", {"team": "a"})
    batch = await stack.service.create(CALLER, file.file_id, *again, key="k-1")
    assert BATCH_ID.fullmatch(batch.batch_id)
    for _ in range(4):  # more than the tenant may have unfinished
        assert await stack.service.create(CALLER, file.file_id, *again, key="k-1") == batch
    with pytest.raises(IdempotencyConflict):
        await stack.service.create(CALLER, file.file_id, "/v1/embeddings", "48h", {"team": "a"}, key="k-1")
    other = await stack.service.create(CALLER, file.file_id, *again, key="k-2")
    assert other.batch_id != batch.batch_id
    theirs = await stored(stack, b"x", tenant="other")
    found = await stack.service.create(replace(CALLER, tenant_id="other"), theirs.file_id, *again, key="k-1")
    assert found.batch_id != batch.batch_id
