"""Damaged, moved and foreign chunks are not read; keys rotate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from structlog.testing import capture_logs

from services.adapters.keys.tenant_keys import TenantKeys
from services.adapters.record_cipher import OVERHEAD_BYTES, EncryptedRecords
from services.core.errors import IntegrityError, StoreUnavailable
from services.core.generation import Usage
from services.ports.idempotency import (
    Addition,
    Hold,
    LogTail,
    Owned,
    RecordKey,
    RecordLimits,
    RecordState,
    Written,
)
from simulator.stores.idempotency import MemoryIdempotency
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock
from tests.support.tenant_keys import record_cipher, tenant_keys

KEY = RecordKey("acme", "ab" * 16)
# A chunk of version 1 under the secret "o" * 32.
DERIVED = bytes.fromhex(
    "015e44d643000000000000000300000002000102030405060708090a0bb1216378b84f7b3ece69a34a3ad8bbe2396feb9a67fcfdd8"
    "adcfec5c0f84"
)
CHUNKS = (b"terms", b"tokens", b"text", b"end")


class Shelf(MemoryIdempotency):
    """A store whose chunks the test reads and replaces, and whose answers it loses."""

    def __init__(self) -> None:
        self.clock = HandClock()
        super().__init__(self.clock, MemoryLimiter(self.clock), RecordLimits())
        self.change: Callable[[tuple[bytes, ...]], Sequence[bytes]] = lambda chunks: chunks
        self.lost_answers = 0
        self.most: int | None = None  # chunks of one read

    async def append(self, additions: Sequence[Addition]) -> tuple[Written, ...]:
        answers = await super().append(additions)
        if self.lost_answers:
            self.lost_answers -= 1
            raise StoreUnavailable("the answer was lost")
        return answers

    async def read(self, key: RecordKey, start: int, *, watch: bool) -> LogTail:
        tail = await super().read(key, 0, watch=watch)
        return replace(tail, chunks=tuple(self.change(tail.chunks))[start:][: self.most])


async def claimed(store: EncryptedRecords, key: RecordKey = KEY) -> Hold:
    claim = await store.claim(key, "f", "g")
    assert isinstance(claim, Owned)
    return claim.hold


async def ended(shelf: Shelf, key: RecordKey = KEY, keys: TenantKeys | None = None) -> EncryptedRecords:
    """Write the record, each chunk in a call of its own, and end it."""
    store = EncryptedRecords(shelf, record_cipher(keys=keys))
    hold = await claimed(store, key)
    for chunk in CHUNKS[:-1]:
        await store.append([Addition(hold, chunk)])
    await store.finish(hold, CHUNKS[-1], None, Usage(0, 0))
    return store


async def readable(store: EncryptedRecords, key: RecordKey = KEY) -> bool:
    """Read the log chunk by chunk and at once: both find it whole, or neither does."""
    with capture_logs() as logs:
        tail = await store.read(key, 0, watch=False)
        parts = [await store.read(key, number, watch=False) for number in range(len(CHUNKS))]
    whole = (tail.state, tail.chunks) == (RecordState.ENDED, CHUNKS)
    expired = RecordState.EXPIRED in [part.state for part in parts]
    assert whole != expired
    if not whole:
        assert (tail.state, tail.chunks) == (RecordState.EXPIRED, ())
        assert logs[0]["log_level"] == "error"
        assert not any(chunk.decode() in repr(logs) for chunk in CHUNKS)
    return whole


async def test_what_was_written_is_read_and_nothing_of_it_is_stored() -> None:
    shelf = Shelf()
    assert await readable(await ended(shelf))
    stored = (await shelf.read(KEY, 0, watch=False)).chunks
    assert [len(each) for each in stored] == [len(chunk) + OVERHEAD_BYTES for chunk in CHUNKS]
    assert not any(chunk in each for chunk in CHUNKS for each in stored)


async def test_equal_chunks_are_stored_differently() -> None:
    sealing = record_cipher()
    sealed = {sealing.seal(await sealing.sealing(KEY), KEY, 1, 0, b"same") for _ in range(100)}
    assert len(sealed) == 100


async def test_a_flipped_bit_anywhere_makes_the_record_expired() -> None:
    shelf = Shelf()
    store = await ended(shelf)
    for number in range(len(CHUNKS)):
        for at in range(len(CHUNKS[number]) + OVERHEAD_BYTES):

            def flip(chunks: tuple[bytes, ...], number: int = number, at: int = at) -> Sequence[bytes]:
                changed = bytearray(chunks[number])
                changed[at] ^= 1 << at % 8
                return [*chunks[:number], bytes(changed), *chunks[number + 1 :]]

            shelf.change = flip
            assert not await readable(store), (number, at)


@pytest.mark.parametrize(
    "order", [(1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 1, 2), (0, 1, 3), (1, 2, 3), (0, 0, 2, 3), (3, 2, 1, 0)]
)
async def test_chunks_in_another_order_or_with_a_gap_are_not_read(order: Sequence[int]) -> None:
    shelf = Shelf()
    store = await ended(shelf)
    shelf.change = lambda chunks: [chunks[number] for number in order]
    tail = await store.read(KEY, 0, watch=False)
    if order == (0, 1, 1, 2):  # a repeated write: what follows it is whole
        assert tail.chunks == (b"terms", b"tokens", b"tokens", b"text")
    else:
        assert tail.state is RecordState.EXPIRED


async def test_a_reader_of_parts_finds_that_they_do_not_follow_each_other() -> None:
    shelf = Shelf()
    store = await ended(shelf)
    shelf.most = 2
    shelf.change = lambda chunks: [chunks[0], chunks[1], chunks[3]]
    assert (await store.read(KEY, 0, watch=False)).chunks == CHUNKS[:2]
    assert (await store.read(KEY, 2, watch=False)).state is RecordState.EXPIRED


@pytest.mark.parametrize("other", [RecordKey("acme", "cd" * 16), RecordKey("acme-b", KEY.digest)])
async def test_a_chunk_of_another_record_or_tenant_is_not_read(other: RecordKey) -> None:
    shelf, keys = Shelf(), tenant_keys()
    store = await ended(shelf, keys=keys)
    await ended(shelf, other, keys)
    foreign = (await shelf.read(other, 0, watch=False)).chunks
    shelf.change = lambda chunks: [chunks[0], foreign[1], *chunks[2:]]
    assert not await readable(store)
    shelf.change = lambda _: foreign
    assert not await readable(store)


async def test_a_chunk_of_an_earlier_run_of_the_record_is_not_read() -> None:
    shelf = Shelf()
    store = EncryptedRecords(shelf, record_cipher())
    hold = await claimed(store)
    await store.append([Addition(hold, b"0")])
    await store.append([Addition(hold, b"1")])
    before = (await shelf.read(KEY, 0, watch=False)).chunks
    shelf.clock.now_s += RecordLimits().lease_s
    hold = await claimed(store)
    await store.append([Addition(hold, b"2")])
    await store.append([Addition(hold, b"3")])
    assert (await store.read(KEY, 0, watch=False)).chunks == (b"0", b"1", b"2", b"3")
    assert (await store.read(KEY, 2, watch=False)).chunks == (b"2", b"3")
    shelf.change = lambda chunks: [chunks[0], *chunks[2:]]  # the earlier run's last chunk is missing
    assert (await store.read(KEY, 0, watch=False)).state is RecordState.EXPIRED
    shelf.change = lambda chunks: [*chunks[:3], before[1]]
    assert (await store.read(KEY, 0, watch=False)).state is RecordState.EXPIRED


async def test_a_write_whose_answer_was_lost_is_repeated() -> None:
    shelf = Shelf()
    store = EncryptedRecords(shelf, record_cipher())
    hold = await claimed(store)
    await store.append([Addition(hold, b"0")])
    for chunk in (b"1", b"1 2"):
        shelf.lost_answers = 1
        with pytest.raises(StoreUnavailable):
            await store.append([Addition(hold, chunk)])
    await store.append([Addition(hold, b"1 2 3"), Addition(hold, b"4")])
    await store.finish(hold, b"end", None, Usage(0, 0))
    expected = (b"0", b"1", b"1 2", b"1 2 3", b"4", b"end")
    assert (await store.read(KEY, 0, watch=False)).chunks == expected


async def test_what_the_installations_secret_sealed_still_opens() -> None:
    for secrets in (("o" * 32,), ("n" * 32, "o" * 32)):
        cipher = record_cipher(*secrets)
        opened = cipher.open(await cipher.opening(KEY, DERIVED), KEY, DERIVED)
        assert (opened.epoch, opened.position, opened.chunk) == (3, 2, b"written before")
    cipher = record_cipher("n" * 32)
    with pytest.raises(IntegrityError, match="no record key has the id"):
        await cipher.opening(KEY, DERIVED)


async def test_chunks_in_clear_are_not_read() -> None:
    for stored in (b"", b"\x91\xa1", b"\x93" * 200):
        with pytest.raises(IntegrityError):
            await record_cipher().opening(KEY, stored)


async def test_positions_last_as_long_as_their_holds() -> None:
    store = EncryptedRecords(Shelf(), record_cipher())
    holds = [await claimed(store, RecordKey("acme", str(number))) for number in range(10)]
    await store.append([Addition(hold, b"1") for hold in holds])
    assert len(store._next) == 10
    holds.clear()
    assert len(store._next) == 0


async def test_no_flipped_bit_and_no_cut_of_a_chunk_is_read_as_content() -> None:
    """Idempotency records, stored responses and parts of batch files are sealed by this."""
    rng, cipher = Random(7), record_cipher()
    sealed = cipher.seal(await cipher.sealing(KEY), KEY, 3, 2, b"the content of a chunk" * 20)
    for number in range(400):
        copy = bytearray(sealed)
        if number < 300:
            copy[rng.randrange(len(copy))] ^= 1 << rng.randrange(8)
        else:
            del copy[rng.randrange(len(copy)) :]
        with pytest.raises(IntegrityError):
            cipher.open(await cipher.opening(KEY, bytes(copy)), KEY, bytes(copy))
