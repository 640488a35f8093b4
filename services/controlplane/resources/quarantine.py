"""The fleet's quarantine: the operations of operators. Gateways add the entries."""

from __future__ import annotations

import structlog

from services.controlplane.fleet import readable
from services.core.errors import Conflict, NotFound
from services.core.paging import page_of
from services.core.records import QUARANTINE, quarantine_key
from services.ports.clock import Clock
from services.ports.poison.quarantine import Quarantined
from services.ports.store import Committed, Delete, ModRevisionIs, Store
from services.runtime.idempotent_writes import RequestLog, WriteAnswer, WriteRequest, WriteSet, fingerprint_of

log = structlog.get_logger()


class QuarantinedInputs:
    """Stateless: every answer is one read, every write is conditional on it."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._requests = RequestLog(store)

    async def page(
        self, *, model: str = "", version_digest: str = "", size: int = 0, token: str = ""
    ) -> tuple[tuple[Quarantined, ...], str]:
        """Return a page of the entries in force, by version and fingerprint, and the next page's token."""
        prefix = quarantine_key(version_digest, "") if version_digest else QUARANTINE
        listed = [readable(entry, Quarantined) for entry in (await self._store.list(prefix)).entries]
        now_s = self._clock.unix_s()
        found = [
            one for one in listed if one is not None and now_s < one.until_unix_s and model in ("", one.model)
        ]
        return page_of(sorted(found, key=_name), _name, size=size, token=token)

    async def delete(self, version_digest: str, fingerprint: str, *, request_id: str = "") -> None:
        """Remove an entry: each gateway admits the input once its view lacks it.

        Raises NotFound, Conflict when it is being changed.
        """
        key = quarantine_key(version_digest, fingerprint)
        request = WriteRequest("quarantined", request_id, fingerprint_of("delete", key.encode()))
        if await self._requests.answered(request) is not None:
            return
        entry = await self._store.get(key)
        if entry is None:
            raise NotFound(
                f"no input {fingerprint} of {version_digest} is in quarantine",
                version_digest=version_digest,
                fingerprint=fingerprint,
            )
        write = WriteSet([ModRevisionIs(key, entry.mod_revision)], [Delete(key)])
        done = await self._requests.commit(write, request, WriteAnswer())
        if not isinstance(done, Committed) and await self._requests.answered(request) is None:
            raise Conflict(f"the input {fingerprint} is being changed; try again", fingerprint=fingerprint)
        log.info("quarantine.lifted", version_digest=version_digest, fingerprint=fingerprint)


def _name(entry: Quarantined) -> str:
    return f"{entry.version_digest}/{entry.fingerprint}"
