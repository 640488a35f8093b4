"""The set of prefix blocks that an engine has cached, with the changes not yet reported to the leader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

MAX_PREFIXES: Final = 65536  # per version; blocks beyond it are not reported


class PrefixSet:
    """A bounded set with deltas. Blocks beyond ``MAX_PREFIXES`` are ignored, and so is their removal.

    The first report of a stream contains the whole set, later ones the changes.
    """

    def __init__(self, *, most: int = MAX_PREFIXES) -> None:
        self._most = most
        self._cached: dict[int, None] = {}
        self._unreported: dict[int, bool] = {}  # not reported yet; True: added, False: removed

    def __len__(self) -> int:
        return len(self._cached)

    def __iter__(self) -> Iterator[int]:
        return iter(self._cached)

    def __contains__(self, name: int) -> bool:
        return name in self._cached

    def change(self, added: Iterable[int], removed: Iterable[int]) -> None:
        """Apply what one step added and removed; a block in both was removed and then added again."""
        for name in removed:
            if name in self._cached:
                del self._cached[name]
                self._note(name, came=False)
        for name in added:
            if name not in self._cached and len(self._cached) < self._most:
                self._cached[name] = None
                self._note(name, came=True)

    def follow(self, earlier: PrefixSet) -> None:
        """Replace the set of an ended engine: record the removal of all its reported blocks."""
        reported = [name for name in earlier._cached if not earlier._unreported.get(name, False)]
        reported += [name for name, came in earlier._unreported.items() if not came]
        for name in reported:
            if name not in self._cached:
                self._unreported[name] = False
            else:
                self._unreported.pop(name, None)

    def take(self, *, whole: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the blocks added and removed since the last call; the full set as added when ``whole``."""
        unreported, self._unreported = self._unreported, {}
        if whole:
            return tuple(self._cached), ()
        came = tuple(name for name, here in unreported.items() if here)
        return came, tuple(name for name, here in unreported.items() if not here)

    def _note(self, name: int, *, came: bool) -> None:
        if self._unreported.pop(name, came) is came:  # an unreported opposite change cancels this one
            self._unreported[name] = came
