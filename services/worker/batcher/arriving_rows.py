"""What a batcher observes of arriving rows: lengths, widths of padding, and when the next rows come."""

from __future__ import annotations

from collections import Counter
from typing import Final

from services.worker.batcher.policy.arrival_profile import ArrivalProfile
from services.worker.batcher.policy.length_buckets import LengthHistogram, choose_widths, width_of
from services.worker.batcher.policy.linger import Expected

ROWS_PER_CHOICE: Final = 1024  # rows after which the widths are chosen again
FIRST_ROWS: Final = 64  # rows before the first choice


class ArrivingRows:
    """Single writer: the batcher. ``now_s`` never falls."""

    def __init__(self, max_tokens: int, *, pads: bool = True) -> None:
        """``max_tokens`` 0: rows have no length, and one width, 0. Without ``pads`` a width is a length."""
        self._profile = ArrivalProfile()
        self._histogram = LengthHistogram(max_tokens) if max_tokens and pads else None
        self._widths: tuple[int, ...] = (max_tokens,)
        self._counts: Counter[int] = Counter()  # rows of each width since the widths were chosen
        self._until_choice = FIRST_ROWS

    @property
    def widths(self) -> tuple[int, ...]:
        return self._widths

    def note(self, length: int, now_s: float) -> int:
        """Count a row, and return the width to which it is padded."""
        self._profile.arrived(now_s)
        if self._histogram is not None:
            self._histogram.note(length)
        self._until_choice -= 1
        if not self._until_choice:
            self._until_choice = ROWS_PER_CHOICE
            self._choose()
        width = length if self._histogram is None else width_of(self._widths, length)
        self._counts[width] += 1
        return width

    def _choose(self) -> None:
        """Choose the widths of padded rows again; otherwise halve the counts, so that old sizes go."""
        if self._histogram is None:
            self._counts = Counter({width: rows // 2 for width, rows in self._counts.items() if rows > 1})
        elif (widths := choose_widths(self._histogram)) != self._widths:
            self._widths = widths
            self._counts.clear()

    def ended(self, rows: int, now_s: float) -> None:
        """Count a batch whose answers are on their way."""
        self._profile.ended(rows, now_s)

    def expected(self, width: int | None, now_s: float) -> Expected:
        """Return which arrivals of this width, or of all widths for None, are expected."""
        share = 1.0 if width is None else self._counts[width] / max(1, self._counts.total())
        returning = tuple((wait_s, back * share) for wait_s, back in self._profile.returning(now_s))
        return Expected(self._profile.rate_per_s(now_s) * share, returning)
