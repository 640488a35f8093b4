"""A control plane whose changes are audited: real service, server, recorder and sequencer on any stores."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import grpc

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.adapters.etcd.store import EtcdStore
from services.adapters.grpc.leader_calls import GrpcQueues
from services.adapters.ledger_stores import AUDIT, FolderLedger
from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.controlplane.audit_log import AuditSequencer
from services.controlplane.audit_reads import AuditReader
from services.controlplane.resources.accounts import Sealer
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.core.audit import PENDING, AuditEntry
from services.core.errors import Unauthenticated
from services.core.generation import Principal
from services.core.records import KeyRole, Meta, Tenant, leader_key, load
from services.ports.clock import Clock
from services.ports.store import Committed, Put, Store
from services.ports.usage import TileStore
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.server import RpcServer, RpcService
from services.rpc.status import from_rpc_error
from services.runtime.audit import AuditedStore, AuditRecorder, begin_call
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer
from simulator.stores.limiter import MemoryLimiter
from tests.support.election import StaticElection
from tests.support.no_plane import NoPlane
from tests.support.tlog_verifier import Client

TOKEN: Final = "t" * 40
SECRET: Final = "quitesecretquitesecret"
ADMIN_KEY: Final = f"fw_root_{SECRET}"
TENANT_KEY: Final = f"fw_acme-prod_{SECRET}"
KEY: Final = leader_key("controlplane")
SEEDS: Final = ("11" * 32, "22" * 32)
_numbers: Final = itertools.count()


def authenticate(credentials: str | None) -> Principal:
    if credentials == ADMIN_KEY:
        return Principal("root", KeyRole.ADMIN)
    if credentials == TENANT_KEY:
        return Principal("acme-prod", KeyRole.TENANT, "acme")
    raise Unauthenticated("the API key is not valid")


async def won(store: Store) -> int:
    """Return the epoch of a new leadership."""
    done = await store.commit([Put(KEY, b"", await store.grant_lease(3600))])
    assert isinstance(done, Committed)
    entry = await store.get(KEY)
    assert entry is not None
    return entry.create_revision


def sequencer_of(
    store: Store, tiles: TileStore, pending: Any, clock: Clock, folder: Path, **others: Any
) -> AuditSequencer:
    found: dict[str, Any] = {
        "leadership": StaticElection(),
        "key_file": folder / "audit_key",
        "checkpoint_file": folder / "checkpoints",
        **others,
    }
    if not found["key_file"].exists():
        found["key_file"].write_text(SEEDS[0] + "\n")
    leadership = found.pop("leadership")
    return AuditSequencer(
        store, tiles, pending, leadership, clock, new_id=lambda: f"id{next(_numbers)}", **found
    )


def pending_of(store: Store, clock: Clock) -> Informer[AuditEntry]:
    return Informer(store, PENDING, lambda entry: load(entry.value, AuditEntry), clock)


@dataclass
class AuditedPlane:
    """``sequence`` runs a step of the sequencer on the present view of what waits."""

    store: Store
    audited: AuditedStore
    tiles: TileStore
    folder: Path
    pending: Informer[AuditEntry]
    recorder: AuditRecorder
    sequencer: AuditSequencer
    election: StaticElection
    address: str
    stub: Any

    async def call(self, method: str, request: object, key: str = ADMIN_KEY, **metadata: str) -> Any:
        try:
            return await getattr(self.stub, method)(
                request, metadata=(*auth_metadata(key), *metadata.items()), timeout=10
            )
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc

    async def tenant(self, name: str, **fields: Any) -> None:
        tenant = pb.Tenant(metadata=pb.Metadata(name=name))
        await self.call("CreateTenant", pb.CreateTenantRequest(tenant=tenant, **fields))

    async def sequence(self) -> None:
        """Bring what is in the store into the log."""
        await self.recorder.flush()
        await caught_up(self.pending, self.store)
        if self.election.epoch is None:
            self.election.turn(await won(self.store))
        assert self.election.epoch is not None
        await self.sequencer.step(self.election.epoch)

    async def objects(self) -> dict[str, bytes]:
        """Return the exported log."""
        found: dict[str, bytes] = {}
        call = self.stub.ExportAuditLog(pb.ExportAuditLogRequest(), metadata=auth_metadata(ADMIN_KEY))
        async for each in call:
            if not each.last:
                found[each.name] = each.data
        return found

    async def entries(self) -> list[dict[str, Any]]:
        """Return the exported entries, once an independent client has verified them."""
        return verified(await self.objects(), self.outside())

    def outside(self) -> tuple[bytes, ...]:
        path = self.folder / "checkpoints"
        return outside_of(path.read_text()) if path.exists() else ()


def outside_of(text: str) -> tuple[bytes, ...]:
    """Return the notes of a file of checkpoints: each ends with its signatures."""
    notes: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if not line.startswith("—") and notes[-1] and notes[-1][-1].startswith("—"):
            notes.append([])
        notes[-1].append(line)
    return tuple("".join(note).encode() for note in notes if note)


def verified(objects: dict[str, bytes], outside: tuple[bytes, ...] = ()) -> list[dict[str, Any]]:
    key = objects["verifier"].decode().split()[-1]  # the oldest that still signs
    return [json.loads(entry) for entry in Client(objects.get, key).check(outside)]


async def caught_up(pending: Informer[AuditEntry], store: Store) -> None:
    """Return once the view of what waits is as of the store's present revision."""
    wanted = (await store.list(PENDING)).entries
    async with asyncio.timeout(20):
        while {key: each.mod_revision for key, each in pending.view.items()} != {
            entry.key: entry.mod_revision for entry in wanted
        }:
            await asyncio.sleep(0.005)
            wanted = (await store.list(PENDING)).entries


@asynccontextmanager
async def audited_plane(
    store: Store, tiles: TileStore, clock: Clock, folder: Path, *, port: int = 0
) -> AsyncIterator[AuditedPlane]:
    pending = pending_of(store, clock)
    audited = AuditedStore(store, pending, clock, source="controlplane", new_id=lambda: uuid4().hex)
    recorder = AuditRecorder(store, clock, source="controlplane", process=f"src-{uuid4().hex}")
    election = StaticElection()
    sequencer = sequencer_of(store, tiles, pending, clock, folder, leadership=election)
    queues = GrpcQueues(SchedulerDirectory(store, clock), TOKEN, clock, timeout_s=0.2)
    server = RpcServer(
        [
            RpcService(
                pb.DESCRIPTOR.services_by_name["ControlPlaneService"],
                controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
                ControlPlaneServicer(
                    ControlPlaneService(audited, clock, Sealer(b"k" * 32), MemoryLimiter(clock)),
                    store,
                    queues,
                    *[NoPlane()] * 5,
                    audit=AuditReader(audited, tiles),
                    require_current=lambda _: None,
                ),
            )
        ],
        listen=f"127.0.0.1:{port}",
        internal_token=TOKEN,
        new_incident=lambda: "inc",
        authenticate=authenticate,
        audit=recorder,
    )
    await server.start()
    address = f"127.0.0.1:{server.port}"
    channel = open_channel(address)
    following = asyncio.create_task(pending.run())
    stub = controlplane_pb2_grpc.ControlPlaneServiceStub(channel)
    try:
        yield AuditedPlane(
            store, audited, tiles, folder, pending, recorder, sequencer, election, address, stub
        )
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await channel.close()
        await server.stop(0)


async def exported(reader: AuditReader) -> dict[str, bytes]:
    """Return the objects of the log without an RPC, and so without an entry of the read."""
    async with aclosing(reader.export()) as objects:
        return {each.name: each.data async for each in objects if not each.last}


async def times_of_changes(etcd: str, folder: Path, blocks: int = 20) -> dict[str, dict[str, float]]:
    """Return the times of a change without an entry, and with one while the log is written, in turn."""
    clock = SystemClock()
    store = EtcdStore([etcd], clock)
    pending = pending_of(store, clock)
    audited = AuditedStore(store, pending, clock, source="controlplane", new_id=lambda: uuid4().hex)
    sequencer = sequencer_of(
        store,
        FolderLedger(folder / "tiles", AUDIT),
        pending,
        clock,
        folder,
        leadership=StaticElection(await won(store)),
    )
    running = [asyncio.create_task(each) for each in (pending.run(), sequencer.run())]
    services = [
        ControlPlaneService(each, clock, Sealer(b"k" * 32), MemoryLimiter(clock)) for each in (store, audited)
    ]
    times: tuple[list[float], list[float]] = ([], [])
    for block in range(blocks):
        for number in range(100):
            begin_call("ControlPlaneService/CreateTenant", Principal("root", KeyRole.ADMIN), "127.0.0.1")
            began = time.perf_counter()
            await services[block % 2].tenants.create(Tenant(Meta(f"t{block}-{number}")))
            times[block % 2].append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(0.01)  # the pace of scripts, so that a block lasts as long as several batches
        while (await store.list(PENDING)).entries:
            await asyncio.sleep(0.05)
    assert sequencer.problem() == ""
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await store.close()
    without, with_entry = (statistics.quantiles(each, n=100) for each in times)
    return {
        name: {"without_ms": round(without[at], 2), "with_ms": round(with_entry[at], 2)}
        for name, at in (("p50", 49), ("p99", 98))
    }
