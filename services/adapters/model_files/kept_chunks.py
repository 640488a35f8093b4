"""The files that a fetch completes, and what it reuses of complete folders: equal chunks, bases of deltas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.adapters.model_files.folders import (
    ChunkPlace,
    ModelFolders,
    finish_file,
    good_chunks,
    place_chunk,
)
from services.adapters.model_files.shared_chunks import ChunkBase, SharedVersion
from services.adapters.threads import in_thread
from services.core.errors import IntegrityError
from services.core.manifest import Manifest, ManifestFile, chunk_bases

_LEAST_SHARE = 0.25  # least share of a version's bytes that a base has, or has a chunk to change


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """A complete folder of a whole version."""

    digest: str
    folder: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class KeptChunks:
    """``places``: of chunks in complete folders, by digest. ``base``: the version that deltas are from."""

    places: dict[str, ChunkPlace] = field(default_factory=dict)
    base: ChunkBase | None = None

    def read(self, chunk: str) -> bytes | None:
        """Return a chunk, verified; None where no folder has it (any more). Blocks for I/O."""
        return self.places[chunk].read() if chunk in self.places else None


def chunks_in(folders: Iterable[KeptFolder], files: Sequence[ManifestFile]) -> KeptChunks:
    """Return what the fetch of these files reuses. Takes a thread for long manifests.

    The base is the version with most equal chunks; of those with as many, the one with most chunks to change,
    then the first.
    """
    wanted = {chunk: file.chunk_bytes(at) for file in files for at, chunk in enumerate(file.chunks)}
    least_bytes = _LEAST_SHARE * sum(wanted.values())
    places: dict[str, ChunkPlace] = {}
    base, nearest = None, (-1, -1)
    for kept in folders:
        own = kept.manifest.files
        here = {
            chunk: ChunkPlace(kept.folder / file.path, file, at)
            for file in own
            for at, chunk in enumerate(file.chunks)
            if chunk in wanted
        }
        places = {**here, **places}
        changed = chunk_bases(files, own)
        near = sum(wanted[chunk] for chunk in here), sum(wanted[chunk] for chunk in changed)
        if changed and sum(near) >= least_bytes and near > nearest:
            nearest = near
            found = {
                chunk: ChunkPlace(kept.folder / old.path, old, at) for chunk, (old, at) in changed.items()
            }
            base = ChunkBase(kept.digest, found)
    return KeptChunks(places, base)


class PartialFiles:
    """The files that one fetch completes: chunks come in any order, from any source, each written once."""

    def __init__(
        self,
        folders: ModelFolders,
        name: str,
        files: Sequence[ManifestFile],
        shared: SharedVersion,
        count: Callable[[int], None],
    ) -> None:
        """``name`` is the folder. ``count`` receives the size of each chunk that is there, per place."""
        self._folders = folders
        self._name = name
        self._files = files
        self._shared = shared
        self._count = count
        self._lacking = set[tuple[str, int]]()  # places without a good chunk: path and number

    async def open(self, kept: KeptChunks) -> None:
        """Make the files, and share what an earlier fetch wrote or another version has of them."""
        for file in self._files:
            path = await in_thread(self._folders.begin_file, self._name, file)
            for at, is_good in enumerate(await in_thread(good_chunks, path, file)):
                if is_good:
                    self._count(file.chunk_bytes(at))
                else:
                    self._lacking.add((file.path, at))
        shared = self._shared
        for index, places in enumerate(shared.places):
            if any((file.path, at) in self._lacking for file, at in places):
                data = await in_thread(kept.read, shared.chunks[index])
                if data is None:
                    continue
                await self.take(index, data)
            shared.add(index)

    async def take(self, index: int, data: bytes) -> None:
        """Write a verified chunk at every place without it. It is durable after ``finish``."""
        root = self._folders.partial(self._name)
        for file, at in self._shared.places[index]:
            if (file.path, at) in self._lacking:
                await in_thread(place_chunk, root / file.path, file.start(at), data)
                self._lacking.remove((file.path, at))
                self._count(len(data))

    async def finish(self) -> None:
        """Return once the files are on the disk. Raises IntegrityError if their chunks are not the files."""
        root = self._folders.partial(self._name)
        for file in self._files:
            if not await in_thread(finish_file, root / file.path, file):
                raise IntegrityError(
                    f"the chunks of {file.path} are not the file {file.digest}", path=file.path
                )
