"""Check that a version can be served, before it is created: its small files are read like in production."""

from __future__ import annotations

import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Final

from fairway.formats import drafts
from fairway.formats.servable import INDEX, checkpoint_problem
from fairway.formats.version_files import GATEWAY_FILES
from services.adapters.threads import in_thread
from services.core.errors import FailedPrecondition, InvalidInput
from services.core.manifest import Manifest, ManifestFile
from services.ports.blob_store import BlobStore
from services.ports.text_check import TextCheck

_READ: Final = frozenset((*GATEWAY_FILES, INDEX, f"{drafts.FOLDER}/config.json", f"{drafts.FOLDER}/{INDEX}"))
_NEXT: Final = "publish it for another engine, or repair it"


async def require_servable(blobs: BlobStore, manifest: Manifest, digest: str, texts: TextCheck) -> None:
    """Return if the engine and the gateways can serve a verified version.

    Raises InvalidInput that names the unusable file, Unavailable where the check could not run.
    """
    with tempfile.TemporaryDirectory(prefix="fw-text-") as name:
        folder = Path(name)
        for file in manifest.files:
            if file.path in _READ:
                await _copy(blobs, file, folder / file.path)
        names = [file.path for file in manifest.files]
        problem = await in_thread(checkpoint_problem, names, lambda path: (folder / path).read_bytes())
        if not problem:
            try:
                problem = await texts.fault(folder, digest)
            except FailedPrecondition as error:
                problem = error.message
    if problem:
        raise InvalidInput(f"the version cannot be served here: {problem}; {_NEXT}", field="manifest.files")


async def _copy(blobs: BlobStore, file: ManifestFile, path: Path) -> None:
    """Write a file of at most 64 MiB, the limit of a text file."""
    body = bytearray()
    for chunk in file.chunks:
        async with aclosing(blobs.get(chunk)) as pieces:
            async for piece in pieces:
                body += piece
    path.parent.mkdir(exist_ok=True)
    await in_thread(path.write_bytes, body)
