"""An erased tenant's files, batches and parts are deleted; those of others, and of other regions, stay."""

from __future__ import annotations

import asyncio

import pytest

from services.adapters.memory.store import MemoryStore
from services.core.batches import StoredFile
from services.core.errors import KeyDestroyed, NotFound
from services.core.generation import Principal
from services.core.records import TENANT_KEYS, KeyRole, TenantKeyring, dump, load
from services.gateway.erasure import SPACES, Erasure
from services.ports.store import Put
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from tests.support.clocks import QuickClock
from tests.support.memory_batches import BatchStack, running_stack
from tests.support.memory_blobs import MemoryBlobs
from tests.support.tenant_keys import ring_view
from tests.support.waiting import until


async def uploaded(stack: BatchStack, tenant: str) -> StoredFile:
    upload = stack.files.upload(tenant)
    await upload.write(b'{"custom_id": "1"}\n')
    file = await stack.files.add(upload, "in.jsonl")
    await upload.close()
    caller = Principal("k", KeyRole.TENANT, tenant)
    await stack.service.create(caller, file.file_id, "/v1/completions", "24h", {})
    return file


async def test_everything_of_erased_tenants_is_collected_once() -> None:
    etcd, blobs = MemoryStore(SystemClock()), MemoryBlobs()
    supervisor, view, erased = Supervisor(SystemClock()), ring_view(etcd, SystemClock()), list[str]()

    async def erase(space: str) -> int:
        erased.append(space)
        return 0

    async with running_stack(SystemClock(), etcd=etcd, blobs=blobs) as stack:
        files = {tenant: await uploaded(stack, tenant) for tenant in ("acme", "other", "abroad")}
        for tenant in ("acme", "abroad"):
            await etcd.commit([Put(TENANT_KEYS + tenant, dump(TenantKeyring(erase_unix_s=5.0)))])
        part = files["acme"].parts[0]
        with pytest.raises(KeyDestroyed):
            await stack.parts.get("acme", files["acme"].file_id, 0, part.digest)
        erasure = Erasure(
            view,
            etcd,
            stack.files,
            QuickClock(),
            erase_records=erase,
            may_hold=lambda tenant: tenant != "abroad",
        )
        supervisor.spawn("rings", view.run())
        supervisor.spawn("erasure", erasure.run())

        def collected() -> bool:
            held = view.view.get(TENANT_KEYS + "acme")
            return held is not None and held.record.collect_unix_s > 0

        await until(collected)
        await asyncio.sleep(0.02)
        assert erased == ["acme" + space for space in SPACES]
        assert await stack.store.all_of("acme") == ([], [])
        assert await blobs.missing([part.digest]) == (part.digest,)
        with pytest.raises(NotFound):
            await stack.files.file("acme", files["acme"].file_id)
        kept = files["other"].parts[0]
        assert await stack.parts.get("other", files["other"].file_id, 0, kept.digest)
        abroad = await etcd.get(TENANT_KEYS + "abroad")
        assert abroad is not None
        assert not load(abroad.value, TenantKeyring).collect_unix_s, "its stores are elsewhere"
        assert len((await stack.store.all_of("abroad"))[0]) == 1
        await supervisor.close()
