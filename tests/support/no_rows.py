"""A gateway without fixed-cost models."""

from __future__ import annotations

from typing import Any, NoReturn

from services.core.errors import Unimplemented
from services.gateway.rows.service import RowsService


class NoRows(RowsService):
    """Refuses every call."""

    def __init__(self) -> None: ...

    async def embed(self, *_: Any, **__: Any) -> NoReturn:
        raise Unimplemented("this server serves no fixed-cost models")

    score = rerank = infer = describe = embed
