"""A worker before it loads a version: the signature first, then every digest; what runs goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from fairway.formats.signatures import SignerPolicy, sign
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.memory.store import MemoryStore
from services.adapters.model_files.cache import ModelFiles
from services.core.errors import SignatureMissing, StoreUnavailable
from services.core.records import (
    SIGNERS,
    AssignedVersion,
    LoadedVersion,
    Signatures,
    VersionState,
    dump,
    signatures_key,
)
from services.ports.store import Entry, Put
from services.runtime.clock import SystemClock
from services.runtime.version_trust import VersionTrust
from services.worker.slots.engine_settings import EngineSettings
from services.worker.slots.version_files import VersionFiles
from tests.integration.registry.harness import Counting, publish_any
from tests.integration.worker.harness import FolderSource, Harness, Sink, eventually, start_harness
from tests.support.registry import ADMIN, served
from tests.support.signing import key_file, policy_of

SETTINGS = EngineSettings(null_step_s=0.02, crash_backoff_first_s=0.05, failed_backoff_first_s=0.1)
CLOCK = SystemClock()


@dataclass
class Signed:
    """A worker, a published version, and its signature by the key of the policy."""

    worker: Harness
    source: Counting
    blobs: Path
    key: Path
    foreign: Path
    digest: str
    manifest: bytes

    async def put(self, key: str, record: object) -> None:
        await self.worker.store.commit([Put(key, dump(record))])

    async def sign(self, *bundles: str) -> None:
        await self.put(signatures_key("m", self.digest), Signatures(bundles))

    async def assign(self) -> None:
        await self.worker.assign(AssignedVersion("null", "m", self.digest, executor="null"))

    async def refused(self, reason: str) -> LoadedVersion:
        """Return what the worker reports once it refused the version for this reason."""
        await eventually(lambda: self._found() is not None and self.found.reason == reason, 20.0)
        return self.found

    async def ready(self) -> None:
        await eventually(lambda: self.worker.state(self.digest) is VersionState.READY, 30.0)

    @property
    def found(self) -> LoadedVersion:
        found = self._found()
        assert found is not None
        return found

    def _found(self) -> LoadedVersion | None:
        return next((version.record for version in self.worker.agent.status().versions), None)

    def start(self) -> Sink:
        sink = Sink()
        spec = self.worker.spec(max_tokens=200, version_digest=self.digest)
        generation = replace(spec.generation, version_digest=self.digest)
        self.worker.client.start(replace(spec, generation=generation), sink)
        return sink


@pytest_asyncio.fixture
async def signed(model_dir: Path, tmp_path: Path) -> AsyncIterator[Signed]:
    async with served(MemoryStore(CLOCK), FolderBlobs(tmp_path / "blobs"), CLOCK) as registry:
        done = await publish_any(registry.channel, model_dir, "m", metadata=ADMIN)
        manifest = b"".join([piece async for piece in registry.service.download(done.digest)])
        source = Counting(registry.client)
        files = ModelFiles(source, tmp_path / "cache", CLOCK, max_bytes=10**9)
        worker = await start_harness(model_dir, SETTINGS, assign=False, source=files)
        key, foreign = key_file(tmp_path, "release"), key_file(tmp_path, "foreign")
        made = Signed(worker, source, tmp_path / "blobs", key, foreign, done.digest, manifest)
        await made.put(SIGNERS + "m", policy_of("m", key))
        yield made
        await worker.close()
        files.close()


async def test_an_unsigned_version_is_refused_before_any_chunk_and_loads_once_it_is_signed(
    signed: Signed,
) -> None:
    await signed.assign()
    found = await signed.refused("SIGNATURE_MISSING")
    assert found.state is VersionState.FAILED
    assert found.message.startswith(f"{signed.digest} has no signature: key ")
    assert signed.source.downloads == []
    await signed.sign(sign(signed.manifest, signed.key))
    await signed.ready()


async def test_foreign_and_spoiled_signatures_are_refused_by_their_reason(signed: Signed) -> None:
    await signed.sign(sign(signed.manifest, signed.foreign))
    await signed.assign()
    await signed.refused("SIGNER_NOT_ALLOWED")
    good = sign(signed.manifest, signed.key)
    place = good.index('"sig":"') + 20
    await signed.sign(good[:place] + ("A" if good[place] != "A" else "B") + good[place + 1 :])
    await signed.refused("SIGNATURE_INVALID")
    await signed.sign(sign(b"another manifest", signed.key))
    await eventually(lambda: "of another version" in signed.found.message, 10.0)
    assert signed.source.downloads == []


async def test_streams_of_a_removed_signer_go_on_and_its_next_load_is_refused(signed: Signed) -> None:
    await signed.sign(sign(signed.manifest, signed.key))
    await signed.assign()
    await signed.ready()
    sink = signed.start()
    await eventually(lambda: len(sink.ids) > 2)
    await signed.put(SIGNERS + "m", policy_of("m", signed.foreign))
    await sink.wait(30.0)
    assert sink.end is not None, sink.refusal or sink.lost
    assert len(sink.ids) == 200
    os.kill(signed.worker.engine_pid, signal.SIGKILL)
    await signed.refused("SIGNER_NOT_ALLOWED")


class Interrupted(MemoryStore):
    """A store that does not answer while it is down."""

    is_down = False

    async def get(self, key: str) -> Entry | None:
        if self.is_down:
            raise StoreUnavailable("etcd did not answer")
        return await super().get(key)


async def test_the_last_decision_holds_while_the_store_is_down(model_dir: Path) -> None:
    store = Interrupted(CLOCK)
    version = AssignedVersion("null", "m", "sha256:" + "a" * 64, executor="null")
    files = VersionFiles(version, FolderSource(model_dir), None, CLOCK, VersionTrust(store, CLOCK))
    store.is_down = True
    with pytest.raises(StoreUnavailable):
        await files.fetch(lambda _: None)
    assert files.folder is None
    store.is_down = False
    await files.fetch(lambda _: None)
    store.is_down = True
    await files.checked(lambda _: None)
    store.is_down = False
    await store.commit([Put(SIGNERS + "m", dump(SignerPolicy("m", required=True)))])
    with pytest.raises(SignatureMissing):
        await files.checked(lambda _: None)


async def test_a_signature_does_not_make_up_for_a_flipped_byte(signed: Signed) -> None:
    await signed.sign(sign(signed.manifest, signed.key))
    chunk = next(one for one in signed.manifest.decode().split('"') if one.startswith("sha256:"))
    signed.source.flip[chunk] = 99
    name = signed.digest.removeprefix("sha256:")
    blob = signed.blobs / "sha256" / name[:2] / name
    body = blob.read_bytes()
    blob.chmod(0o600)
    blob.write_bytes(body.replace(b'"max_context_tokens":0', b'"max_context_tokens":9'))
    await signed.assign()
    assert "was lost or damaged" in (await signed.refused("INTEGRITY_ERROR")).message
    blob.write_bytes(body)
    await eventually(lambda: "twice" in signed.found.message, 20.0)
    assert signed.found.reason == "INTEGRITY_ERROR"
    signed.source.flip.clear()
    await signed.ready()
