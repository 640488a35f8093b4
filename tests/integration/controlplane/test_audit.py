"""The audit log of a control plane: what is in it, who may not change it, and what ends its writing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from fairway.formats.tlog import LogDamaged, TreeHead, signed, verify_log
from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import registry_pb2 as rg
from services.adapters.ledger_stores import AUDIT, FolderLedger
from services.adapters.memory.store import MemoryStore
from services.controlplane.audit_log import AuditSequencer
from services.controlplane.audit_reads import AuditReader
from services.core.audit import MAX_ENTRY_BYTES, PENDING, Actor, AuditEntry
from services.core.errors import (
    AuditBacklog,
    EtagMismatch,
    InvalidInput,
    NotFound,
    PermissionDenied,
    StoreUnavailable,
    Unauthenticated,
)
from services.core.manifest import sha256_of
from services.core.records import TENANTS, VersionRecord, dump, version_key
from services.ports.store import Committed, ModRevisionIs, Put
from services.rpc.channel import auth_metadata
from services.runtime.audit import MAX_PENDING, MAX_UNSEQUENCED, AuditRecorder, deciding
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Versioned
from tests.support.audited_plane import (
    KEY,
    SECRET,
    SEEDS,
    TENANT_KEY,
    AuditedPlane,
    audited_plane,
    caught_up,
    exported,
    sequencer_of,
    verified,
    won,
)
from tests.support.election import StaticElection
from tests.support.memory_blobs import MemoryBlobs
from tests.support.memory_ledger import MemoryLedger
from tests.support.registry import served

CLOCK = SystemClock()


@pytest_asyncio.fixture
async def plane(tmp_path: Path) -> AsyncIterator[AuditedPlane]:
    async with audited_plane(MemoryStore(CLOCK, bookmark_s=0.2), MemoryLedger(), CLOCK, tmp_path) as found:
        yield found


def actions(entries: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(each["method"], each["resource"], each["outcome"]) for each in entries]


BEGIN = "AuditLog/AddKey"


async def test_each_change_is_in_the_log_once_with_its_caller(plane: AuditedPlane) -> None:
    await plane.tenant("acme", request_id="first")
    await plane.tenant("acme", request_id="first")  # the answer of the first, so no change
    key = pb.Key(metadata=pb.Metadata(name="k1"), role=pb.KEY_ROLE_TENANT, tenant="acme")
    secret = (await plane.call("CreateKey", pb.CreateKeyRequest(key=key))).secret
    await plane.call("RotateKey", pb.RotateKeyRequest(name="k1"))
    await plane.call("DeleteKey", pb.DeleteKeyRequest(name="k1"))
    await plane.sequence()
    found = await plane.entries()
    assert [each for each in actions(found) if each[0] != BEGIN] == [
        ("ControlPlaneService/CreateTenant", "acme", "OK"),
        ("ControlPlaneService/CreateKey", "k1", "OK"),
        ("ControlPlaneService/RotateKey", "k1", "OK"),
        ("ControlPlaneService/DeleteKey", "k1", "OK"),
    ]
    first = found[1]
    assert first["actor"] == {**first["actor"], "key": "root", "role": "admin", "address": "127.0.0.1"}
    assert (first["request_id"], first["source"], first["count"]) == ("first", "controlplane", 1)
    assert 0 < first["revision"] < found[2]["revision"] < found[3]["revision"]
    assert abs(first["unix_s"] - CLOCK.unix_s()) < 60
    everything = b"".join((await plane.objects()).values())
    for hidden in (SECRET, secret, secret.rpartition("_")[2]):
        assert hidden.encode() not in everything


async def test_a_read_of_the_log_is_in_the_store_before_it_is_answered(plane: AuditedPlane) -> None:
    await plane.call("ListAuditEvents", pb.ListAuditEventsRequest())
    await plane.objects()
    written = [entry.value for entry in (await plane.store.list(PENDING)).entries]
    assert len(written) == 2
    await plane.sequence()
    assert [each[0] for each in actions(await plane.entries())][1:] == [
        "ControlPlaneService/ListAuditEvents",
        "ControlPlaneService/ExportAuditLog",
    ]


async def test_refusals_are_recorded_and_counted(plane: AuditedPlane) -> None:
    await plane.tenant("acme")
    for _ in range(5):
        with pytest.raises(Unauthenticated):
            await plane.call("ListTenants", pb.ListTenantsRequest(), f"fw_root_{'x' * 20}")
    for _ in range(3):
        with pytest.raises(PermissionDenied):
            await plane.call("GetTenant", pb.GetTenantRequest(name="acme"), TENANT_KEY)
    with pytest.raises(EtagMismatch):
        await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="acme", etag="7"))
    with pytest.raises(InvalidInput):
        await plane.call("DeleteTenant", pb.DeleteTenantRequest(name="../../x"))
    with pytest.raises(NotFound):  # a refused read of a caller that may read
        await plane.call("GetTenant", pb.GetTenantRequest(name="other"))
    await plane.sequence()
    by_outcome = {each["outcome"]: each for each in await plane.entries()}
    assert by_outcome.keys() == {
        "OK",
        "UNAUTHENTICATED",
        "PERMISSION_DENIED",
        "ETAG_MISMATCH",
        "INVALID_INPUT",
    }
    failed, denied = by_outcome["UNAUTHENTICATED"], by_outcome["PERMISSION_DENIED"]
    assert (failed["count"], failed["actor"]["key"], failed["actor"]["role"]) == (5, "root", "")
    assert failed["actor"]["address"] == "127.0.0.1"
    assert (denied["count"], denied["actor"]["key"], denied["actor"]["tenant"]) == (3, "acme-prod", "acme")
    assert by_outcome["ETAG_MISMATCH"]["resource"] == "acme"
    assert by_outcome["INVALID_INPUT"]["resource"] == ""


async def test_a_flood_of_refusals_costs_few_entries_and_loses_no_count(plane: AuditedPlane) -> None:
    for number in range(5000):
        plane.recorder.add(AuditEntry("S/M", Actor(key=f"k{number}"), outcome="UNAUTHENTICATED"))
    assert plane.recorder.waiting == 5000
    for _ in range(MAX_UNSEQUENCED):
        await plane.recorder.flush()
    waiting = len((await plane.store.list(PENDING)).entries)
    assert waiting <= MAX_UNSEQUENCED
    while plane.recorder.waiting:
        await plane.sequence()
    await plane.sequence()
    found = await plane.entries()
    assert sum(each["count"] for each in found if each["outcome"] == "UNAUTHENTICATED") == 5000
    assert len(found) < 300


async def test_a_flush_whose_answer_was_lost_is_counted_once(tmp_path: Path) -> None:
    class Deaf(MemoryStore):
        deaf = False

        async def commit(self, *arguments: Any) -> Any:
            done = await super().commit(*arguments)
            if self.deaf:
                raise StoreUnavailable("the answer was lost")
            return done

    store = Deaf(CLOCK)
    recorder = AuditRecorder(store, CLOCK, source="gateway", process="src-1")
    recorder.add(AuditEntry("S/M", Actor(), outcome="UNAUTHENTICATED"))
    store.deaf = True
    with pytest.raises(StoreUnavailable):
        await recorder.flush()
    store.deaf = False
    recorder.add(AuditEntry("S/M", Actor(), outcome="UNAUTHENTICATED"))
    await recorder.flush()
    assert recorder.waiting == 1
    await recorder.flush()
    assert (recorder.waiting, len((await store.list(PENDING)).entries)) == (0, 2)


async def test_beyond_the_backlog_changes_are_refused_by_name_and_decisions_are_not(
    plane: AuditedPlane,
) -> None:
    entry = dump(AuditEntry("S/M", Actor()))
    for at in range(0, MAX_PENDING, 100):
        await plane.store.commit([Put(f"{PENDING}{n}", entry) for n in range(at, min(at + 100, MAX_PENDING))])
    await caught_up(plane.pending, plane.store)
    with pytest.raises(AuditBacklog, match="4096 entries wait"):
        await plane.tenant("acme")
    assert await plane.store.get(TENANTS + "acme") is None
    await plane.call("ListTenants", pb.ListTenantsRequest())
    with deciding("Rollouts/Aborted", "r"):
        assert isinstance(await plane.audited.commit([Put("/x", b"")]), Committed)
    await plane.sequence()
    await caught_up(plane.pending, plane.store)
    await plane.tenant("acme")


async def test_entries_are_listed_newest_first_by_filters_and_in_pages(plane: AuditedPlane) -> None:
    for number in range(300):
        with deciding("Rollouts/Running", f"r{number}"):
            await plane.audited.commit([])
    await plane.tenant("acme")
    await plane.sequence()
    request = pb.ListAuditEventsRequest
    newest = (await plane.call("ListAuditEvents", request(page_size=2))).events
    assert [each.index for each in newest] == [301, 300]
    assert (newest[0].actor, newest[0].action, newest[0].resource) == (
        "root",
        "ControlPlaneService/CreateTenant",
        "acme",
    )
    found, token = [], ""
    while True:
        answer = await plane.call("ListAuditEvents", request(page_size=70, page_token=token))
        found += [each.index for each in answer.events]
        token = answer.next_page_token
        if not token:
            break
    assert found == list(range(301, -1, -1))
    for wanted, count in (
        (request(action="CreateTenant"), 1),
        (request(action="ControlPlaneService/CreateTenant"), 1),
        (request(actor="root", page_size=9), 1),
        (request(resource="r7"), 1),
        (request(resource="nothing"), 0),
    ):
        assert len((await plane.call("ListAuditEvents", wanted)).events) == count
    late = request()
    late.start_time.FromSeconds(int(CLOCK.unix_s()) + 7200)
    assert (await plane.call("ListAuditEvents", late)) == pb.ListAuditEventsResponse()
    with pytest.raises(InvalidInput, match="page_token"):
        await plane.call("ListAuditEvents", request(page_token="x"))


async def test_without_its_key_the_log_waits_and_names_why(plane: AuditedPlane) -> None:
    key = plane.folder / "audit_key"
    key.rename(plane.folder / "lost")
    await plane.tenant("acme")
    await plane.sequence()
    assert "cannot read the secret" in plane.sequencer.problem()
    key.write_text("zz" * 32)
    await plane.sequence()
    assert "64 hex digits" in plane.sequencer.problem()
    (plane.folder / "lost").rename(key)
    await plane.sequence()
    assert plane.sequencer.problem() == ""
    assert actions(await plane.entries())[1][1] == "acme"


async def test_a_key_is_rotated_while_the_old_one_signs_too(plane: AuditedPlane) -> None:
    key = plane.folder / "audit_key"
    await plane.tenant("one")
    await plane.sequence()
    old = (await plane.objects())["verifier"].decode().split()
    key.write_text("\n".join(reversed(SEEDS)))
    await plane.tenant("two")
    await plane.sequence()
    both = (await plane.objects())["verifier"].decode().split()
    assert len(both) == 2
    assert both[1:] == old
    objects = await plane.objects()
    for verifier in both:
        assert [*verify_log(objects.get, [verifier])]
    added = [each["resource"] for each in (await plane.entries()) if each["method"] == BEGIN]
    assert added == [*old, both[0]]
    key.write_text(SEEDS[1])
    await plane.tenant("three")
    await plane.sequence()
    objects = await plane.objects()
    assert [*verify_log(objects.get, both[:1])]
    with pytest.raises(LogDamaged, match="no valid signature"):
        next(verify_log(objects.get, old))


async def test_a_log_whose_end_was_changed_is_not_extended(plane: AuditedPlane) -> None:
    await plane.tenant("one")
    await plane.sequence()
    tiles = plane.tiles
    assert isinstance(tiles, MemoryLedger)
    tile = tiles.objects["tile/0/000.p/2"]
    tiles.objects["tile/0/000.p/2"] = tile[:-1] + bytes([tile[-1] ^ 1])
    plane.election.turn(await won(plane.store))
    other = sequencer_of(plane.store, tiles, plane.pending, CLOCK, plane.folder, leadership=plane.election)
    assert plane.election.epoch is not None
    await other.step(plane.election.epoch)
    assert "do not have the hashes of its tile" in other.problem()
    del tiles.objects["tile/0/000.p/2"]
    await other.step(plane.election.epoch)
    assert "has no tile/0/000.p/2" in other.problem()
    tiles.objects["tile/0/000.p/2"] = tile
    await other.step(plane.election.epoch)
    assert other.problem() == ""


async def test_a_store_restored_from_a_backup_continues_the_published_log(
    plane: AuditedPlane, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        await plane.tenant(name)
        await plane.sequence()
    before = await plane.entries()
    (tmp_path / "again").mkdir()
    (plane.folder / "audit_key").rename(tmp_path / "again" / "audit_key")
    (plane.folder / "checkpoints").rename(tmp_path / "again" / "checkpoints")
    store = MemoryStore(CLOCK, bookmark_s=0.2)  # as if etcd had lost everything
    async with audited_plane(store, plane.tiles, CLOCK, tmp_path / "again") as second:
        await second.tenant("three")
        await second.sequence()
        assert second.sequencer.problem() == ""
        after = await second.entries()
    assert after[:3] == before[:3]
    assert "three" in [each["resource"] for each in after]


async def test_a_forged_checkpoint_is_not_continued(plane: AuditedPlane) -> None:
    forged = TreeHead("fairway.audit/x", 99, b"\1" * 32)
    await plane.tiles.replace("checkpoint", signed(forged, [b"\7" * 32]).encode())
    await plane.tenant("one")
    await plane.sequence()
    assert "no valid signature" in plane.sequencer.problem()


class HeldLedger(MemoryLedger):
    """Another process's connection to the same objects, which stops at its next creation until released."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.objects = objects
        self.reached, self.released = asyncio.Event(), asyncio.Event()

    async def create(self, name: str, data: bytes) -> bool:
        self.reached.set()
        await self.released.wait()
        return await super().create(name, data)


async def test_a_leader_that_was_frozen_while_it_wrote_changes_nothing(plane: AuditedPlane) -> None:
    await plane.tenant("zero")
    await plane.sequence()
    old_epoch = plane.election.epoch
    assert isinstance(plane.tiles, MemoryLedger)
    assert old_epoch is not None
    held = HeldLedger(plane.tiles.objects)
    frozen = sequencer_of(
        plane.store, held, plane.pending, CLOCK, plane.folder, leadership=StaticElection(old_epoch)
    )
    await plane.tenant("one")
    await caught_up(plane.pending, plane.store)
    writing = asyncio.create_task(frozen.step(old_epoch))
    await held.reached.wait()  # it fixed the batch and creates the first tile of it

    leader = await plane.store.get(KEY)
    assert leader is not None
    await plane.store.revoke_lease(leader.lease_id)
    plane.election.turn(await won(plane.store))
    for number in range(300):  # beyond the end of the tile
        with deciding("S/M", f"r{number}"):
            await plane.audited.commit([])
    await plane.sequence()
    before = await plane.entries()
    published = plane.tiles.objects["checkpoint"]

    held.released.set()
    await writing
    assert "changed" in frozen.problem()
    assert plane.tiles.objects["checkpoint"] == published
    await plane.sequence()
    after = await plane.entries()
    assert after[: len(before)] == before
    assert [each["resource"] for each in after if each["resource"]][1:] == [
        "zero",
        "one",
        *(f"r{number}" for number in range(300)),
    ]


async def test_a_deposed_leader_cannot_take_entries(plane: AuditedPlane) -> None:
    old_epoch = await won(plane.store)
    leader = await plane.store.get(KEY)
    assert leader is not None
    await plane.store.revoke_lease(leader.lease_id)
    await plane.tenant("one")
    await caught_up(plane.pending, plane.store)
    await plane.sequencer.step(old_epoch)
    assert len((await plane.store.list(PENDING)).entries) == 1


async def test_fields_are_cut_and_an_entry_is_bounded() -> None:
    long = '\x00é"\\\n' * 2000
    actor = Actor(long, long, long, long, long, long)
    entry = AuditEntry(long, actor, long, 1e9, long, long, long, 2**31, 2**62).bounded()
    assert len(dump(entry)) <= MAX_ENTRY_BYTES
    assert "\n" not in entry.resource
    assert "\x00" not in entry.actor.key


async def _steps_until_done(plane: AuditedPlane) -> None:
    for _ in range(20):
        await plane.sequence()
        if not plane.sequencer.problem() and not (await plane.store.list(PENDING)).entries:
            return
    raise AssertionError(plane.sequencer.problem())


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_failure_at_any_write_of_a_tile_loses_doubles_and_forks_nothing(
    tmp_path: Path, when: str
) -> None:
    """The store fails once at each operation in turn, before or after its effect."""
    failed = 0
    for number in range(1, 200):
        (folder := tmp_path / f"{number}").mkdir()
        tiles, left = MemoryLedger(), number

        def fail(operation: str, name: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise StoreUnavailable(f"{operation} {name}")

        setattr(tiles, when, fail)
        async with audited_plane(MemoryStore(CLOCK, bookmark_s=0.2), tiles, CLOCK, folder) as plane:
            for round_ in range(2):
                for each in range(130):  # the batches pass the end of a tile
                    with deciding("S/M", f"{round_}-{each}"):
                        await plane.audited.commit([])
                await _steps_until_done(plane)
            names = [each["resource"] for each in await plane.entries()][1:]
        assert names == [f"{round_}-{each}" for round_ in range(2) for each in range(130)]
        if left > 0:
            break
        failed += 1
    assert failed >= 12, "the operations were not enumerated"


async def test_a_folder_holds_the_log_as_any_static_server_serves_it(tmp_path: Path) -> None:
    tiles = FolderLedger(tmp_path / "tiles", AUDIT)
    async with audited_plane(MemoryStore(CLOCK, bookmark_s=0.2), tiles, CLOCK, tmp_path) as plane:
        for number in range(3):
            await plane.tenant(f"t{number}")
            await plane.sequence()
        objects = await plane.objects()

    def read(name: str) -> bytes | None:
        path = tmp_path / "tiles" / name
        return path.read_bytes() if path.is_file() else None

    assert [entry for _, found in verify_log(read, objects["verifier"].decode().split()) for entry in found]
    assert {name for name in objects if name != "verifier"} == {
        "checkpoint",
        "tile/0/000.p/4",
        "tile/entries/000.p/4",
    }


async def test_entries_that_a_lagging_view_still_has_are_not_taken_twice(tmp_path: Path) -> None:
    store, tiles = MemoryStore(CLOCK), MemoryLedger()
    entry = AuditEntry("S/M", Actor(), "r")
    done = await store.commit([Put(PENDING + "a", dump(entry))])
    stale = {PENDING + "a": Versioned(entry, done.revision, done.revision)}
    epoch = await won(store)

    def sequencer() -> AuditSequencer:
        view = SimpleNamespace(view=stale)
        return sequencer_of(store, tiles, view, CLOCK, tmp_path, leadership=StaticElection(epoch))

    first = sequencer()
    for _ in range(2):
        await first.step(epoch)
        assert first.problem() == ""
    later = sequencer()  # of a process that just began to lead
    await later.step(epoch)
    assert "changed" in later.problem()
    found = [each["resource"] for each in verified(await exported(AuditReader(store, tiles)))]
    assert found[1:] == ["r"]


async def test_a_call_has_one_entry_however_often_it_commits(plane: AuditedPlane) -> None:
    with deciding("S/M", "r"):
        failed = await plane.audited.commit([Put("/x", b"")], [ModRevisionIs("/x", 7)])
        assert not isinstance(failed, Committed)
        for _ in range(3):
            await plane.audited.commit([Put("/x", b"")])
    await plane.audited.commit([Put("/x", b"")])
    assert len((await plane.store.list(PENDING)).entries) == 1


async def test_changes_of_the_registry_are_in_the_log(plane: AuditedPlane) -> None:
    digest = sha256_of(b"1")
    await plane.store.commit([Put(version_key("m", digest), dump(VersionRecord("m", digest, 1, 0.0)))])
    async with served(plane.audited, MemoryBlobs(), CLOCK) as registry:
        request = rg.SetTagRequest(model="m", tag="prod", digest=digest)
        await registry.stub.SetTag(request, metadata=auth_metadata("admin"))
        gone = rg.DeleteTagRequest(model="m", tag="prod", request_id="id")
        await registry.stub.DeleteTag(gone, metadata=auth_metadata("admin"))
    await plane.sequence()
    assert [each[:2] for each in actions(await plane.entries())][1:] == [
        ("RegistryService/SetTag", f"m/prod/{digest}"),
        ("RegistryService/DeleteTag", "m/prod"),
    ]
