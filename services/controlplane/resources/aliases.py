"""Aliases: the operations of operators."""

from __future__ import annotations

import structlog

from services.controlplane.resources.resources import Resources, Stored
from services.core.aliases import ALIASES, Alias
from services.core.errors import AlreadyExists, InvalidInput, ModelNotFound
from services.core.records import DEPLOYMENTS
from services.ports.clock import Clock
from services.ports.store import ModRevisionIs, Store
from services.runtime.idempotent_writes import WriteSet

log = structlog.get_logger()


class Aliases:
    """Stateless. Each gateway uses a change once it receives it, for requests after that."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._kind = Resources(store, clock, ALIASES, Alias)

    async def create(self, alias: Alias, *, request_id: str = "") -> Stored[Alias]:
        """Store an alias. Raises AlreadyExists for the name of a deployment, and as ``update`` does."""
        request = self._kind.request("create", alias, request_id)
        stored = await self._kind.replayed(request)
        if stored is None:
            name = alias.meta.name
            if await self._store.get(DEPLOYMENTS + name) is not None:
                raise AlreadyExists(f"a deployment has the name {name}: give the alias another", name=name)
            await self._require_deployed(alias)
            alone = WriteSet((ModRevisionIs(DEPLOYMENTS + name, 0),))
            stored = await self._kind.create(alias, request, together=alone)
            log.info("alias.created", alias=name)
        return stored

    async def get(self, name: str) -> Stored[Alias]:
        return await self._kind.get(name)

    async def page(self, *, size: int = 0, token: str = "") -> tuple[tuple[Stored[Alias], ...], str]:
        """Return a page sorted by name, and the next page's token."""
        return await self._kind.page(size=size, token=token)

    async def update(self, alias: Alias, *, etag: str = "", request_id: str = "") -> Stored[Alias]:
        """Replace the sizes and labels. Raises InvalidInput; ModelNotFound without a deployment of a size."""
        request = self._kind.request("update", alias, request_id, etag=etag)
        if not await self._kind.done(request):
            await self._require_deployed(alias)
        stored = await self._kind.update(alias.meta.name, lambda _: alias, request, etag=etag)
        log.info("alias.updated", alias=alias.meta.name)
        return stored

    async def delete(self, name: str, *, etag: str = "", request_id: str = "") -> None:
        """Remove an alias. Requests that were admitted by it go on."""
        request = self._kind.request("delete", name, request_id, etag=etag)
        await self._kind.delete(name, request, etag=etag)
        log.info("alias.deleted", alias=name)

    async def _require_deployed(self, alias: Alias) -> None:
        """Return if its sizes are different deployments. One that is deleted later is passed over."""
        names = [size.deployment for size in alias.sizes]
        if not names or len(set(names)) < len(names):
            raise InvalidInput(
                "an alias has one or more sizes, each another deployment, the smallest first",
                field="alias.sizes",
            )
        for name in names:
            if await self._store.get(DEPLOYMENTS + name) is None:
                raise ModelNotFound(
                    f"there is no deployment {name!r}: create it first, and name it then",
                    model=name,
                    field="alias.sizes",
                )
