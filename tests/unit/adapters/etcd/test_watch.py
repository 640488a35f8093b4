"""Which revision each kind of watch message lets a reader resume from."""

from __future__ import annotations

from typing import Any

import pytest
from aetcd import rpc

from services.adapters.etcd.watch import Batches, prefix_range
from services.core.errors import StoreUnavailable
from services.ports.store import Compacted, Entry, KeyChanged, KeyRemoved, WatchBatch

WATCH_ID = 7


def batches(*, ordered: bool) -> Batches:
    async def progress_in_order(member_id: int) -> bool:
        assert member_id == 42
        return ordered

    return Batches(WATCH_ID, 10, progress_in_order)


def message(revision: int, *events: Any, watch_id: int = WATCH_ID, fragment: bool = False) -> Any:
    header = rpc.ResponseHeader(revision=revision, member_id=42)
    return rpc.WatchResponse(header=header, watch_id=watch_id, events=events, fragment=fragment)


def put(revision: int) -> Any:
    return rpc.Event(kv=rpc.KeyValue(key=b"k", value=b"v", create_revision=revision, mod_revision=revision))


async def test_events_are_safe_up_to_the_last_of_them() -> None:
    removed = rpc.Event(type=1, kv=rpc.KeyValue(key=b"k", mod_revision=12))
    batch = await batches(ordered=True).add(message(99, put(11), removed))
    assert batch == WatchBatch(12, (KeyChanged(Entry("k", b"v", 11, 11)), KeyRemoved("k", 12)))


async def test_fragments_are_one_batch() -> None:
    reader = batches(ordered=True)
    assert await reader.add(message(99, put(11), fragment=True)) is None
    batch = await reader.add(message(99, put(11)))
    assert batch is not None
    assert (batch.revision, len(batch.events)) == (11, 2)


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_notice_of_the_watch_is_a_bookmark(ordered: bool) -> None:
    assert await batches(ordered=ordered).add(message(50)) == WatchBatch(50, ())


@pytest.mark.parametrize(("ordered", "revision"), [(True, 50), (False, 10)])
async def test_a_progress_answer_is_a_bookmark_only_where_it_is_ordered(ordered: bool, revision: int) -> None:
    """Before etcd 3.5.8 it can be ahead of events that are still queued: resuming from it would lose them."""
    assert await batches(ordered=ordered).add(message(50, watch_id=-1)) == WatchBatch(revision, ())


async def test_a_member_that_lags_confirms_nothing() -> None:
    assert await batches(ordered=True).add(message(9)) is None


async def test_a_cancelled_watch_says_why() -> None:
    with pytest.raises(Compacted):
        await batches(ordered=True).add(rpc.WatchResponse(canceled=True, compact_revision=20))
    with pytest.raises(StoreUnavailable, match="no leader"):
        await batches(ordered=True).add(rpc.WatchResponse(canceled=True, cancel_reason="no leader"))


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("/a/", (b"/a/", b"/a0")),
        ("", (b"\0", b"\0")),
        ("a\x7f", (b"a\x7f", b"a\x80")),
        ("ü", ("ü".encode(), b"\xc3\xbd")),
    ],
)
def test_a_prefix_becomes_a_range(prefix: str, expected: tuple[bytes, bytes]) -> None:
    assert prefix_range(prefix) == expected
