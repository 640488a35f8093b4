"""What this gateway remembers of recent requests of fixed-cost models, for operators. Single event loop."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from services.core.fixed_cost.explained import RowsExplanation

MAX_REQUESTS: Final = 4096


class RowExplanations:
    """The newest requests, by id. A request that ran again is remembered as it ran last."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._most = max_requests
        self._found: OrderedDict[str, RowsExplanation] = OrderedDict()

    def add(self, request_id: str, found: RowsExplanation) -> None:
        self._found[request_id] = found
        self._found.move_to_end(request_id)
        if len(self._found) > self._most:
            self._found.popitem(last=False)

    def find(self, request_id: str) -> RowsExplanation | None:
        return self._found.get(request_id)
