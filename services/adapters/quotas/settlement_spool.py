"""Settlements that wait for the shared store, on disk: an append-only file, written outside the event loop.

One JSON array with its CRC-32 per line; lines of earlier versions have none. A damaged or torn line is
skipped, and a copy of the file is kept. A settlement that is sent twice counts once. One process at a time
owns the folder, because a second one would rewrite the file without the first one's lines.
"""

from __future__ import annotations

import asyncio
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog

from services.adapters.quotas.quota import HeldClaims, held_by, with_held
from services.adapters.synced_files import append_to_file, own_folder, replace_file
from services.adapters.threads import in_thread
from services.core.generation import Usage
from services.core.limits import share_of
from services.ports.limiter import Reservation
from services.runtime.process.tenant_turns import nobody

log = structlog.get_logger()

Settlement = tuple[Reservation, Usage]
MAX_BYTES: Final = 8 * 1024**2  # about 80,000 settlements
_FILE: Final = "settlements.log"


class _Line(msgspec.Struct, array_like=True):
    """One settlement. ``usage``: prompt, output and cached tokens."""

    tenant_id: str
    request_id: str
    local: bool
    usage: tuple[int, int, int]
    admitted_us: int
    held: HeldClaims


_LINES: Final = msgspec.json.Decoder(_Line)
# JSON has no raw 0x1f, so nothing that a client names looks like the end of a line.
_CHECKED: Final = re.compile(rb"(\[[^\x1f]*)\x1f([0-9a-f]{8})")


class SettlementSpool:
    """Owner of the file, used only in the event loop. One write at a time runs, in its own thread.

    After a failed write, the next ``add`` or ``rewrite`` tries again.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = folder / _FILE
        self._max_bytes = max_bytes
        self._stored_bytes = 0
        # bytes of waiting settlements; sent ones count until the next ``rewrite``
        self._of_tenant: Counter[str] = Counter()
        self._added: list[bytes] = []
        self._added_bytes = 0
        self._writing: asyncio.Future[int] | None = None
        self._refused = ""
        self._stale = False
        self.lost = 0  # damaged lines, of which none is settled
        self._lock = -1
        self._thread = ThreadPoolExecutor(1, "settlements")

    @property
    def size_bytes(self) -> int:
        """Bytes of the file and of the lines not written yet."""
        return self._stored_bytes + self._added_bytes

    @property
    def problem(self) -> str:
        """Why no settlement can be added; empty when one can."""
        if self._refused:
            return f"the disk does not take settlements ({self._refused})"
        return "as many settlements wait as may" if self.size_bytes >= self._max_bytes else ""

    @property
    def stale(self) -> bool:
        """The file contains settlements that are already settled, and needs a rewrite."""
        return self._stale or bool(self._refused)

    async def load(self) -> list[Settlement]:
        """Lock the folder and return the settlements that an earlier process left.

        Raises BlockingIOError when another process owns the folder, or OSError.
        """
        if self._lock < 0:
            self._lock = await in_thread(own_folder, self._path.parent)
        found, self._stored_bytes, self.lost = await in_thread(_load, self._path)
        self._counted(found)
        return found

    def is_share_full(self, tenant_id: str) -> bool:
        """Return whether the tenant's settlements fill half of the room, so that it may add no more."""
        return self._of_tenant[tenant_id] >= share_of(self._max_bytes)

    def add(self, reservation: Reservation, usage: Usage) -> None:
        """Write the settlement to disk in the background."""
        self._put(self._counted([(reservation, usage)]))
        self._write()

    def rewrite(self, pending: Iterable[Settlement]) -> None:
        """Replace the file by these, all that wait, in the background. It stays ``stale`` during a write."""
        self._stale = self._writing is not None
        if not self._stale and self.size_bytes:
            self._take()
            self._of_tenant.clear()
            self._begin(self._counted(pending), anew=True)

    async def close(self) -> None:
        """Return once the added settlements are written, or their write failed."""
        while self._writing is not None:
            await asyncio.wait({self._writing})
        self._thread.shutdown(wait=False)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _counted(self, settlements: Iterable[Settlement]) -> list[bytes]:
        """Return their lines and count them for their tenants."""
        lines = []
        for reservation, usage in settlements:
            lines.append(_line(reservation, usage))
            self._of_tenant[reservation.tenant_id] += len(lines[-1])
        return lines

    def _put(self, lines: list[bytes]) -> None:
        self._added += lines
        self._added_bytes += sum(map(len, lines))

    def _take(self) -> list[bytes]:
        lines, self._added, self._added_bytes = self._added, [], 0
        return lines

    def _write(self) -> None:
        if self._added and self._writing is None:
            self._begin(self._take(), anew=False)

    def _begin(self, lines: list[bytes], *, anew: bool) -> None:
        store = partial(replace_file if anew else append_to_file, self._path, b"".join(lines))
        self._writing = asyncio.get_running_loop().run_in_executor(self._thread, store)
        self._writing.add_done_callback(partial(self._written, lines), context=nobody())

    def _written(self, lines: list[bytes], writing: asyncio.Future[int]) -> None:
        self._writing = None
        error = asyncio.CancelledError() if writing.cancelled() else writing.exception()
        if error is None:
            self._refused, self._stored_bytes = "", writing.result()
            self._write()
            return
        if not self._refused:
            log.error("settlements.not_written", error=repr(error))
        self._refused = type(error).__name__
        self._put(lines)


def _line(reservation: Reservation, usage: Usage) -> bytes:
    line = _Line(
        reservation.tenant_id,
        reservation.request_id,
        reservation.local,
        (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens),
        reservation.admitted_us,
        held_by(reservation),
    )
    data = msgspec.json.encode(line)
    return b"%s\x1f%08x\n" % (data, zlib.crc32(data))


def _contents(data: bytes) -> Iterator[bytes]:
    """Yield the JSON of each settlement; nothing for a damaged one."""
    for line in filter(None, data.split(b"\n")):
        checked = _CHECKED.findall(line)  # several where a flipped bit joins lines
        for content, checksum in checked:
            yield content if zlib.crc32(content) == int(checksum, 16) else b""
        if not checked:
            yield line


def _load(path: Path) -> tuple[list[Settlement], int, int]:
    """Return the settlements, the size of the file and the number of damaged lines. Raises OSError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0, 0
    found: list[Settlement] = []
    damaged: list[int] = []
    for number, line in enumerate(_contents(data)):
        try:
            read = _LINES.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            damaged.append(number + 1)
            continue
        reservation = Reservation(read.tenant_id, read.request_id, read.local, admitted_us=read.admitted_us)
        found.append((with_held(reservation, read.held), Usage(*read.usage)))
    if damaged:
        log.error("settlements.line_damaged", lines=len(damaged), first=damaged[0])
        try:
            replace_file(path.with_suffix(".damaged"), data)
        except OSError as error:
            log.error("settlements.no_copy", error=repr(error))
    return found, len(data), len(damaged)
