"""A gateway without fixed-cost models."""

from __future__ import annotations

from typing import Any, NoReturn

from services.core.errors import Unimplemented


class NoRows:
    """Implements ``RowsCalls``: every call is refused."""

    async def embed(self, *_: Any, **__: Any) -> NoReturn:
        raise Unimplemented("this server serves no fixed-cost models")

    score = rerank = infer = describe = embed
