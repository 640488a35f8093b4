"""Tags: moved, deleted, and never moved back by one who did not see the last move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.v1 import registry_pb2 as pb
from services.adapters.memory.store import MemoryStore
from services.core.errors import Conflict, EtagMismatch, InvalidInput, NotFound
from services.core.manifest import sha256_of
from services.core.records import VersionRecord, dump, version_key
from services.ports.store import Put
from services.registry.service import RegistryService
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from tests.integration.registry.harness import Registry, file_of, manifest_of, publish_any, store_blobs
from tests.support.registry import ADMIN


async def test_tags_move_and_are_deleted(registry: Registry) -> None:
    await store_blobs(registry, b"{}", b'{"a":1}')
    one, _ = await registry.service.create_version("tiny", manifest_of(file_of("config.json", b"{}")))
    two, _ = await registry.service.create_version("tiny", manifest_of(file_of("config.json", b'{"a":1}')))
    first = await registry.service.set_tag("tiny", "prod", one.digest)
    assert await registry.service.set_tag("tiny", "prod", two.digest) > first
    answer = await registry.stub.GetVersion(
        pb.GetVersionRequest(model="tiny", version="prod"), metadata=ADMIN, timeout=5
    )
    assert answer.version.digest == two.digest
    assert list(answer.version.tags) == ["prod"]
    with pytest.raises(NotFound):
        await registry.service.set_tag("tiny", "prod", sha256_of(b"no version"))
    await registry.service.delete_tag("tiny", "prod")
    with pytest.raises(NotFound):
        await registry.service.delete_tag("tiny", "prod")
    with pytest.raises(NotFound):
        await registry.client.get_version("tiny", "prod")
    with pytest.raises(InvalidInput):
        await registry.client.get_version("tiny", "../../keys/admin")


async def test_a_tag_that_others_moved_is_not_moved_back(registry: Registry, folder: Path) -> None:
    old = (await publish_any(registry.channel, folder, "tiny", "prod", metadata=ADMIN)).digest
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    new = (await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)).digest

    async def call(method: str, request: Any) -> Any:
        try:
            return await getattr(registry.stub, method)(request, metadata=ADMIN, timeout=30)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def move(digest: str, etag: str, request_id: str = "") -> pb.SetTagRequest:
        return pb.SetTagRequest(model="tiny", tag="prod", digest=digest, etag=etag, request_id=request_id)

    first = await call("SetTag", move(new, old, "r1"))
    with pytest.raises(EtagMismatch, match=f"points at {new}"):
        await call("SetTag", move(new, old))
    with pytest.raises(EtagMismatch):
        await call("DeleteTag", pb.DeleteTagRequest(model="tiny", tag="prod", etag=old))
    await call("SetTag", move(old, new))
    assert await call("SetTag", move(new, old, "r1")) == first, "the first answer again"
    assert await registry.service.tags("tiny") == {"prod": old}, "and nothing was moved by it"
    with pytest.raises(Conflict):
        await call("SetTag", move(old, "", "r1"))
    delete = pb.DeleteTagRequest(model="tiny", tag="prod", etag=old, request_id="r2")
    forget = pb.DeleteVersionRequest(model="tiny", digest=old, request_id="r1")
    for method, request in (("DeleteTag", delete), ("DeleteVersion", forget)):
        await call(method, request)
        await call(method, request)
    with pytest.raises(EtagMismatch, match="nothing"):
        await call("SetTag", move(new, old))


async def test_a_move_that_comes_between_is_seen(registry: Registry, folder: Path) -> None:
    class Between(MemoryStore):
        act: Any = None

        async def commit(self, operations: Any, conditions: Any = ()) -> Any:
            act, self.act = self.act, None
            if act is not None:
                await act()
            return await super().commit(operations, conditions)

    store = Between(SystemClock())
    service = RegistryService(store, registry.blobs, SystemClock())
    old, new = sha256_of(b"old"), sha256_of(b"new")
    for digest in (old, new):
        await store.commit([Put(version_key("m", digest), dump(VersionRecord("m", digest, 1, 0.0)))])
    await service.set_tag("m", "prod", old)

    async def moved() -> None:
        await service.set_tag("m", "prod", new)

    store.act = moved
    with pytest.raises(EtagMismatch):
        await service.set_tag("m", "prod", old, etag=old)
    store.act = moved
    await service.set_tag("m", "prod", old)  # without an etag the last one wins
