"""The files that one fetch completes: chunks come in any order, from any source, and each is written once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.adapters.model_files.folders import ModelFolders, finish_file, good_chunks, place_chunk
from services.adapters.model_files.kept_chunks import KeptChunks
from services.adapters.model_files.shared_chunks import SharedVersion
from services.adapters.threads import in_thread
from services.core.errors import IntegrityError
from services.core.manifest import ManifestFile


class PartialFiles:
    """Of a version's files those that are lacking; only the fetch of the folder writes them."""

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
