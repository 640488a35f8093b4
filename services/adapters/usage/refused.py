"""Usage events that the ledger refused for good, and outbox files with damaged bytes, in a folder of files.

They are set aside so that what waits behind them is sent. The next life of the process sends the events
again, each as a source of its own, because the ledger has passed over their numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from services.adapters.synced_files import replace_file, sync_folder

log = structlog.get_logger()

MAX_BYTES: Final = 16 * 1024**2
MAX_FILES: Final = 1000
EVENT: Final = ".events"
DAMAGED: Final = ".damaged"
_AGAIN: Final = "-x"


def name_of(source: str, number: int) -> str:
    """Return the name of a refused event's file: its new source, unless it was sent again already."""
    if origin_of(source) is None:
        source, number = f"{source}{_AGAIN}{number}", 1
    return f"{source}.{number:012d}{EVENT}"


def origin_of(source: str) -> tuple[str, int] | None:
    """Return where an event that is sent again comes from; None for the source of a process."""
    origin, _, number = source.rpartition(_AGAIN)
    return (origin, int(number)) if origin and number.isdecimal() else None


class RefusedEvents:
    """Owner of the folder. Every method but ``bytes`` and ``count`` does file I/O, for a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}

    @property
    def count(self) -> int:
        return len(self._sizes)

    def keep(self, name: str, data: bytes) -> bool:
        """Store a framed event. Returns False when there is no room. Raises OSError."""
        others = [size for other, size in self._sizes.items() if other != name]
        if len(others) >= MAX_FILES or sum(others) + len(data) > MAX_BYTES:
            return False
        self._sizes[name] = replace_file(self._folder / name, data)
        return True

    def keep_damaged(self, file: Path) -> bool:
        """Store a copy of a file with damaged bytes, which is not sent again. The same otherwise."""
        return self.keep(f"{file.stem}{DAMAGED}", file.read_bytes())

    def move_unreadable(self, file: Path) -> None:
        """Take the file itself, if it is there. Raises OSError."""
        if file.exists():
            self._folder.mkdir(mode=0o700, exist_ok=True)
            name = f"{file.stem}{DAMAGED}"
            self._sizes[name] = file.stat().st_size
            file.replace(self._folder / name)

    def release_one(self, name: str, to: Path) -> int:
        """Move an event back to the outbox; return its size. Raises OSError."""
        (self._folder / name).replace(to / name)
        sync_folder(to)
        return self._sizes.pop(name)

    def release(self, to: Path) -> None:
        """Move the events back to the outbox. Raises OSError."""
        found = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        for path in found:
            if path.suffix == EVENT:
                path.replace(to / path.name)
            elif path.suffix == DAMAGED:
                self._sizes[path.name] = path.stat().st_size
        if found:
            sync_folder(to)
