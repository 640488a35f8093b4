"""Fetching model files: shared, resumed at the byte, verified, cancelled or killed anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc
from services.core.errors import (
    FairwayError,
    IntegrityError,
    NotFound,
    SlowReader,
    StoreUnavailable,
    Unavailable,
)
from services.core.manifest import CHUNK_BYTES
from services.rpc.status import from_rpc_error
from tests.integration.registry.harness import Counting, Registry, files, publish_any, same
from tests.support.registry import ADMIN


async def test_only_chosen_files_have_a_folder_of_their_own(
    registry: Registry, folder: Path, tmp_path: Path
) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    models = files(registry.client, tmp_path / "cache")
    small = await models.fetch("tiny", done.digest, only=lambda path: path.endswith(".json"))
    assert not (small / "model.safetensors").exists()
    assert (small / "tokenizer.json").exists()
    whole = await models.fetch("tiny", done.digest)
    assert small != whole
    assert (whole / "model.safetensors").exists()
    with pytest.raises(NotFound):
        await models.fetch("tiny", done.digest, only=lambda _: False)


async def test_concurrent_fetches_share_one_download(
    registry: Registry, folder: Path, tmp_path: Path
) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    source = Counting(registry.client)
    models = files(source, tmp_path / "cache")
    paths = await asyncio.gather(*(models.fetch("tiny", done.digest) for _ in range(5)))
    assert len(set(paths)) == 1
    assert len(source.downloads) == 7


@pytest.mark.parametrize("error", [Unavailable, SlowReader])
async def test_broken_connection_resumes_at_the_byte(
    registry: Registry, folder: Path, tmp_path: Path, error: type[FairwayError]
) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    source = Counting(registry.client)
    source.broken, source.error = 3, error
    path = await files(source, tmp_path / "cache").fetch("tiny", done.digest)
    assert same(folder, path)
    assert any(offset > 0 for _, offset in source.downloads)


async def test_a_download_that_nobody_reads_ends(registry: Registry, folder: Path) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
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
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
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
    assert 0 < models.kept_bytes < done.size_bytes, "the verified chunks stay"


async def test_bit_rot_in_the_blob_store_never_reaches_a_folder(
    registry: Registry, folder: Path, tmp_path: Path
) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
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
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
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
    done = await publish_any(registry.channel, root, "tiny", metadata=ADMIN)
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
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
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
from services.adapters.model_files.cache import ModelFiles
from services.adapters.grpc.registry_client import RegistryClient
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
    channel = open_channel(address)
    files = ModelFiles(Slow(lambda: channel, "t" * 40), Path(root), SystemClock(), max_bytes=10**9)
    await files.fetch("tiny", digest)

asyncio.run(main())
"""


async def test_fetch_goes_on_after_sigkill(registry: Registry, folder: Path, tmp_path: Path) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
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
