"""Versions: of chunks that are there, of what their digests say, made once and never changed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from fairway.v1 import registry_pb2 as pb
from services.core.errors import FailedPrecondition, IntegrityError, InvalidInput, PermissionDenied
from services.core.manifest import ManifestFile, sha256_of
from services.core.records import version_key
from services.registry.service import RegistryService
from services.rpc.channel import auth_metadata
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from tests.integration.registry.harness import Registry, file_of, manifest_of, store_blobs
from tests.support.registry import ADMIN, TOKEN


async def test_version_of_missing_chunks_is_refused(registry: Registry) -> None:
    with pytest.raises(FailedPrecondition, match="1 of 1 chunks"):
        await registry.service.create_version("tiny", manifest_of(file_of("config.json", b"{}")))


async def test_version_whose_sizes_or_digests_lie_is_refused(registry: Registry) -> None:
    config = file_of("config.json", b"{}")
    await store_blobs(registry, b"{}", b"abc")
    lying = ManifestFile("a.txt", 4, sha256_of(b"abc"), (sha256_of(b"abc"),))
    with pytest.raises(IntegrityError, match="not 4"):
        await registry.service.create_version("tiny", manifest_of(config, lying))
    lying = ManifestFile("a.txt", 3, sha256_of(b"abd"), (sha256_of(b"abc"),))
    with pytest.raises(IntegrityError, match="are not the file"):
        await registry.service.create_version("tiny", manifest_of(config, lying))
    with pytest.raises(InvalidInput, match="tokenizer_digest"):
        await registry.service.create_version(
            "tiny", manifest_of(config, tokenizer_digest=sha256_of(b"other"))
        )
    assert await registry.service.list_models() == ((), "")


async def test_version_is_never_overwritten_in_place(registry: Registry) -> None:
    await store_blobs(registry, b"{}", b'{"a":1}')
    record, created = await registry.service.create_version(
        "tiny", manifest_of(file_of("config.json", b"{}"))
    )
    before = await registry.store.get(version_key("tiny", record.digest))
    other, _ = await registry.service.create_version("tiny", manifest_of(file_of("config.json", b'{"a":1}')))
    again, recreated = await registry.service.create_version(
        "tiny", manifest_of(file_of("config.json", b"{}"))
    )
    assert (created, recreated) == (True, False)
    assert other.digest != record.digest == again.digest
    assert await registry.store.get(version_key("tiny", record.digest)) == before

    blob = registry.blob(record.digest)  # somebody with the disk rewrites the manifest
    blob.chmod(0o600)
    blob.write_bytes(blob.read_bytes().replace(b'"max_context_tokens":0', b'"max_context_tokens":9'))
    with pytest.raises(IntegrityError):
        await registry.service.get_version("tiny", record.digest)
    with pytest.raises(IntegrityError):
        await registry.client.get_version("tiny", record.digest)


async def test_racing_creators_make_one_version(registry: Registry) -> None:
    await store_blobs(registry, b"{}")
    manifest = manifest_of(file_of("config.json", b"{}"))
    made = await asyncio.gather(*(registry.service.create_version("tiny", manifest) for _ in range(8)))
    assert sum(created for _, created in made) == 1
    assert len({record.digest for record, _ in made}) == 1


async def test_lists_come_in_pages(registry: Registry) -> None:
    for number in range(5):
        body = b"%d" % number
        await store_blobs(registry, body)
        for model in ("a", "a.b", f"m{number}"):
            await registry.service.create_version(model, manifest_of(file_of("config.json", body)))
    seen: list[str] = []
    token, pages = "", 0
    while True:
        answer = await registry.stub.ListVersions(
            pb.ListVersionsRequest(model="a", page_size=2, page_token=token), metadata=ADMIN, timeout=5
        )
        seen += [version.digest for version in answer.versions]
        pages, token = pages + 1, answer.next_page_token
        if not token:
            break
    assert (pages, len(seen), seen) == (3, 5, sorted(set(seen)))
    models, _ = await registry.service.list_models()
    assert [(model.name, model.versions) for model in models] == [
        ("a", 5),
        ("a.b", 5),
        *((f"m{n}", 1) for n in range(5)),
    ]
    with pytest.raises(InvalidInput):
        await registry.service.list_versions("a", token="\x00!")


async def test_only_admins_publish_and_services_only_read(registry: Registry) -> None:
    internal = auth_metadata(TOKEN)
    await store_blobs(registry, b"{}")
    request = pb.SetTagRequest(model="m", tag="t", digest=sha256_of(b"{}"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.stub.SetTag(request, metadata=internal, timeout=5)
    assert isinstance(from_rpc_error(caught.value), PermissionDenied)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.stub.DownloadChunk(pb.DownloadChunkRequest(digest=sha256_of(b"{}")), timeout=5).read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    pieces = [piece async for piece in registry.client.download(sha256_of(b"{}"), 1)]
    assert b"".join(pieces) == b"}"


class Texts:
    """A gateway's answer about every version."""

    def __init__(self, fault: str = "", error: str = "") -> None:
        self._fault, self._error = fault, error

    async def fault(self, folder: Path, version_digest: str) -> str:
        assert (folder / "config.json").read_bytes()
        if self._error:
            raise FailedPrecondition(self._error)
        return self._fault


@pytest.mark.parametrize(
    ("config", "texts", "problem"),
    [
        (b'{"architectures": ["GPT2LMHeadModel"]}', Texts(), "GPT2LMHeadModel"),
        (b"{}", Texts(fault="the chat template does not compile"), "does not compile"),
        (b"{}", Texts(error="generation_config.json has temperature 9"), "temperature 9"),
    ],
)
async def test_a_version_that_cannot_be_served_is_for_another_engine_or_refused(
    registry: Registry, config: bytes, texts: Texts, problem: str
) -> None:
    await store_blobs(registry, config)
    service = RegistryService(registry.store, registry.service._blobs, SystemClock(), texts=texts)
    manifest = manifest_of(file_of("config.json", config))
    with pytest.raises(InvalidInput, match=problem):
        await service.create_version("tiny", manifest)
    assert (await service.create_version("tiny", manifest, for_another_engine=True))[1]
