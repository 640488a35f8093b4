"""Which prefix blocks an engine has cached, and what of that the leader was not told yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

MAX_PREFIXES: Final = 65536  # of one version; what is cached beyond that is not told of


class PrefixSet:
    """A set with deltas. Bounded: a block beyond ``MAX_PREFIXES`` is not known here, nor is its leaving.

    The leader learns of the whole set in the first report of a stream and of changes after that.
    """

    def __init__(self, *, most: int = MAX_PREFIXES) -> None:
        self._most = most
        self._cached: dict[int, None] = {}
        self._untold: dict[int, bool] = {}  # True: it came; False: it left

    def __len__(self) -> int:
        return len(self._cached)

    def __iter__(self) -> Iterator[int]:
        return iter(self._cached)

    def __contains__(self, name: int) -> bool:
        return name in self._cached

    def change(self, added: Iterable[int], removed: Iterable[int]) -> None:
        """Note what one step brought and dropped; a block in both has left and come back."""
        for name in removed:
            if name in self._cached:
                del self._cached[name]
                self._note(name, came=False)
        for name in added:
            if name not in self._cached and len(self._cached) < self._most:
                self._cached[name] = None
                self._note(name, came=True)

    def follow(self, earlier: PrefixSet) -> None:
        """Take the place of a set whose engine is gone: what the leader knows of it has left."""
        told = [name for name in earlier._cached if not earlier._untold.get(name, False)]
        told += [name for name, came in earlier._untold.items() if not came]
        for name in told:
            if name not in self._cached:
                self._untold[name] = False
            else:
                self._untold.pop(name, None)

    def take(self, *, whole: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the blocks that came and that left since the last call; all there are when ``whole``."""
        untold, self._untold = self._untold, {}
        if whole:
            return tuple(self._cached), ()
        came = tuple(name for name, here in untold.items() if here)
        return came, tuple(name for name, here in untold.items() if not here)

    def _note(self, name: int, *, came: bool) -> None:
        if self._untold.pop(name, came) is came:  # else both are untold, and cancel out
            self._untold[name] = came
