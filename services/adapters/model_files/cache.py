"""A cache of verified model files on the local disk, bounded in size; each is fetched once, from the registry
or, with a ``Swarm``, from other nodes.

Verification:

- every chunk when it is received, before it is written;
- every file's digest before its folder becomes visible;
- every chunk of a stored folder again at its first use in a process, and whenever a caller is about to load
  it (``recheck``);
- presence and sizes at each use.

The folder of an adapter also has the files of its base that it lacks: readers need not look elsewhere.

A damaged chunk is fetched again once; a second failure is an IntegrityError.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog

from services.adapters.model_files.chunk_fetcher import ChunkFetcher
from services.adapters.model_files.folders import ModelFolders, chunks_are_good
from services.adapters.model_files.kept_chunks import KeptFolder, PartialFiles, chunks_in
from services.adapters.model_files.shared_chunks import SharedVersion
from services.adapters.model_files.swarm import Swarm
from services.adapters.threads import in_thread
from services.core.errors import (
    FailedPrecondition,
    IntegrityError,
    NotFound,
    OverQuota,
    StoreUnavailable,
    Unimplemented,
)
from services.core.manifest import (
    Manifest,
    ManifestFile,
    canonical_json,
    is_digest,
    on_base,
    parse,
    sha256_of,
)
from services.core.rollouts.computation import computation_digest
from services.ports.clock import Clock
from services.ports.registry import VersionSource

log = structlog.get_logger()
T = TypeVar("T")

Progress = Callable[[float], None]
Chooser = Callable[[str], bool]

_HEX_DIGITS: Final = 64  # hex digits of the version at the beginning of a folder's name
_STALE_PARTIALS: Final = 8
RESERVE_BYTES: Final = 64 * 1024 * 1024
_OWNED: Final = "the folder of model files is owned by another process: give each its own FAIRWAY_STATE_DIR"
SWARM_BYTES: Final = 16 * 1024 * 1024  # least size of a version that comes from a swarm
_MOST_BASES: Final = 4  # versions whose chunks a fetch reuses

_Share = Callable[..., SharedVersion]


@dataclass(slots=True)
class _Kept:
    """A complete folder. ``use`` orders folders by last use; ``checked``: verified in this process.

    ``inodes``: the sizes of its files, which other folders may share.
    """

    inodes: dict[int, int]
    use: int
    pins: int = 0
    checked: bool = False


@dataclass(slots=True)
class _Turn:
    """Lock for one fetch of a folder at a time; ``waiting`` counts the callers that wait for or hold it."""

    lock: asyncio.Lock
    waiting: int = 0


class ModelFiles:
    """Owns everything below ``root``, which no other process may use at the same time.

    ``max_bytes`` bounds the folders together. Unfinished downloads are evicted first, then the least recently
    used folder that is not pinned. A returned folder stays while pinned: call ``pin`` before the next await.
    A spare pin yields to fetches that are not ``spare``.
    """

    def __init__(
        self,
        registry: VersionSource,
        root: Path,
        clock: Clock,
        *,
        max_bytes: int,
        reserve_bytes: int = RESERVE_BYTES,
        found_damaged: Callable[[], None] = lambda: None,
        swarm: Swarm | None = None,
    ) -> None:
        """``reserve_bytes`` of the disk stay free. ``found_damaged`` is called for each
        folder whose content does not match its digests. ``swarm`` shares whole versions with other nodes."""
        self._registry = registry
        self._folders = ModelFolders(root)
        self._chunks = ChunkFetcher(registry, clock)
        self._max_bytes = max_bytes
        self._reserve_bytes = reserve_bytes
        self._found_damaged = found_damaged
        self._swarm = swarm
        self._kept: dict[str, _Kept] = {}
        self._turns: dict[str, _Turn] = {}
        self._reserved: dict[str, int] = {}
        self._spare: Counter[str] = Counter()  # spare pins, which may outlive their folders
        # Sizes by inode of unfinished downloads that no caller fetches, the oldest first.
        self._partials: dict[str, dict[int, int]] = {}
        # Sizes of links by inode, for each folder that is being fetched.
        self._linked: dict[str, dict[int, int]] = {}
        self._uses = 0
        self._opened = False
        self._room = asyncio.Lock()

    async def own(self) -> None:
        """Lock the root, if its disk works; a disk error is reported by the first fetch instead.

        Raises FailedPrecondition when another process owns it.
        """
        try:
            await self._open()
        except BlockingIOError as exc:
            raise FailedPrecondition(_OWNED) from exc
        except OSError as exc:
            log.warning("model_files.unusable", error=repr(exc))

    async def fetch(
        self,
        model: str,
        digest: str,
        *,
        only: Chooser | None = None,
        progress: Progress | None = None,
        recheck: bool = False,
        spare: bool = False,
    ) -> Path:
        """Return a folder with the verified files of a version, or with those whose path ``only`` selects.

        Callers of one folder share one download. It resumes from the chunks of an earlier one, in this
        process or a killed one. ``progress`` receives 0..1 of the bytes. ``recheck``: every chunk is read
        again, even if it was verified before. ``spare``: it takes no room from unfinished downloads and spare
        pins. Raises NotFound, IntegrityError, FailedPrecondition (larger than the bound), StoreUnavailable
        (disk), Unavailable.
        """
        if not is_digest(digest):
            raise NotFound(f"{digest[:80]} is no digest of a version", digest=digest[:80])
        try:
            await self._open()
            await in_thread(self._folders.make)
            manifest = await self._readable(model, digest)
            files = tuple(file for file in manifest.files if only is None or only(file.path))
            if not files:
                raise NotFound(f"no file of {digest} is selected", digest=digest)
            name = _folder_name(digest, files, whole=len(files) == len(manifest.files))
            folders = (self._folders.ready(name), self._folders.partial(name))
            share = partial(SharedVersion, model, digest, files, folders)
            have = partial(self._have, name, files, progress or (lambda _: None), recheck, share, spare)
            return await self._in_turn(name, have)
        except OSError as exc:
            raise self._disk_error(exc) from exc

    async def computation(self, model: str, digest: str, *, contents: Mapping[str, bytes]) -> str:
        """Return the model of the weights and the digest of the version's computation.

        Raises as ``fetch`` does.
        """
        manifest = await self.readable(model, digest)
        return f"{manifest.base_model or model} {await in_thread(computation_digest, manifest, contents)}"

    async def readable(self, model: str, digest: str) -> Manifest:
        """Return the manifest; of an adapter with the files, limits and weights of its base.

        Raises as ``fetch`` does.
        """
        try:
            await self._open()
            return await self._readable(model, digest)
        except OSError as exc:
            raise self._disk_error(exc) from exc

    async def _readable(self, model: str, digest: str) -> Manifest:
        manifest = await self._in_turn("manifest " + digest, partial(self._manifest, model, digest))
        if not (base := manifest.base_digest):
            return manifest
        named = manifest.base_model
        return on_base(
            manifest, await self._in_turn("manifest " + base, partial(self._manifest, named, base))
        )

    def pin(self, folder: Path, *, spare: bool = False) -> None:
        """Protect the folder from eviction until as many ``unpin`` calls. Raises NotFound if evicted.

        ``spare``: from eviction by spare fetches, and from others while these have another choice.
        """
        kept = self._kept.get(folder.name)
        if kept is None:
            raise NotFound(f"{folder.name} is not kept here any more")
        if spare:
            self._spare[folder.name] += 1
        else:
            kept.pins += 1

    def unpin(self, folder: Path, *, spare: bool = False) -> None:
        """Remove one pin, of the same kind."""
        if spare:
            assert self._spare[folder.name] > 0, "unpinned more often than pinned"
            self._spare -= Counter((folder.name,))
            return
        kept = self._kept[folder.name]
        assert kept.pins > 0, "unpinned more often than pinned"
        kept.pins -= 1

    @property
    def kept_bytes(self) -> int:
        """Bytes of all folders, what they share once; those of the files being fetched count as written."""
        inodes: dict[int, int] = {}
        complete = (kept.inodes for kept in self._kept.values())
        for one in (*self._partials.values(), *complete, *self._linked.values()):
            inodes |= one
        return sum(inodes.values()) + sum(self._reserved.values())

    def check_integrity(self) -> None:
        assert self.kept_bytes <= self._max_bytes, "more is kept than the bound allows"
        assert all(kept.pins >= 0 for kept in self._kept.values())
        assert not set(self._reserved) & set(self._kept), "a folder counts twice"

    def close(self) -> None:
        """Unlock the root for other processes. Nothing may be fetched afterwards."""
        self._folders.close()

    async def _open(self) -> None:
        async with self._room:
            if self._opened:
                return
            found = await in_thread(self._folders.open)
            for name, _ in sorted(found.items(), key=lambda item: item[1]):
                self._uses += 1
                self._kept[name] = _Kept(await in_thread(self._folders.inodes, name), self._uses)
            for name in await in_thread(self._folders.partials):
                self._partials[name] = await in_thread(self._folders.partial_inodes, name)
            self._opened = True

    async def _manifest(self, model: str, digest: str) -> Manifest:
        """Return the stored manifest, else the registry's: a worker can restart without the registry."""
        body = await in_thread(self._folders.read_manifest, digest)
        if body is not None:
            try:
                return parse(body, digest)
            except IntegrityError:
                log.warning("model_manifest.found_damaged", digest=digest)
        record, manifest = await self._registry.get_version(model, digest)
        body = canonical_json(manifest)
        if record.digest != digest or sha256_of(body) != digest:
            raise IntegrityError(f"the registry answered for {digest} with another version", digest=digest)
        await in_thread(self._folders.write_manifest, digest, body)
        return parse(body, digest)

    async def _in_turn(self, name: str, have: Callable[[], Awaitable[T]]) -> T:
        turn = self._turns.setdefault(name, _Turn(asyncio.Lock()))
        turn.waiting += 1
        try:
            async with turn.lock:
                return await have()
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                del self._turns[name]

    async def _have(
        self,
        name: str,
        files: Sequence[ManifestFile],
        progress: Progress,
        recheck: bool,
        share: _Share,
        spare: bool,
    ) -> Path:
        if await self._is_good(name, files, recheck=recheck):
            await in_thread(self._folders.touch, name)
        else:
            await self._download(name, files, progress, share, spare)
        if (swarm := self._swarm_of(name, files)) is not None:
            swarm.share(share())
        self._uses += 1
        self._kept[name].use = self._uses
        progress(1.0)
        return self._folders.ready(name)

    def _swarm_of(self, name: str, files: Sequence[ManifestFile]) -> Swarm | None:
        """Return the swarm of a folder; None: a smaller or no whole version comes from the registry alone."""
        is_whole = len(name) == _HEX_DIGITS
        return self._swarm if is_whole and sum(file.size_bytes for file in files) >= SWARM_BYTES else None

    async def _is_good(self, name: str, files: Sequence[ManifestFile], *, recheck: bool) -> bool:
        kept = self._kept.get(name)
        if kept is None:
            return False
        good = await in_thread(self._folders.present, name, files)
        if good and (recheck or not kept.checked):
            kept.pins += 1  # not evicted while it is read
            try:
                good = await chunks_are_good(self._folders.ready(name), files)
            finally:
                kept.pins -= 1
        kept.checked = good
        if good:
            return True
        log.warning("model_folder.found_damaged", folder=name)
        self._found_damaged()
        if kept.pins:
            raise IntegrityError(f"the files of {name} are damaged while in use", folder=name)
        del self._kept[name]
        self._partials[name] = kept.inodes
        self._share_no_more(name)
        await in_thread(self._folders.demote, name)
        return False

    def _share_no_more(self, name: str) -> None:
        if self._swarm is not None:
            self._swarm.leave("sha256:" + name)

    async def _download(
        self, name: str, files: Sequence[ManifestFile], progress: Progress, share: _Share, spare: bool
    ) -> None:
        total = sum(file.size_bytes for file in files)
        self._require_bound(total)
        meter, linked = _Meter(total, progress), self._linked.setdefault(name, {})
        try:
            missing = [file for file in files if not await self._link(name, file, meter, linked)]
            await self._make_room(name, sum(file.size_bytes for file in missing), spare)
            await self._fetch_missing(name, files, missing, meter, share, spare)
        finally:
            del self._linked[name]
            if found := self._folders.partial_inodes(name):
                self._partials[name] = found
        log.info("model_folder.completed", folder=name, size_bytes=total, linked=len(files) - len(missing))

    async def _link(self, name: str, file: ManifestFile, meter: _Meter, linked: dict[int, int]) -> bool:
        """Link the file to an equal one that is here, and count it: the other may be evicted meanwhile."""
        inode = await in_thread(self._folders.link_twin, name, file)
        if not inode:
            return False
        linked[inode] = file.size_bytes
        meter.add(file.size_bytes)
        return True

    async def _fetch_missing(
        self,
        name: str,
        files: Sequence[ManifestFile],
        missing: Sequence[ManifestFile],
        meter: _Meter,
        share: _Share,
        spare: bool,
    ) -> None:
        """Fetch what no folder has, for which room is reserved; complete the folder."""
        try:
            names = self._last_used() if missing else []
            with self._pinned(names):
                kept = await in_thread(lambda: chunks_in(map(self._kept_folder, names), missing))
                shared = share(base=kept.base)
                partial_files = PartialFiles(self._folders, name, missing, shared, meter.add)
                await partial_files.open(kept)
            # Without its base a spare fetch goes on, with whole chunks.
            with self._pinned([] if spare else [one for one in names if shared.base.digest.endswith(one)]):
                await self._receive(partial_files, shared, self._swarm_of(name, files))
            try:
                await in_thread(self._folders.promote, name, files)
            finally:
                # The caller was cancelled after the rename: the folder exists and counts.
                if self._folders.ready(name).exists():
                    self._uses += 1
                    self._kept[name] = _Kept(self._folders.inodes(name), self._uses, checked=True)
        except BaseException as error:
            self._share_no_more(name)
            # On a full disk no partial file stays. After a kill or a lost connection, verified chunks do.
            if isinstance(error, OSError):
                await in_thread(self._folders.drop_partial, name)
            raise
        finally:
            del self._reserved[name]

    def _last_used(self) -> list[str]:
        """Return the whole versions that were used last, the last first."""
        whole = [name for name in self._kept if len(name) == _HEX_DIGITS]
        return sorted(whole, key=lambda name: -self._kept[name].use)[:_MOST_BASES]

    @contextmanager
    def _pinned(self, names: Sequence[str]) -> Iterator[None]:
        pinned = [self._kept[name] for name in names]
        for kept in pinned:
            kept.pins += 1
        try:
            yield
        finally:
            for kept in pinned:
                kept.pins -= 1

    def _kept_folder(self, name: str) -> KeptFolder:
        digest = "sha256:" + name
        try:
            manifest = parse(self._folders.read_manifest(digest) or b"", digest)
        except IntegrityError:  # it is damaged, or gone
            manifest = Manifest(())
        return KeptFolder(digest, self._folders.ready(name), manifest)

    async def _receive(self, files: PartialFiles, shared: SharedVersion, swarm: Swarm | None) -> None:
        """Complete the files from the swarm, and from the registry alone what no swarm sends."""
        if swarm is not None:
            try:
                await swarm.fetch(shared, files.take)
            except (Unimplemented, OverQuota) as error:
                log.warning("model_folder.not_from_swarm", digest=shared.digest, error=error.message)
            if shared.lacking():
                swarm.leave(shared.digest)
        for index in shared.lacking():
            await files.take(index, await self._chunks.fetch(*shared.places[index][0]))
        await files.finish()

    def _require_bound(self, size_bytes: int) -> None:
        """Raise FailedPrecondition for a version that can never fit."""
        if size_bytes > self._max_bytes:
            raise FailedPrecondition(
                f"the version has {size_bytes} bytes; the cache of model files holds {self._max_bytes}: "
                "raise FAIRWAY_MODEL_CACHE_BYTES",
                size_bytes=size_bytes,
                max_bytes=self._max_bytes,
            )

    async def _make_room(self, name: str, size_bytes: int, spare: bool) -> None:
        """Reserve the size, evicting other folders; one fetch at a time, so that each counts the others'."""
        async with self._room:
            self._partials.pop(name, None)  # the reserved bytes include them
            while self.kept_bytes + size_bytes > self._max_bytes:
                await self._evict_one(size_bytes, spare)
            await self._require_disk(name, size_bytes)
            self._reserved[name] = size_bytes

    async def _evict_one(self, needed_bytes: int, spare: bool) -> None:
        for other in self._partials if not spare else ():  # a version that is to run may resume them
            if other not in self._turns:
                await self._drop_partial(other)
                return
        idle = [
            (self._spare[name] > 0, kept.use, name)
            for name, kept in self._kept.items()
            if not kept.pins and name not in self._turns and not (spare and self._spare[name])
        ]
        if not idle:
            raise StoreUnavailable(
                f"no room for {needed_bytes} bytes: of the {self._max_bytes} of the cache of model files "
                f"{self.kept_bytes} are in use; take a version off this worker or raise "
                "FAIRWAY_MODEL_CACHE_BYTES",
                retry_after_s=10.0,
                needed_bytes=needed_bytes,
                used_bytes=self.kept_bytes,
                max_bytes=self._max_bytes,
            )
        name = min(idle)[2]
        kept = self._kept.pop(name)
        self._share_no_more(name)
        try:
            await in_thread(self._folders.drop, name)
        except OSError:
            if self._folders.ready(name).exists():  # the removal failed: the folder still counts
                self._kept[name] = kept
            raise
        log.info("model_folder.evicted", folder=name)
        needed = {other[:_HEX_DIGITS] for other in (*self._kept, *self._turns)}
        await in_thread(self._folders.forget_manifests, name[:_HEX_DIGITS], needed)

    async def _drop_partial(self, name: str) -> None:
        """Remove an unfinished download that no caller fetches; one that comes meanwhile waits."""
        self._partials.pop(name, None)
        await self._in_turn(name, partial(in_thread, self._folders.drop_partial, name))

    async def _require_disk(self, name: str, size_bytes: int) -> None:
        """Remove unfinished downloads, oldest first, while there are too many or the disk is nearly full."""
        idle = [other for other in await in_thread(self._folders.partials) if other not in self._turns]
        for position, other in enumerate(idle):
            many = len(idle) - position > _STALE_PARTIALS
            if (many or await self._shortage(name, size_bytes) is not None) and other not in self._turns:
                await self._drop_partial(other)
        if (shortage := await self._shortage(name, size_bytes)) is not None:
            raise shortage

    async def _shortage(self, name: str, size_bytes: int) -> StoreUnavailable | None:
        """Return an error unless the disk has room for what a fetch has yet to write, beside the others'."""
        missing: dict[str, int] = {}
        for other, whole_bytes in (*self._reserved.items(), (name, size_bytes)):
            own = await in_thread(partial(self._folders.partial_inodes, other, links=False))
            written = own.keys() - self._linked.get(other, {}).keys()
            missing[other] = max(0, whole_bytes - sum(own[inode] for inode in written))
        needed = missing.pop(name)
        kept = self._reserve_bytes + sum(missing.values())
        free = await in_thread(self._folders.free_bytes)
        return _disk_full(free, needed, kept) if needed and free < needed + kept else None

    def _disk_error(self, exc: OSError) -> StoreUnavailable:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = -1
            with suppress(OSError):
                free = self._folders.free_bytes()
            return _disk_full(free, 0)
        if isinstance(exc, BlockingIOError):
            return StoreUnavailable(_OWNED, retry_after_s=10.0)
        name = errno.errorcode.get(exc.errno or 0, "EIO")
        return StoreUnavailable(f"the disk of the model files answered {name}", errno=name)


class _Meter:
    """Converts bytes into a progress ratio for the callback."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._total = total_bytes
        self._done = 0
        self._progress = progress

    def add(self, size_bytes: int) -> None:
        self._done += size_bytes
        self._progress(self._done / max(1, self._total))


def _disk_full(free_bytes: int, needed_bytes: int, kept_bytes: int = 0) -> StoreUnavailable:
    return StoreUnavailable(
        f"the disk of the model files is full: {free_bytes} bytes free"
        + (f", {needed_bytes} needed beside {kept_bytes} reserved" if needed_bytes else "")
        + "; free some, lower FAIRWAY_DISK_RESERVE_BYTES, or point FAIRWAY_STATE_DIR to a larger disk",
        retry_after_s=30.0,
        free_bytes=free_bytes,
        needed_bytes=needed_bytes,
    )


def _folder_name(digest: str, files: Sequence[ManifestFile], *, whole: bool) -> str:
    name = digest.removeprefix("sha256:")
    if whole:
        return name
    chosen = hashlib.sha256("\0".join(file.path for file in files).encode()).hexdigest()
    return f"{name}-{chosen[:16]}"
