"""Publish, register, fetch: the real server, the real client and real folders, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from fairway.client.publish import PublishProgress, PublishRefused, publish
from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc
from services.adapters.folder_blobs import FolderBlobs
from services.adapters.memory_store import MemoryStore
from services.adapters.model_files import ModelFiles
from services.adapters.registry_client import RegistryClient
from services.core.errors import (
    Conflict,
    EtagMismatch,
    FailedPrecondition,
    FairwayError,
    IntegrityError,
    InvalidInput,
    NotFound,
    PermissionDenied,
    SlowReader,
    StoreUnavailable,
    Unauthenticated,
    Unavailable,
)
from services.core.generation import Principal
from services.core.manifest import CHUNK_BYTES, Manifest, ManifestFile, digest_of, sha256_of
from services.core.records import KeyRole, VersionRecord, dump, version_key
from services.ports.store import Put
from services.registry.service import RegistryService
from services.registry.servicer import RegistryServicer
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.server import RpcServer, Service
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from tests.support.model_folder import safetensors

TOKEN = "t" * 40
ADMIN = auth_metadata("admin")
MAX_BYTES = 64 * 1024 * 1024


def _authenticate(credentials: str | None) -> Principal:
    if credentials is None or not credentials.endswith("admin"):
        raise Unauthenticated("no")
    return Principal("admin", KeyRole.ADMIN)


@dataclass
class Registry:
    store: MemoryStore
    blobs: FolderBlobs
    blobs_root: Path
    service: RegistryService
    servicer: Faltering
    channel: grpc.aio.Channel
    address: str

    @property
    def stub(self) -> registry_pb2_grpc.RegistryServiceAsyncStub:
        return registry_pb2_grpc.RegistryServiceStub(self.channel)

    @property
    def client(self) -> RegistryClient:
        return RegistryClient(self.channel, TOKEN)

    def blob(self, digest: str) -> Path:
        name = digest.removeprefix("sha256:")
        return self.blobs_root / "sha256" / name[:2] / name


class Faltering(RegistryServicer):
    """Answers UNAVAILABLE to as many uploads as a test says."""

    falters = 0

    async def UploadChunk(self, request_iterator: Any, context: Any) -> pb.UploadChunkResponse:
        if self.falters:
            self.falters -= 1
            raise Unavailable("a moment")
        return await super().UploadChunk(request_iterator, context)


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    clock = SystemClock()
    store, blobs = MemoryStore(clock), FolderBlobs(tmp_path / "blobs")
    service = RegistryService(store, blobs, clock)
    servicer = Faltering(service)
    server = RpcServer(
        [
            Service(
                pb.DESCRIPTOR.services_by_name["RegistryService"],
                registry_pb2_grpc.add_RegistryServiceServicer_to_server,
                servicer,
            )
        ],
        listen="127.0.0.1:0",
        internal_token=TOKEN,
        new_incident=lambda: "inc",
        authenticate=_authenticate,
    )
    await server.start()
    address = f"127.0.0.1:{server.port}"
    channel = open_channel(address)
    yield Registry(store, blobs, tmp_path / "blobs", service, servicer, channel, address)
    await channel.close()
    await server.stop(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    (root / "extra").mkdir(parents=True)
    (root / ".cache").mkdir()
    (root / ".cache" / "junk.bin").write_bytes(b"never published")
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "tokenizer.json").write_text('{"version": "1.0"}')
    (root / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    (root / "generation_config.json").write_text("{}")
    (root / "extra" / "empty.txt").write_bytes(b"")
    (root / "model.safetensors").write_bytes(safetensors(2 * CHUNK_BYTES + 12345))
    return root


def files(registry: Any, root: Path, **options: Any) -> ModelFiles:
    return ModelFiles(registry, root, SystemClock(), max_bytes=options.get("max_bytes", MAX_BYTES))


def same(left: Path, right: Path) -> bool:
    names = sorted(
        p.relative_to(left).as_posix() for p in left.rglob("*") if p.is_file() and ".cache" not in str(p)
    )
    assert names == sorted(p.relative_to(right).as_posix() for p in right.rglob("*") if p.is_file())
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


async def test_publish_register_fetch(registry: Registry, folder: Path, tmp_path: Path) -> None:
    told: list[PublishProgress] = []
    first = await publish(registry.channel, folder, "tiny", "latest", told.append, metadata=ADMIN)
    assert first.created
    assert first.uploaded_chunks == 7
    size = first.size_bytes
    assert told[-1] == PublishProgress(
        "done", size, size, to_send_bytes=size, sent_bytes=size, chunks=7, skipped_chunks=0
    )
    phases = [each.phase for each in told]
    assert phases == sorted(phases, key=["hash", "upload", "create", "done"].index)
    assert all(0 <= each.done_ratio <= 1 for each in told)
    again = await publish(registry.channel, folder, "tiny", "latest", metadata=ADMIN)
    assert (again.digest, again.created, again.uploaded_chunks) == (first.digest, False, 0)

    record, manifest = await registry.client.get_version("tiny", "latest")
    assert record.digest == first.digest == digest_of(manifest)
    assert manifest.tokenizer_digest == sha256_of((folder / "tokenizer.json").read_bytes())
    assert manifest.chat_template_digest == sha256_of((folder / "tokenizer_config.json").read_bytes())
    assert all(not file.path.startswith(".") for file in manifest.files)

    models = files(registry.client, tmp_path / "cache")
    ratios: list[float] = []
    path = await models.fetch("tiny", first.digest, progress=ratios.append)
    assert same(folder, path)
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0
    models.check_integrity()


async def test_folder_that_may_not_be_a_version_is_refused_before_anything_is_uploaded(
    registry: Registry, folder: Path
) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(PublishRefused, match="may carry pickled objects"):
        await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    assert [path for path in (registry.blobs_root / "sha256").rglob("*") if path.is_file()] == []


async def test_publishing_again_brings_back_a_lost_chunk(registry: Registry, folder: Path) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    blob = registry.blob(sha256_of((folder / "tokenizer.json").read_bytes()))
    blob.unlink()
    again = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    assert (again.digest, again.created, again.uploaded_chunks) == (done.digest, False, 1)
    assert blob.exists()


async def test_publish_outlasts_a_registry_that_falters(registry: Registry, folder: Path) -> None:
    registry.servicer.falters = 2
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    assert (done.created, registry.servicer.falters) == (True, 0)


async def test_publish_gives_up_with_the_registrys_error_and_goes_on_later(
    registry: Registry, folder: Path
) -> None:
    registry.servicer.falters = 10**6
    with pytest.raises(grpc.aio.AioRpcError, match="a moment"):
        await publish(registry.channel, folder, "tiny", metadata=ADMIN, patience_s=0.5)
    assert await registry.service.list_models() == ((), "")
    registry.servicer.falters = 0
    assert (await publish(registry.channel, folder, "tiny", metadata=ADMIN)).created


async def test_only_chosen_files_have_a_folder_of_their_own(
    registry: Registry, folder: Path, tmp_path: Path
) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    models = files(registry.client, tmp_path / "cache")
    small = await models.fetch("tiny", done.digest, only=lambda path: path.endswith(".json"))
    assert not (small / "model.safetensors").exists()
    assert (small / "tokenizer.json").exists()
    whole = await models.fetch("tiny", done.digest)
    assert small != whole
    assert (whole / "model.safetensors").exists()
    with pytest.raises(NotFound):
        await models.fetch("tiny", done.digest, only=lambda _: False)


class Counting:
    """A VersionSource before the real client: counts, breaks, damages or stalls downloads."""

    def __init__(self, inner: RegistryClient) -> None:
        self.inner = inner
        self.downloads: list[tuple[str, int]] = []
        self.broken = 0
        self.error: type[FairwayError] = Unavailable
        self.flip: dict[str, int] = {}
        self.stop_after = -1
        self.stopped = asyncio.Event()

    async def get_version(self, model: str, version: str) -> tuple[VersionRecord, Manifest]:
        return await self.inner.get_version(model, version)

    async def download(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        self.downloads.append((digest, offset_bytes))
        if len(self.downloads) == self.stop_after:
            self.stopped.set()
            await asyncio.sleep(3600)
        async with aclosing(self.inner.download(digest, offset_bytes)) as pieces:
            async for piece in pieces:
                if self.flip.get(digest, 0) > 0:
                    self.flip[digest] -= 1
                    piece = bytes([piece[0] ^ 1]) + piece[1:]
                yield piece
                if self.broken:
                    self.broken -= 1
                    raise self.error("cut")


async def test_concurrent_fetches_share_one_download(
    registry: Registry, folder: Path, tmp_path: Path
) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    source = Counting(registry.client)
    models = files(source, tmp_path / "cache")
    paths = await asyncio.gather(*(models.fetch("tiny", done.digest) for _ in range(5)))
    assert len(set(paths)) == 1
    assert len(source.downloads) == 7


@pytest.mark.parametrize("error", [Unavailable, SlowReader])
async def test_broken_connection_resumes_at_the_byte(
    registry: Registry, folder: Path, tmp_path: Path, error: type[FairwayError]
) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    source = Counting(registry.client)
    source.broken, source.error = 3, error
    path = await files(source, tmp_path / "cache").fetch("tiny", done.digest)
    assert same(folder, path)
    assert any(offset > 0 for _, offset in source.downloads)


async def test_a_download_that_nobody_reads_ends(registry: Registry, folder: Path) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    _, manifest = await registry.client.get_version("tiny", done.digest)
    weights = next(file for file in manifest.files if file.path == "model.safetensors")
    registry.servicer.unread_s = 0.2
    request = pb.DownloadChunkRequest(digest=weights.chunks[0])
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
    async with grpc.aio.insecure_channel(registry.address, options=narrow) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        call: Any = stub.DownloadChunk(request, metadata=ADMIN, timeout=60)
        await call.read()
        await asyncio.sleep(2.0)  # nobody reads: what is waited for is the other side's patience
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    assert isinstance(from_rpc_error(caught.value), SlowReader)


async def test_one_flipped_bit_is_fetched_again_two_are_an_error(
    registry: Registry, folder: Path, tmp_path: Path
) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    _, manifest = await registry.client.get_version("tiny", done.digest)
    weights = next(file for file in manifest.files if file.path == "model.safetensors")
    source = Counting(registry.client)
    source.flip[weights.chunks[1]] = 1
    assert same(folder, await files(source, tmp_path / "one").fetch("tiny", done.digest))
    source.flip[weights.chunks[1]] = 10**6
    models = files(source, tmp_path / "two")
    with pytest.raises(IntegrityError) as caught:
        await models.fetch("tiny", done.digest)
    assert caught.value.metadata["path"] == "model.safetensors"
    assert list((tmp_path / "two" / "ready").iterdir()) == []
    assert models.kept_bytes == 0


async def test_bit_rot_in_the_blob_store_never_reaches_a_folder(
    registry: Registry, folder: Path, tmp_path: Path
) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    _, manifest = await registry.client.get_version("tiny", done.digest)
    blob = registry.blob(manifest.files[3].chunks[0])
    blob.chmod(0o600)
    data = bytearray(blob.read_bytes())
    data[0] ^= 1
    blob.write_bytes(data)
    with pytest.raises(IntegrityError):
        await files(registry.client, tmp_path / "cache").fetch("tiny", done.digest)


async def test_killed_fetch_resumes_and_cuts_a_torn_chunk(
    registry: Registry, folder: Path, tmp_path: Path
) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    first = Counting(registry.client)
    first.stop_after = 5  # stands in the last chunk of the weights
    models = files(first, tmp_path / "cache")
    fetching = asyncio.ensure_future(models.fetch("tiny", done.digest))
    await first.stopped.wait()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    models.close()
    assert list((tmp_path / "cache" / "ready").iterdir()) == []
    partial = next((tmp_path / "cache" / "partial").iterdir()) / "model.safetensors"
    assert partial.stat().st_size == 2 * CHUNK_BYTES
    with partial.open("ab") as stream:
        stream.write(b"torn")  # a kill amid a write

    second = Counting(registry.client)
    path = await files(second, tmp_path / "cache").fetch("tiny", done.digest)
    assert same(folder, path)
    assert len(second.downloads) == 7 - 4, "verified chunks were fetched again"


async def test_a_fetch_may_be_cancelled_anywhere(registry: Registry, tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    for number in range(6):
        (root / f"f{number}.json").write_text(json.dumps(chr(65 + number) * 48))
    (root / "config.json").write_text("{}")
    done = await publish(registry.channel, root, "tiny", metadata=ADMIN)
    rng = random.Random(3)
    completed = 0
    for turn in range(25):
        models = files(registry.client, tmp_path / f"cache{turn % 5}")
        for _ in range(3):
            fetching = asyncio.ensure_future(models.fetch("tiny", done.digest))
            await asyncio.sleep(rng.uniform(0, 0.02))
            fetching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await fetching
                completed += 1
            models.check_integrity()
        assert same(root, await models.fetch("tiny", done.digest))
        models.check_integrity()
        models.close()
        if turn % 2:
            shutil.rmtree(tmp_path / f"cache{turn % 5}")
    assert 0 < completed < 75, "no cancellation hit anything, or all hit too early"


async def test_cancelled_while_its_folder_appears_it_counts(
    registry: Registry, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    source = Counting(registry.client)
    models = files(source, tmp_path / "cache")
    fetching = asyncio.ensure_future(models.fetch("tiny", done.digest))
    real, loop = Path.rename, asyncio.get_running_loop()

    def rename(self: Path, target: Path) -> Path:
        loop.call_soon_threadsafe(fetching.cancel)
        time.sleep(0.05)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(asyncio.CancelledError):
        await fetching
    monkeypatch.undo()
    models.check_integrity()
    assert len(list((tmp_path / "cache" / "ready").iterdir())) == 1
    source.downloads.clear()
    assert same(folder, await models.fetch("tiny", done.digest))
    assert source.downloads == []


_CHILD = """
import asyncio, sys
from contextlib import aclosing
from pathlib import Path
from services.adapters.model_files import ModelFiles
from services.adapters.registry_client import RegistryClient
from services.rpc.channel import open_channel
from services.runtime.clock import SystemClock

class Slow(RegistryClient):
    started = 0
    async def download(self, digest, offset_bytes=0):
        Slow.started += 1
        async with aclosing(super().download(digest, offset_bytes)) as pieces:
            async for piece in pieces:
                yield piece
                if Slow.started == 4:
                    print("amid", flush=True)
                    await asyncio.sleep(3600)

async def main():
    address, root, digest = sys.argv[1:]
    files = ModelFiles(Slow(open_channel(address), "t" * 40), Path(root), SystemClock(), max_bytes=10**9)
    await files.fetch("tiny", digest)

asyncio.run(main())
"""


async def test_fetch_goes_on_after_sigkill(registry: Registry, folder: Path, tmp_path: Path) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _CHILD,
        registry.address,
        str(tmp_path / "cache"),
        done.digest,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(30):
            assert await child.stdout.readline() == b"amid\n"
        with pytest.raises(StoreUnavailable, match="another process"):
            await files(registry.client, tmp_path / "cache").fetch("tiny", done.digest)
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
    assert list((tmp_path / "cache" / "ready").iterdir()) == []
    source = Counting(registry.client)
    path = await files(source, tmp_path / "cache").fetch("tiny", done.digest)
    assert same(folder, path)
    assert len(source.downloads) == 7 - 3


async def test_damaged_kept_folder_is_found_at_the_next_start(
    registry: Registry, folder: Path, tmp_path: Path
) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    models = files(registry.client, tmp_path / "cache")
    path = await models.fetch("tiny", done.digest)
    models.close()
    with (path / "model.safetensors").open("r+b") as stream:
        stream.seek(CHUNK_BYTES + 5)
        stream.write(b"\x00\x01\x02")
    source = Counting(registry.client)
    again = files(source, tmp_path / "cache")
    assert same(folder, await again.fetch("tiny", done.digest))
    assert len(source.downloads) == 2  # the damaged chunk and the one behind it
    source.downloads.clear()
    assert same(folder, await again.fetch("tiny", done.digest))
    assert source.downloads == []


async def test_kept_version_needs_no_registry(registry: Registry, folder: Path, tmp_path: Path) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    models = files(registry.client, tmp_path / "cache")
    await models.fetch("tiny", done.digest)
    models.close()
    nowhere = open_channel("127.0.0.1:1")
    try:
        path = await files(RegistryClient(nowhere, TOKEN), tmp_path / "cache").fetch("tiny", done.digest)
        assert same(folder, path)
    finally:
        await nowhere.close()


async def test_least_recently_used_goes_first_and_never_a_pinned_one(
    registry: Registry, tmp_path: Path
) -> None:
    digests = []
    for number in range(4):
        root = tmp_path / f"m{number}"
        root.mkdir()
        (root / "config.json").write_text(json.dumps(chr(65 + number) * 998))
        digests.append((await publish(registry.channel, root, "tiny", metadata=ADMIN)).digest)
    models = files(registry.client, tmp_path / "cache", max_bytes=2500)
    first = await models.fetch("tiny", digests[0])
    models.pin(first)
    second = await models.fetch("tiny", digests[1])
    third = await models.fetch("tiny", digests[2])
    assert first.exists()
    assert not second.exists()
    kept = {path.name for path in (tmp_path / "cache" / "ready").iterdir()}
    manifests = {path.stem for path in (tmp_path / "cache" / "manifests").iterdir()}
    assert manifests == kept, "an evicted version's manifest goes with it"
    models.pin(third)
    with pytest.raises(StoreUnavailable, match="in use"):
        await models.fetch("tiny", digests[3])
    models.unpin(first)
    fourth = await models.fetch("tiny", digests[3])
    assert fourth.exists()
    assert not first.exists()
    with pytest.raises(NotFound):
        models.pin(first)
    models.check_integrity()
    models.close()
    tight = files(registry.client, tmp_path / "tight", max_bytes=999)
    with pytest.raises(FailedPrecondition, match="holds 999"):
        await tight.fetch("tiny", digests[0])


async def test_a_used_folder_outlives_an_older_use_also_across_a_restart(
    registry: Registry, tmp_path: Path
) -> None:
    digests = []
    for number in range(4):
        root = tmp_path / f"m{number}"
        root.mkdir()
        (root / "config.json").write_text(json.dumps(chr(65 + number) * 998))
        digests.append((await publish(registry.channel, root, "tiny", metadata=ADMIN)).digest)
    models = files(registry.client, tmp_path / "cache", max_bytes=2500)
    first = await models.fetch("tiny", digests[0])
    second = await models.fetch("tiny", digests[1])
    await models.fetch("tiny", digests[0])
    third = await models.fetch("tiny", digests[2])
    assert (first.exists(), second.exists()) == (True, False)
    await models.fetch("tiny", digests[0])
    models.close()
    models = files(registry.client, tmp_path / "cache", max_bytes=2500)
    await models.fetch("tiny", digests[3])
    assert (first.exists(), third.exists()) == (True, False)


async def test_what_the_disk_does_not_let_go_counts_and_serves_on(registry: Registry, tmp_path: Path) -> None:
    digests = []
    for number in range(2):
        root = tmp_path / f"m{number}"
        root.mkdir()
        (root / "config.json").write_text(json.dumps(chr(65 + number) * 998))
        digests.append((await publish(registry.channel, root, "tiny", metadata=ADMIN)).digest)
    models = files(registry.client, tmp_path / "cache", max_bytes=1500)
    first = await models.fetch("tiny", digests[0])
    obstacle = tmp_path / "cache" / "partial" / f"{first.name}.gone"
    obstacle.write_bytes(b"")  # a file where the folder has to go: the system refuses the rename
    with pytest.raises(StoreUnavailable):
        await models.fetch("tiny", digests[1])
    assert models.kept_bytes == 1000
    assert await models.fetch("tiny", digests[0]) == first
    obstacle.unlink()
    second = await models.fetch("tiny", digests[1])
    assert (first.exists(), second.exists()) == (False, True)
    models.check_integrity()


async def test_full_disk_is_clear_and_leaves_nothing(
    registry: Registry, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    models = files(registry.client, tmp_path / "cache")
    real, written = os.write, 0

    def full(target: int, data: memoryview) -> int:
        nonlocal written
        written += 1
        if written == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(target, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreUnavailable, match="full"):
        await models.fetch("tiny", done.digest)
    assert list((tmp_path / "cache" / "partial").iterdir()) == []
    assert list((tmp_path / "cache" / "ready").iterdir()) == []
    assert models.kept_bytes == 0
    assert same(folder, await models.fetch("tiny", done.digest))


async def test_root_has_one_owner(registry: Registry, folder: Path, tmp_path: Path) -> None:
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    owner = files(registry.client, tmp_path / "cache")
    await owner.fetch("tiny", done.digest)
    with pytest.raises(StoreUnavailable, match="another process"):
        await files(registry.client, tmp_path / "cache").fetch("tiny", done.digest)
    owner.close()
    await files(registry.client, tmp_path / "cache").fetch("tiny", done.digest)


# --- what the registry refuses ---------------------------------------------------------------------


async def _upload(registry: Registry, digest: str, size: int, *parts: bytes) -> None:
    async def messages() -> AsyncIterator[pb.UploadChunkRequest]:
        yield pb.UploadChunkRequest(header=pb.ChunkHeader(digest=digest, size_bytes=size))
        for part in parts:
            yield pb.UploadChunkRequest(data=part)

    try:
        await registry.stub.UploadChunk(messages(), metadata=ADMIN, timeout=10)
    except grpc.aio.AioRpcError as exc:
        raise from_rpc_error(exc) from exc


@pytest.mark.parametrize(
    ("size", "parts", "error"),
    [
        (5, (b"hellO",), IntegrityError),  # a flipped bit
        (5, (b"hel",), IntegrityError),  # truncated
        (4, (b"hello",), IntegrityError),  # a size that lies low
        (6, (b"hello",), IntegrityError),  # a size that lies high
        (5, (b"hello", b"more"), IntegrityError),
        (5, (), IntegrityError),
        (0, (b"hello",), InvalidInput),
        (CHUNK_BYTES + 1, (b"hello",), InvalidInput),
        (5, (b"", b"hello"), InvalidInput),
    ],
)
async def test_upload_is_whole_or_not_there(
    registry: Registry, size: int, parts: tuple[bytes, ...], error: type[FairwayError]
) -> None:
    digest = sha256_of(b"hello")
    with pytest.raises(error):
        await _upload(registry, digest, size, *parts)
    answer = await registry.stub.FindMissingChunks(
        pb.FindMissingChunksRequest(digests=[digest, digest]), metadata=ADMIN, timeout=5
    )
    assert list(answer.digests) == [digest]
    await _upload(registry, digest, 5, b"he", b"llo")
    assert await registry.service.find_missing([digest]) == ()


async def test_upload_needs_its_header_first_and_once(registry: Registry) -> None:
    header = pb.UploadChunkRequest(header=pb.ChunkHeader(digest=sha256_of(b"x"), size_bytes=1))
    for messages in ([], [pb.UploadChunkRequest(data=b"x")], [header, header]):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await registry.stub.UploadChunk(iter(messages), metadata=ADMIN, timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_upload_killed_half_way_leaves_nothing_and_goes_through_later(
    registry: Registry, folder: Path
) -> None:
    data = (folder / "model.safetensors").read_bytes()[:CHUNK_BYTES]
    digest = sha256_of(data)
    started = asyncio.Event()

    async def half() -> AsyncIterator[pb.UploadChunkRequest]:
        yield pb.UploadChunkRequest(header=pb.ChunkHeader(digest=digest, size_bytes=len(data)))
        yield pb.UploadChunkRequest(data=data[: 1024 * 1024])
        started.set()
        await asyncio.sleep(3600)

    call = registry.stub.UploadChunk(half(), metadata=ADMIN, timeout=30)
    await started.wait()
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.sleep(0.2)
    assert await registry.service.find_missing([digest]) == (digest,)
    assert list((registry.blobs_root / "unfinished").iterdir()) == []
    done = await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    assert done.created


def _manifest(*entries: ManifestFile, **fields: Any) -> Manifest:
    return Manifest(tuple(sorted(entries, key=lambda file: file.path)), **fields)


def _file(path: str, data: bytes) -> ManifestFile:
    return ManifestFile(path, len(data), sha256_of(data), (sha256_of(data),) if data else ())


async def _stored(registry: Registry, *blobs: bytes) -> None:
    for data in blobs:
        await _upload(registry, sha256_of(data), len(data), data)


async def test_version_of_missing_chunks_is_refused(registry: Registry) -> None:
    with pytest.raises(FailedPrecondition, match="1 of 1 chunks"):
        await registry.service.create_version("tiny", _manifest(_file("config.json", b"{}")))


async def test_version_whose_sizes_or_digests_lie_is_refused(registry: Registry) -> None:
    config = _file("config.json", b"{}")
    await _stored(registry, b"{}", b"abc")
    lying = ManifestFile("a.txt", 4, sha256_of(b"abc"), (sha256_of(b"abc"),))
    with pytest.raises(IntegrityError, match="not 4"):
        await registry.service.create_version("tiny", _manifest(config, lying))
    lying = ManifestFile("a.txt", 3, sha256_of(b"abd"), (sha256_of(b"abc"),))
    with pytest.raises(IntegrityError, match="are not the file"):
        await registry.service.create_version("tiny", _manifest(config, lying))
    with pytest.raises(InvalidInput, match="tokenizer_digest"):
        await registry.service.create_version("tiny", _manifest(config, tokenizer_digest=sha256_of(b"other")))
    assert await registry.service.list_models() == ((), "")


async def test_version_is_never_overwritten_in_place(registry: Registry) -> None:
    await _stored(registry, b"{}", b'{"a":1}')
    record, created = await registry.service.create_version("tiny", _manifest(_file("config.json", b"{}")))
    before = await registry.store.get(version_key("tiny", record.digest))
    other, _ = await registry.service.create_version("tiny", _manifest(_file("config.json", b'{"a":1}')))
    again, recreated = await registry.service.create_version("tiny", _manifest(_file("config.json", b"{}")))
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
    await _stored(registry, b"{}")
    manifest = _manifest(_file("config.json", b"{}"))
    made = await asyncio.gather(*(registry.service.create_version("tiny", manifest) for _ in range(8)))
    assert sum(created for _, created in made) == 1
    assert len({record.digest for record, _ in made}) == 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "modeling.py", "weights.msgpack", "x.npz"])
async def test_names_of_pickles_and_code_are_refused_by_both_sides(
    registry: Registry, folder: Path, name: str
) -> None:
    (folder / name).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(PublishRefused, match=name):
        await publish(registry.channel, folder, "tiny", metadata=ADMIN)
    manifest = _manifest(_file("config.json", b"{}"), _file(name, b"\x80\x04K\x01."))
    with pytest.raises(InvalidInput, match=name):
        await registry.service.create_version("tiny", manifest)


async def test_tags_move_and_are_deleted(registry: Registry) -> None:
    await _stored(registry, b"{}", b'{"a":1}')
    one, _ = await registry.service.create_version("tiny", _manifest(_file("config.json", b"{}")))
    two, _ = await registry.service.create_version("tiny", _manifest(_file("config.json", b'{"a":1}')))
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
    old = (await publish(registry.channel, folder, "tiny", "prod", metadata=ADMIN)).digest
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    new = (await publish(registry.channel, folder, "tiny", metadata=ADMIN)).digest

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


async def test_lists_come_in_pages(registry: Registry) -> None:
    for number in range(5):
        body = b"%d" % number
        await _stored(registry, body)
        for model in ("a", "a.b", f"m{number}"):
            await registry.service.create_version(model, _manifest(_file("config.json", body)))
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
    await _stored(registry, b"{}")
    request = pb.SetTagRequest(model="m", tag="t", digest=sha256_of(b"{}"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.stub.SetTag(request, metadata=internal, timeout=5)
    assert isinstance(from_rpc_error(caught.value), PermissionDenied)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.stub.DownloadChunk(pb.DownloadChunkRequest(digest=sha256_of(b"{}")), timeout=5).read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    pieces = [piece async for piece in registry.client.download(sha256_of(b"{}"), 1)]
    assert b"".join(pieces) == b"}"
