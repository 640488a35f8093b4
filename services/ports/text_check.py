"""The port through which other roles have a version's text files tried as a gateway uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class TextCheck(Protocol):
    async def fault(self, folder: Path, version_digest: str) -> str:
        """Return why a gateway renders no conversation of this version; empty when it can, or need not.

        Raises FailedPrecondition for files with which a gateway serves nothing, Unavailable where a retry may
        help.
        """
