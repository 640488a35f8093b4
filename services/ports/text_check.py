"""Port for checking a version's text files in the way a gateway uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class TextCheck(Protocol):
    async def fault(self, folder: Path, version_digest: str) -> str:
        """Return why a gateway cannot render conversations of this version; empty when it can or need not.

        Raises FailedPrecondition for files that a gateway cannot serve at all, Unavailable where a retry may
        help.
        """
