"""Index of cached prefix blocks by worker: a bounded table of block names, updated from worker reports.

A name identifies a whole prefix (``core.prefix``), so a worker that has a block has every block before it,
provided that it evicts the ends of chains first. The longest match of a prompt is therefore found by a binary
search: the tried positions are sums of powers of two, whatever the prompt's length. Tried names are marked as
used, so that names which later searches of the same prefix need stay in the table. A block that is missing in
the middle makes a search end before it: the match is then too short, never too long.

Memory: one row per name in flat columns. The holders of a row are one integer: the number of the only worker,
or a negated bit mask of several. 134 bytes per block with one holder. Workers are numbered. A released number
is masked out at once, and is reused after every row was cleaned of it, a few rows with each call.

Bound: at ``max_blocks`` names a new name evicts the next one that was not used since the hand last passed it
(CLOCK: Corbató, A Paging Experiment with the Multics System, 1968).

Expected blocks: a grant marks its prefix as expected on its worker for at most ``EXPECTED_S``, until reports
confirm it, so that a burst of requests with one new prefix goes to one worker. This does not apply to a
worker that never reported a cached block. A long prefix has one position in eight of its octave recorded.
Pure; single writer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Final

from services.core.prefix import MAX_PREFIX_BLOCKS

EXPECTED_S: Final = 10.0
_MAX_LOOKED_AT: Final = 64  # rows that the hand passes for one new name
_SWEEP_ROWS: Final = 64  # rows that a call cleans of released numbers, or 1/256 of all


def _noted(length: int) -> Iterator[int]:
    """Yield the positions of a chain that are recorded as expected: all up to 16, then eight per octave."""
    place = 1
    while place <= length:
        yield place
        place += max(1, 1 << (place.bit_length() - 1) >> 3)


NOTED: Final = tuple(_noted(MAX_PREFIX_BLOCKS))


class PrefixIndex:
    """Block names by worker, of all versions: a name depends on its version.

    ``max_expected`` bounds the stored expected names of each of two generations.
    """

    def __init__(self, max_blocks: int = 262_144, *, max_expected: int = 32_768) -> None:
        self.max_blocks = max_blocks
        self.evicted = 0
        self._max_expected = max_expected
        self._rows: dict[int, int] = {}
        self._names = array("Q")  # name of each row; 0: the row is free
        self._holders: list[int] = []  # each row's holders: the number of one, or the negated mask of several
        self._used = bytearray()  # whether each row was used since the hand passed it
        self._free = array("L")
        self._hand = 0
        self._numbers: dict[str, int] = {}
        self._workers: list[str] = []  # worker of each number; "": unused
        self._live = 0
        self._shown = 0  # numbers of workers that reported a cached block
        self._unused: list[int] = []  # numbers that no row has
        self._given_up: list[int] = []  # released since the sweep began
        self._sweeping: list[int] = []
        self._swept = 0
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._turned_s = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    # --- updates from reports ---------------------------------------------------------------------

    def replace(self, worker_id: str, names: Sequence[int]) -> int:
        """Set the blocks of a worker, replacing all others. Returns its new number."""
        self.drop(worker_id)
        number = self._unused.pop() if self._unused else len(self._workers)
        if number == len(self._workers):
            self._workers.append(worker_id)
        self._workers[number] = worker_id
        self._numbers[worker_id] = number
        self._live |= 1 << number
        self.add(worker_id, names)
        return number

    def add(self, worker_id: str, names: Sequence[int]) -> None:
        """Add blocks to a worker that was registered by ``replace``."""
        number = self._numbers[worker_id]
        bit = 1 << number
        if names:
            self._shown |= bit
        rows, holders = self._rows, self._holders
        for name in names:
            row = rows.get(name)
            if row is None:
                self._insert(name, number)
                continue
            held = holders[row]
            if held < 0:
                holders[row] = -(-held | bit)
            elif held != number:
                holders[row] = -(1 << held | bit)
        self._sweep()

    def discard(self, worker_id: str, names: Iterable[int]) -> None:
        """Remove blocks from a worker. Unknown names are ignored."""
        number = self._numbers[worker_id]
        rows, holders = self._rows, self._holders
        for name in names:
            row = rows.get(name)
            if row is None:
                continue
            held = holders[row]
            if held == number:
                self._remove(row)
            elif held < 0:
                holders[row] = self._packed(-held & ~(1 << number))

    def drop(self, worker_id: str) -> None:
        """Remove a worker and its blocks. The cost is a few rows, whatever it held."""
        number = self._numbers.pop(worker_id, None)
        if number is not None:
            self._workers[number] = ""
            self._live &= ~(1 << number)
            self._shown &= ~(1 << number)
            self._given_up.append(number)
            self._sweep()

    # --- expected blocks --------------------------------------------------------------------------

    def expect(self, worker_id: str, chain: Sequence[int]) -> None:
        """Mark the chain as expected on the worker, if the worker ever reported a cached block."""
        number = self._numbers.get(worker_id)
        if number is None or not self._shown >> number & 1:
            return
        if len(self._young) >= self._max_expected:
            self._old, self._young = self._young, {}
        bit, young = 1 << number, self._young
        length = len(chain)
        for place in NOTED:
            if place > length:
                break
            name = chain[place - 1]
            young[name] = young.get(name, 0) | bit

    def advance(self, now_s: float) -> None:
        """Remove expired expectations: after between half of ``EXPECTED_S`` and all of it."""
        if now_s - self._turned_s >= EXPECTED_S / 2:
            self._old = self._young if now_s - self._turned_s < EXPECTED_S else {}
            self._young, self._turned_s = {}, now_s

    # --- queries ----------------------------------------------------------------------------------

    def find_number(self, worker_id: str) -> int:
        """Return the worker's number, its bit in ``among``; -1 for an unknown worker."""
        return self._numbers.get(worker_id, -1)

    def worker_of(self, number: int) -> str:
        return self._workers[number]

    def match(self, chain: Sequence[int]) -> Match | None:
        """Return the holders of the beginning of the chain, None without any. Valid until the index
        changes."""
        if not chain or not (first := self.mask_of_name(chain[0]) & self._live):
            return None
        return Match(self, chain, first)

    def blocks_on(self, worker_id: str, chain: Sequence[int]) -> int:
        """Return how many leading blocks of the chain the worker has or is expected to have."""
        found = self.match(chain)
        return 0 if found is None else found.blocks_on(worker_id)

    def check_integrity(self) -> None:
        """Raise AssertionError when a row is out of place or the bound is exceeded."""
        assert len(self._rows) <= self.max_blocks
        assert len(self._rows) + len(self._free) == len(self._names) == len(self._holders) == len(self._used)
        assert all(self._names[row] == name for name, row in self._rows.items())
        assert all(self._holders[row] for row in self._rows.values() if self._holders[row] < 0)
        assert sorted(self._numbers.values()) == [n for n, worker in enumerate(self._workers) if worker]
        assert self._live == sum(1 << number for number in self._numbers.values())
        assert not self._shown & ~self._live
        idle = {*self._unused, *self._given_up, *self._sweeping}
        assert idle | set(self._numbers.values()) == set(range(len(self._workers)))
        unused = sum(1 << number for number in self._unused)
        assert not any(self._mask_of(row) & unused for row in self._rows.values()), "a row names nobody"
        assert len(self._young) <= self._max_expected + 64
        assert len(self._old) <= self._max_expected + 64

    # --- inside -----------------------------------------------------------------------------------

    def mask_of_name(self, name: int) -> int:
        """Return the mask of workers that have or are expected to have the block."""
        row = self._rows.get(name)
        if row is None:
            mask = 0
        else:
            self._used[row] = 1
            held = self._holders[row]
            mask = 1 << held if held >= 0 else -held
        if name in self._young:
            mask |= self._young[name]
        if name in self._old:
            mask |= self._old[name]
        return mask

    def _mask_of(self, row: int) -> int:
        held = self._holders[row]
        return 1 << held if held >= 0 else -held

    def _packed(self, mask: int) -> int:
        """Return the row value for these holders: a number's own object, which rows share, or a mask."""
        if mask & (mask - 1):
            return -mask
        number = mask.bit_length() - 1
        return self._numbers.get(self._workers[number], number)

    def _insert(self, name: int, number: int) -> None:
        if name == 0:  # never a name: it marks a free row
            return
        if len(self._rows) >= self.max_blocks:
            self._evict()
        if self._free:
            row = self._free.pop()
            self._names[row], self._holders[row], self._used[row] = name, number, 0
        else:
            row = len(self._names)
            self._names.append(name)
            self._holders.append(number)
            self._used.append(0)
        self._rows[name] = row

    def _evict(self) -> None:
        """Evict one name."""
        count = len(self._names)
        for _ in range(_MAX_LOOKED_AT):
            self._hand = (self._hand + 1) % count
            if self._names[self._hand] and not self._used[self._hand]:
                break
            self._used[self._hand] = 0
        while not self._names[self._hand]:
            self._hand = (self._hand + 1) % count
        self._remove(self._hand)
        self.evicted += 1

    def _remove(self, row: int) -> None:
        del self._rows[self._names[row]]
        self._names[row], self._holders[row], self._used[row] = 0, 0, 0
        self._free.append(row)

    def _sweep(self) -> None:
        """Clean some rows of released numbers; make those numbers reusable that every row was cleaned of."""
        if not self._sweeping:
            if not self._given_up:
                return
            self._sweeping, self._given_up, self._swept = self._given_up, [], 0
        count = len(self._names)
        end = min(count, self._swept + max(_SWEEP_ROWS, count // 256))
        gone = sum(1 << number for number in self._sweeping)
        for row in range(self._swept, end):
            if self._names[row] and (mask := self._mask_of(row)) & gone:
                if mask & ~gone:
                    self._holders[row] = self._packed(mask & ~gone)
                else:
                    self._remove(row)
        self._swept = end
        if end == count:
            for expected in (self._young, self._old):
                for name in [name for name, mask in expected.items() if mask & gone]:
                    expected[name] &= ~gone
            self._unused += self._sweeping
            self._sweeping = []


class Match:
    """Holders of one chain, with their match lengths."""

    def __init__(self, index: PrefixIndex, chain: Sequence[int], first: int) -> None:
        self._index = index
        self._chain = chain
        self._masks = {1: first}  # mask of the workers that hold the chain up to each tried position
        self._first = first

    def blocks_on(self, worker_id: str) -> int:
        """Return how many leading blocks of the chain the worker has or is expected to have."""
        number = self._index.find_number(worker_id)
        if number < 0 or not self._first & (bit := 1 << number):
            return 0
        return self._reach(bit)[0]

    def holders(self, limit: int, rng: Random, *, among: int = -1) -> list[tuple[str, int]]:
        """Return at most ``limit`` workers with the longest match, and the number of blocks of each.

        Among more workers with the same match some are drawn; fewer are completed by workers with shorter
        matches at the tried positions. ``among``: a mask of the worker numbers to consider.
        """
        found: list[tuple[str, int]] = []
        among &= self._first
        if not among:
            return found
        _, path = self._reach(among)
        for _, mask in reversed(path):
            for number in _draw(mask & among, limit - len(found), rng):
                bit = 1 << number
                among &= ~bit
                found.append((self._index.worker_of(number), self._reach(bit)[0]))
            if len(found) >= limit:
                break
        return found

    def _reach(self, among: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the length of the longest match of any of these workers, and the tried positions that
        matched, each with its holders among them."""
        masks, chain, index = self._masks, self._chain, self._index
        reached, path = 0, []
        length = len(chain)
        step = 1 << (length.bit_length() - 1)
        while step:
            place = reached + step
            if place <= length:
                mask = masks.get(place)
                if mask is None:
                    mask = masks[place] = index.mask_of_name(chain[place - 1])
                if mask & among:
                    reached = place
                    path.append((place, mask & among))
            step >>= 1
        return reached, path


def _draw(mask: int, limit: int, rng: Random) -> Iterator[int]:
    """Yield at most ``limit`` numbers of the mask, each the next one after a random position."""
    while mask and limit > 0:
        place = int(rng.random() * mask.bit_length())
        above = mask >> place
        number = place + (above & -above).bit_length() - 1 if above else (mask & -mask).bit_length() - 1
        yield number
        mask ^= 1 << number
        limit -= 1
