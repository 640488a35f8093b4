"""Versions that this worker holds without running them: on its disk, and in its page cache."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from services.core.errors import FairwayError
from services.core.records import AssignedVersion
from services.ports.clock import Clock
from services.worker.slots.version_files import LocalFiles

log = structlog.get_logger()
RETRY_S: Final = 30.0


class Prefetcher:
    """Fetches one version at a time. Versions that are to run may evict what is prefetched, and as a last
    choice what a revert needs, which is pinned.
    """

    def __init__(
        self, files: Callable[[AssignedVersion], LocalFiles], clock: Clock, changed: Callable[[], None]
    ) -> None:
        """``changed`` is called when ``present`` has another version."""
        self._files = files
        self._clock = clock
        self._changed = changed
        self._wanted: tuple[AssignedVersion, ...] = ()
        self._folders: dict[str, Path] = {}
        self._pinned: dict[str, LocalFiles | None] = {}  # the files that stay; None: not fetched yet
        self._asked = asyncio.Event()

    def want(self, versions: Sequence[AssignedVersion], pinned: Sequence[AssignedVersion] = ()) -> None:
        """Fetch these from now on, the likeliest first. Others stay until they are evicted.

        ``pinned`` come before ``versions`` and stay until they are no longer among them, or yield.
        """
        staying = {one.version_digest for one in pinned}
        if self._wanted == (wanted := (*pinned, *versions)) and staying == self._pinned.keys():
            return
        before, self._wanted = self._pinned, wanted
        self._pinned = {digest: before.pop(digest, None) for digest in sorted(staying)}
        for files in before.values():
            if files is not None:
                files.unpin()
        self._asked.set()

    @property
    def present(self) -> tuple[str, ...]:
        """The digests of those wanted that are here, sorted."""
        wanted = {one.version_digest for one in self._wanted}
        return tuple(
            sorted(digest for digest, folder in self._folders.items() if digest in wanted and folder.is_dir())
        )

    async def run(self) -> None:
        """Fetch what is wanted, until cancelled. What fails is fetched again after ``RETRY_S``."""
        while True:
            self._asked.clear()
            for digest, files in self._pinned.items():
                if files is not None and files.lost():
                    self._pinned[digest] = None
            here = {*self.present} - {digest for digest, files in self._pinned.items() if files is None}
            missing = [one for one in self._wanted if one.version_digest not in here]
            for version in missing:
                await self._fetch(version)
                if self._asked.is_set():
                    break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._asked.wait()

    async def _fetch(self, version: AssignedVersion) -> None:
        files = self._files(version)
        try:
            # It reads every chunk, so that the weights are in the page cache too.
            await files.fetch(lambda _: None, spare=True)
        except FairwayError as error:
            log.info("version.not_prefetched", digest=version.version_digest, reason=error.reason)
            return
        folder = files.folder
        if self._pinned.get(version.version_digest, files) is None:
            self._pinned[version.version_digest] = files
        else:
            files.unpin()
        if folder is not None:
            self._folders[version.version_digest] = folder
            log.info("version.prefetched", digest=version.version_digest)
            self._changed()
