"""The outbox on a real disk: what was synced is delivered, over crashes, refusals and lost answers."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from fairway.v1 import usage_pb2 as pb
from services.adapters.frames import framed, read_frames
from services.adapters.usage.outbox import MAX_BYTES, MAX_REFUSED_FILES, DiskOutbox
from services.core.errors import FairwayError, InternalError, InvalidInput, NoLeader, OverQuota
from services.rpc.channel import MAX_MESSAGE_BYTES
from services.rpc.convert.usage import event_to_proto
from services.runtime.clock import SystemClock
from tests.support.tiny_disk import tiny_disk
from tests.support.usage_ledgers import request_usage
from tests.support.waiting import until
from tests.tidy.sources import ROOT


class Reports:
    """A ledger in memory. ``down``: it answers nothing. ``lose_answers``: it stores, and does not answer.
    ``lost``: events that it counts as lost."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.stored: list[str] = []
        self.calls: list[tuple[str, int, int, int]] = []
        self.down = False
        self.lose_answers = 0
        self.lost = 0

    async def report(
        self, source: str, first: int, events: Sequence[pb.UsageEvent], lost_until: int, apart: int
    ) -> int:
        self.calls.append((source, first, len(events), lost_until))
        await asyncio.sleep(0)
        if self.down:
            raise NoLeader("nobody leads")
        before = self.last.get(source, 0)
        last = max(before, min(lost_until, first - 1))
        self.lost += max(0, last - before - apart)
        if first <= last + 1:
            self.stored += [event.request.request_id for event in events[last + 1 - first :]]
            last = max(last, first + len(events) - 1)
        self.last[source] = last
        if self.lose_answers:
            self.lose_answers -= 1
            raise NoLeader("the answer was lost")
        return last


def outbox_of(
    folder: Path, reports: Reports, source: str = "life-1", max_bytes: int = MAX_BYTES
) -> DiskOutbox:
    return DiskOutbox(folder / "usage", source, reports, SystemClock(), max_bytes=max_bytes)


def add(outbox: DiskOutbox, *names: str) -> None:
    for name in names:
        outbox.add(request_usage(name))


def files(folder: Path) -> list[Path]:
    return sorted((folder / "usage").glob("*.events"))


async def test_events_are_delivered_in_order_and_trimmed(tmp_path: Path) -> None:
    reports = Reports()
    outbox = outbox_of(tmp_path, reports)
    await outbox.recover()
    running = asyncio.ensure_future(outbox.run())
    add(outbox, "a", "b")
    async with asyncio.timeout(10):
        while reports.stored != ["a", "b"]:
            await asyncio.sleep(0.01)
        add(outbox, "c")
        while reports.stored != ["a", "b", "c"] or files(tmp_path):
            await asyncio.sleep(0.01)
    running.cancel()  # perhaps between the deletion of the file and its note
    with suppress(asyncio.CancelledError):
        await running
    assert await outbox.send()
    assert outbox.size_bytes == 0
    assert outbox.problem == ""
    await outbox.close()


async def test_a_send_that_is_cancelled_while_it_deletes_a_file_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports()
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a")
    await outbox.sync()
    deleted, go_on = threading.Event(), threading.Event()
    unlink = Path.unlink

    def slow_unlink(path: Path, *, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        deleted.set()
        go_on.wait(10.0)

    monkeypatch.setattr(Path, "unlink", slow_unlink)
    sending = asyncio.ensure_future(outbox.send())
    assert await asyncio.to_thread(deleted.wait, 10.0)
    sending.cancel()
    go_on.set()
    with suppress(asyncio.CancelledError):
        await sending
    monkeypatch.undo()
    add(outbox, "b")
    await outbox.sync()
    assert await outbox.send()
    assert reports.stored == ["a", "b"]
    assert outbox.size_bytes == 0
    await outbox.close()


async def test_nothing_is_trimmed_before_it_is_acknowledged(tmp_path: Path) -> None:
    reports = Reports()
    reports.lose_answers = 1
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a", "b")
    await outbox.sync()
    assert not await outbox.send()
    assert len(files(tmp_path)) == 1
    add(outbox, "c")
    await outbox.sync()
    assert await outbox.send()
    assert reports.stored == ["a", "b", "c"]
    assert files(tmp_path) == []
    await outbox.close()


async def test_an_event_that_is_added_while_its_file_is_sent_is_not_deleted_with_it(tmp_path: Path) -> None:
    reports = Reports()
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a")
    await outbox.sync()
    sending = asyncio.ensure_future(outbox.send())
    for number in range(50):
        add(outbox, f"b{number}")
        await outbox.sync()
        await asyncio.sleep(0)
    await sending
    while not await outbox.send():
        pass
    assert reports.stored == ["a", *(f"b{number}" for number in range(50))]
    await outbox.close()


async def test_a_later_life_delivers_what_an_earlier_one_left_under_its_source(tmp_path: Path) -> None:
    reports = Reports()
    reports.down = True
    first = outbox_of(tmp_path, reports)
    await first.recover()
    add(first, "a", "b")
    await first.close()
    reports.down = False
    second = outbox_of(tmp_path, reports, "life-2")
    await second.recover()
    assert second.size_bytes > 0
    add(second, "c")
    await second.sync()
    assert await second.send()
    assert reports.stored == ["a", "b", "c"]
    assert reports.last == {"life-1": 2, "life-2": 1}
    await second.close()


async def test_a_cancelled_write_is_not_repeated(tmp_path: Path) -> None:
    reports = Reports()
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a")
    writing = asyncio.ensure_future(outbox.sync())
    await asyncio.sleep(0)
    writing.cancel()
    await outbox.close()
    assert reports.stored == ["a"]


async def test_one_process_owns_the_folder(tmp_path: Path) -> None:
    first, second = outbox_of(tmp_path, Reports()), outbox_of(tmp_path, Reports())
    await first.recover()
    with pytest.raises(BlockingIOError):
        await second.recover()
    await first.close()


async def test_a_torn_end_is_skipped_and_the_gap_is_reported_as_lost(tmp_path: Path) -> None:
    reports = Reports()
    reports.down = True
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a", "b")
    await outbox.close()
    second = outbox_of(tmp_path, reports, "life-1")
    second._next = 3  # the same source goes on in another file, as after a file became full
    add(second, "c")
    await second.sync()
    await second.close()
    (torn, _) = files(tmp_path)
    torn.write_bytes(torn.read_bytes()[:-5])
    reports.down = False
    third = outbox_of(tmp_path, reports, "life-2")
    await third.recover()
    assert await third.send()
    assert reports.stored == ["a", "c"]
    assert reports.calls[-1] == ("life-1", 3, 1, 2)
    await third.close()


async def test_a_full_outbox_counts_what_it_drops_and_says_so(tmp_path: Path) -> None:
    reports = Reports()
    outbox = outbox_of(tmp_path, reports, max_bytes=500)
    add(outbox, *(f"r{number}" for number in range(100)))
    assert "wait for the ledger" in outbox.problem
    assert 0 < outbox.lost < 100
    assert outbox.size_bytes < 500
    await outbox.sync()
    assert await outbox.send()
    assert outbox.problem == ""
    assert len(reports.stored) == 100 - outbox.lost
    await outbox.close()


async def test_a_full_outbox_has_room_for_the_requests_with_budgets_that_run(tmp_path: Path) -> None:
    reports = Reports()
    outbox = outbox_of(tmp_path, reports, max_bytes=40_000)
    while not outbox.problem:
        add(outbox, "open")
    assert outbox.lost == 0
    admitted_bytes = outbox.size_bytes
    add(outbox, "open")
    assert outbox.lost == 1
    for number in range(50):
        outbox.add(replace(request_usage(f"budgeted-{number}"), budgeted=True))
    assert outbox.lost == 1
    assert outbox.size_bytes > admitted_bytes
    await outbox.close()
    assert [name for name in reports.stored if name != "open"] == [f"budgeted-{n}" for n in range(50)]


async def test_a_full_disk_keeps_events_in_memory(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "usage", 64 * 1024):
        reports = Reports()
        outbox = outbox_of(tmp_path, reports)
        names = [f"r{number}" for number in range(2000)]
        add(outbox, *names)
        await outbox.sync()
        assert "disk" in outbox.problem
    await outbox.sync()
    assert outbox.problem == ""
    assert await outbox.send()
    assert reports.stored == names
    await outbox.close()


_CHILD = """
import asyncio, sys
from pathlib import Path
from services.adapters.usage.outbox import MAX_BYTES, DiskOutbox
from services.core.errors import NoLeader
from services.runtime.clock import SystemClock
from tests.support.usage_ledgers import request_usage
class Nobody:
    async def report(self, *args):
        raise NoLeader("nobody leads")
async def main():
    outbox = DiskOutbox(Path(sys.argv[1]), "life-1", Nobody(), SystemClock())
    await outbox.recover()
    task = asyncio.ensure_future(outbox.run())
    for number in range(10**6):
        outbox.add(request_usage(f"r{number}"))
        if number % 20 == 0:
            await asyncio.sleep(0.001)
asyncio.run(main())
"""


async def test_what_was_synced_survives_sigkill(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _CHILD, str(folder), cwd=ROOT)
    try:
        await until(lambda: sum(path.stat().st_size for path in files(tmp_path)) >= 200_000, timeout_s=60)
    finally:
        child.kill()
        await child.wait()
    reports = Reports()
    outbox = outbox_of(tmp_path, reports, "life-2")
    await outbox.recover()
    assert await outbox.send()
    assert len(reports.stored) > 1000
    assert reports.stored == [f"r{number}" for number in range(len(reports.stored))]
    await outbox.close()


class Bounded(Reports):
    """A ledger with the receiver's limit of bytes, and events that it refuses, by request id."""

    def __init__(self, *refused: str, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__()
        self.refused = set(refused)
        self.error: FairwayError = InvalidInput("events[0] is refused", field="events")
        self._max_bytes = max_bytes
        self.broken = False

    async def report(
        self, source: str, first: int, events: Sequence[pb.UsageEvent], lost_until: int, apart: int
    ) -> int:
        size_bytes = sum(event.ByteSize() for event in events)
        if size_bytes > self._max_bytes:
            self.calls.append((source, first, len(events), lost_until))
            raise OverQuota(f"the request is larger than {self._max_bytes} bytes")
        if self.broken or self.refused & {event.request.request_id for event in events}:
            raise self.error
        return await super().report(source, first, events, lost_until, apart)


async def test_a_file_above_the_receivers_limit_is_delivered_in_parts(tmp_path: Path) -> None:
    reports = Bounded()
    outbox = outbox_of(tmp_path, reports)
    labels = {f"{number:02d}" + "n" * 126: "v" * 128 for number in range(32)}
    names = [f"r{number}" for number in range(2000)]
    for name in names:
        outbox.add(replace(request_usage(name), labels=labels))
    await outbox.sync()
    assert files(tmp_path)[0].stat().st_size > MAX_MESSAGE_BYTES
    assert await outbox.send()
    assert reports.stored == names
    assert all(count < 600 for _, _, count, _ in reports.calls), "none was refused for its size"
    assert files(tmp_path) == []
    assert outbox.notice == ""
    await outbox.close()


@pytest.mark.parametrize("seed", range(6))
async def test_refused_events_are_set_apart_and_the_rest_is_delivered(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = [f"r{number}" for number in range(rng.randint(1, 300))]
    refused = rng.sample(names, rng.randint(1, min(len(names), 12)))
    reports = Bounded(*refused, max_bytes=rng.choice((200, 5_000, 10**6)))
    outbox = outbox_of(tmp_path, reports)
    await outbox.recover()
    for start in range(0, len(names), 100):
        add(outbox, *names[start : start + 100])
        await outbox.sync()
        assert await outbox.send()
    assert reports.stored == [name for name in names if name not in refused]
    assert files(tmp_path) == []
    assert f"{len(refused)} refused" in outbox.notice
    assert outbox.problem == ""
    assert (outbox.lost, reports.lost) == (0, 0)
    await outbox.close()

    again = outbox_of(tmp_path, reports, "life-2")  # the next life sends them again, and again in vain
    await again.recover()
    assert again.notice == ""
    assert await again.send()
    assert f"{len(refused)} refused" in again.notice
    await again.close()

    reports.refused.clear()
    mended = outbox_of(tmp_path, reports, "life-3")
    await mended.recover()
    assert await mended.send()
    assert sorted(reports.stored) == sorted(names)
    assert mended.notice == ""
    assert mended.size_bytes == 0
    assert reports.lost == 0
    await mended.close()


async def test_an_error_of_the_ledger_itself_is_retried_before_it_counts_as_a_refusal(tmp_path: Path) -> None:
    reports = Bounded("b")
    reports.error = InternalError("a bug")
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a", "b", "c")
    await outbox.sync()
    assert [await outbox.send() for _ in range(5)] == [False, False, False, False, True]
    assert reports.stored == ["a", "c"]
    assert "1 refused" in outbox.notice
    assert (outbox.lost, reports.lost) == (0, 0)
    await outbox.close()


@pytest.mark.parametrize("seed", range(8))
async def test_only_events_that_the_ledger_fails_at_stay_apart(tmp_path: Path, seed: int) -> None:
    """Also several in a row, at the end of a file, and over an outage of another kind."""
    rng = random.Random(seed)
    names = [f"r{number}" for number in range(rng.choice((1, 2, 9, 300)))]
    start = rng.randrange(len(names))
    refused = names[start : start + rng.randint(1, 7)] if seed else names[-1:]
    reports = Bounded(*refused)
    reports.error = InternalError("a bug")
    outbox = outbox_of(tmp_path, reports)
    add(outbox, *names)
    await outbox.sync()
    for number in range(60):
        await outbox.send()
        if number == 7:
            reports.down = True
            await outbox.send()
            reports.down = False
    assert set(reports.stored) == set(names) - set(refused)
    for number in range(20):  # those behind others show that the ledger takes events
        add(outbox, f"later-{number}")
        await outbox.sync()
        await outbox.send()
    assert await outbox.send()
    assert f"{len(refused)} refused" in outbox.notice
    assert sorted(reports.stored) == sorted({*names, *(f"later-{n}" for n in range(20))} - set(refused))
    assert (outbox.lost, reports.lost, outbox.size_bytes) == (0, 0, 0)
    await outbox.close()


async def test_another_failure_after_internal_errors_sets_nothing_apart(tmp_path: Path) -> None:
    reports = Bounded()
    reports.error, reports.broken = InternalError("a bug"), True
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a", "b")
    await outbox.sync()
    assert not any([await outbox.send() for _ in range(7)])
    reports.error = NoLeader("nobody leads")
    with capture_logs() as logs:
        assert not any([await outbox.send() for _ in range(7)])
    assert {log["event"] for log in logs} == {"usage.not_sent"}
    reports.broken = False
    assert await outbox.send()
    assert sorted(reports.stored) == ["a", "b"]
    await outbox.close()


async def test_refused_events_above_the_bound_are_counted_as_lost(tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(MAX_REFUSED_FILES + 10)]
    reports = Bounded(*names)
    outbox = outbox_of(tmp_path, reports)
    add(outbox, *names)
    await outbox.sync()
    assert await outbox.send()
    assert (outbox.lost, reports.lost) == (10, 0)
    assert len(list((tmp_path / "usage" / "refused").iterdir())) == MAX_REFUSED_FILES
    await outbox.close()


async def test_a_ledger_that_fails_at_everything_loses_nothing(tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(MAX_REFUSED_FILES + 10)]
    reports = Bounded(*names)
    reports.error = InternalError("a bug")
    outbox = outbox_of(tmp_path, reports)
    add(outbox, *names)
    await outbox.sync()
    for _ in range(20):
        assert not await outbox.send()
        assert outbox.notice == "", "nothing is set apart"
    assert outbox.lost == 0
    reports.refused.clear()
    assert await outbox.send()
    await outbox.close()
    again = outbox_of(tmp_path, reports, "life-2")
    await again.recover()
    assert await again.send()
    assert set(reports.stored) == set(names)
    await again.close()


@pytest.mark.parametrize("seed", range(40))
async def test_a_damaged_file_loses_at_most_the_event_with_the_damage(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    reports = Reports()
    reports.down = True
    outbox = outbox_of(tmp_path, reports)
    names = [f"r{number}" for number in range(20)]
    add(outbox, *names)
    await outbox.close()
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    reports.down = False
    later = outbox_of(tmp_path, reports, "life-2")
    await later.recover()
    assert await later.send()
    assert [name for name in names if name in reports.stored] == reports.stored
    assert len(reports.stored) in (len(names) - 1, len(names))  # the last one's size is not needed
    assert reports.lost + later.lost == len(names) - len(reports.stored)
    assert "damaged files are set apart" in later.notice
    assert later.size_bytes == 0
    await later.close()


@pytest.mark.parametrize("has_numbers", [True, False])
@pytest.mark.parametrize("place", range(4))
async def test_events_behind_damage_keep_their_numbers(tmp_path: Path, has_numbers: bool, place: int) -> None:
    """``has_numbers``: not in files of earlier versions."""
    reports = Reports()
    reports.lose_answers = 1
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a", "b", "c", "d")
    await outbox.close()  # the ledger has them, and the outbox does not receive that
    (path,) = files(tmp_path)
    found = read_frames(path.read_bytes())
    contents = [pb.UsageEvent.FromString(content) for content in found.contents]
    assert [event.number for event in contents] == [1, 2, 3, 4]
    extra = event_to_proto(request_usage("e"))
    extra.number = 5
    contents.append(extra)
    if not has_numbers:
        for event in contents:
            event.ClearField("number")
    frames = [framed(event.SerializeToString()) for event in contents]
    frames[place] = frames[place][:-1] + bytes([frames[place][-1] ^ 1])
    path.write_bytes(b"".join(frames))
    later = outbox_of(tmp_path, reports, "life-2")
    await later.recover()
    assert await later.send()
    assert reports.stored == (["a", "b", "c", "d", "e"] if has_numbers else ["a", "b", "c", "d"])
    assert (reports.lost, later.lost) == (0, 0)
    await later.close()


async def test_a_file_whose_end_cannot_be_read_is_counted_as_lost(tmp_path: Path) -> None:
    reports = Reports()
    reports.down = True
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a", "b")
    await outbox.close()
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-9] + b"\0" * 200)
    reports.down = False
    later = outbox_of(tmp_path, reports, "life-2")
    await later.recover()
    assert await later.send()
    assert reports.stored == ["a"]
    assert (reports.lost, later.lost) == (0, 1)
    await later.close()


async def test_an_event_that_a_crash_left_apart_is_sent_once(tmp_path: Path) -> None:
    """It was set apart for a moment, and its file has it, too."""
    reports = Reports()
    reports.down = True
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a", "b", "c")
    await outbox.close()
    event = event_to_proto(request_usage("b"))
    folder = tmp_path / "usage" / "refused"
    folder.mkdir()
    (folder / "life-1-x2.000000000001.events").write_bytes(framed(event.SerializeToString()))
    reports.down = False
    later = outbox_of(tmp_path, reports, "life-2")
    await later.recover()
    assert await later.send()
    assert reports.stored == ["a", "c", "b"]
    assert (reports.lost, later.lost) == (0, 0)
    await later.close()


@pytest.mark.parametrize("bit", range(32))
async def test_a_flipped_size_of_the_last_event_costs_nothing(tmp_path: Path, bit: int) -> None:
    reports = Reports()
    reports.down = True
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a", "b")
    await outbox.close()
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[read_frames(bytes(data)).starts[-1] + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    reports.down = False
    later = outbox_of(tmp_path, reports, "life-2")
    await later.recover()
    assert await later.send()
    assert reports.stored == ["a", "b"]
    assert "damaged files are set apart" in later.notice
    await later.close()


async def test_a_file_that_is_gone_holds_up_nothing(tmp_path: Path) -> None:
    reports = Reports()
    reports.down = True
    outbox = outbox_of(tmp_path, reports)
    add(outbox, "a")
    await outbox.close()
    files(tmp_path)[0].unlink()
    reports.down = False
    add(outbox, "b")
    await outbox.sync()
    assert await outbox.send()
    assert reports.stored == ["b"]
    assert outbox.size_bytes == 0
    await outbox.close()
