"""Chunks of the complete folders of this node that a fetch reuses: equal ones, and bases of deltas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.adapters.model_files.folders import ChunkPlace
from services.adapters.model_files.shared_chunks import ChunkBase
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
    """Return what the fetch of these files reuses. Takes a thread for long manifests."""
    wanted = {chunk: file.chunk_bytes(at) for file in files for at, chunk in enumerate(file.chunks)}
    least_bytes = _LEAST_SHARE * sum(wanted.values())
    places: dict[str, ChunkPlace] = {}
    base = None
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
        if changed and sum(wanted[chunk] for chunk in (*here, *changed)) >= least_bytes:
            least_bytes = sum(wanted[chunk] for chunk in (*here, *changed))
            found = {
                chunk: ChunkPlace(kept.folder / old.path, old, at) for chunk, (old, at) in changed.items()
            }
            base = ChunkBase(kept.digest, found)
    return KeptChunks(places, base)
