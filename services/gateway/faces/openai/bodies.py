"""Request bodies: read within memory bounds, per tenant and in total, and parsed beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from services.gateway.faces.openai.errors import HttpProblem
from services.gateway.faces.openai.types import is_cheap

T = TypeVar("T")

# A small body is not accounted: its connection bounds it.
FREE_BYTES: Final = 64 * 1024
_TENANT_BODIES: Final = 4
_ALL_BODIES: Final = 16
_RETRY_S: Final = 1.0


class BodyReader:
    """Accounts for the bytes of bodies that are being read, and parses bodies.

    One tenant's large bodies take at most four times the largest size, those of all tenants sixteen times.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_tenant_bytes = _TENANT_BODIES * max_body_bytes
        self._max_bytes = _ALL_BODIES * max_body_bytes
        self._held: dict[str, int] = {}
        self._parsing = asyncio.Lock()

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    @contextmanager
    def account(self, tenant_id: str) -> Iterator[Callable[[int], None]]:
        """Yield the function to call with the present size of a body; the reservation lasts until the block
        ends.

        The call raises HttpProblem when the bound is reached.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if size <= FREE_BYTES:
                return
            more = size - held
            tenant_bytes = self._held.get(tenant_id, 0) + more
            if tenant_bytes > self._max_tenant_bytes:
                raise HttpProblem(
                    429, "too many large bodies of this tenant at once", close=True, retry_after_s=_RETRY_S
                )
            if self.held_bytes + more > self._max_bytes:
                raise HttpProblem(503, "too many large bodies at once", close=True, retry_after_s=_RETRY_S)
            self._held[tenant_id], held = tenant_bytes, size

        try:
            yield hold
        finally:
            if held:
                self._held[tenant_id] -= held
                if not self._held[tenant_id]:
                    del self._held[tenant_id]

    async def parse(self, parse: Callable[[bytes], T], body: bytes) -> T:
        """Return the result of ``parse``, which runs in a thread unless the body is cheap.

        One at a time: decoding holds the interpreter lock, so several threads would stop the loop for the sum
        of their times.
        """
        if is_cheap(body):
            return parse(body)
        async with self._parsing:
            return await asyncio.to_thread(parse, body)
