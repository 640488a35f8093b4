"""How often names were requested lately, in bounded memory.

A count-min sketch that is halved from time to time (TinyLFU, Einziger et al., ACM TOS 2017). Names are hashes
already, so their bits are the positions. A request counts two, so that a name requested once outlives one
halving.
"""

from __future__ import annotations

from typing import Final

MOST: Final = 15  # requests; more count as these
_FULL: Final = 2 * MOST
_HALVED: Final = bytes(count // 2 for count in range(256))
_COLUMNS_PER_REQUEST: Final = 8  # at most one in fifty names is counted by collision alone


class FrequencySketch:
    """Two bytes for each of ``8 * history`` columns; after ``history`` requests every count is halved."""

    def __init__(self, history: int) -> None:
        self._history = max(1, history)
        columns = 1 << (_COLUMNS_PER_REQUEST * self._history - 1).bit_length()
        self._mask = columns - 1
        self._low = bytearray(columns)
        self._high = bytearray(columns)
        self._requests = 0

    def count(self, name: int) -> int:
        """Count one request; return how often the name was requested, this one included."""
        mask, low, high = self._mask, self._low, self._high
        left, right = name & mask, (name >> 32) & mask
        first, second = low[left], high[right]
        least = min(first, second)
        if least < _FULL:  # the larger of the two counts another name as well: it stays (conservative update)
            if first == least:
                low[left] = least + 2
            if second == least:
                high[right] = least + 2
            least += 2
        self._requests += 1
        if self._requests >= self._history:
            self._halve()
        return (least + 1) // 2

    def requests(self, name: int) -> int:
        """Return how often the name was requested lately; never an underestimate, halvings apart."""
        return (min(self._low[name & self._mask], self._high[(name >> 32) & self._mask]) + 1) // 2

    def _halve(self) -> None:
        self._low = self._low.translate(_HALVED)
        self._high = self._high.translate(_HALVED)
        self._requests = 0
