"""Index of the prefix blocks that live sequences of a worker share: another sequence needs no room for them.

A worker reports the blocks that its live sequences refer to (``PoolSnapshot.prefix_shared``, without blocks
that were of use to one sequence only). The same snapshot has its reserved blocks, which count each shared
block once. A sequence that begins with such a block therefore needs room only for the rest. A block that is
only cached, by contrast, counts as free on the worker until a sequence refers to it: a sequence that begins
with it needs room for all of its blocks. A name identifies a whole prefix, so a worker that shares a block
shares all before it, and a run is found by binary search.

Only one outstanding grant of a worker *leans* on a prefix (counts without its shared blocks); other
grants with the same beginning count in full until a report includes that one. Reason: if all sequences with
the prefix end and its blocks are evicted before the grants arrive, the freed blocks are enough for one of
them, and each further one would compute its own.

Bound: at ``max_names`` names over all workers, no more are added. A name that is not in the index counts as
not shared, which errs towards less room. Pure; single writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Final

from services.core.prefix import PREFIX_BLOCK_TOKENS


class SharedPrefixIndex:
    """Names of shared blocks by worker and engine, and the workers by name.

    An engine has the name of its only version, or of the first of those that it serves.
    """

    def __init__(self, max_names: int = 65_536) -> None:
        self._max_names = max_names
        self._names: dict[str, dict[int, str]] = {}  # engine of each name, by worker
        self._workers: dict[int, dict[str, None]] = {}  # workers of each name, which contains its version
        self._engines: dict[str, int] = {}  # how many names each has, over all workers
        self._count = 0
        self._leaning: dict[str, dict[int, int]] = {}  # number of the grant, by worker and first name

    def __len__(self) -> int:
        return self._count

    # --- updates from reports ---------------------------------------------------------------------

    def change(self, worker_id: str, engine: str, added: Iterable[int], removed: Iterable[int]) -> None:
        """Add and remove shared blocks of a worker. Unknown names are ignored.

        Also those of an engine that another replaced are removed: it reports them under its own name.
        """
        names = self._names.setdefault(worker_id, {})
        for name in removed:
            if name in names:
                self._leave(worker_id, name, names.pop(name))
        for name in added:
            if self._count >= self._max_names:
                break
            if name not in names:
                names[name] = engine
                self._workers.setdefault(name, {})[worker_id] = None
                self._engines[engine] = self._engines.get(engine, 0) + 1
                self._count += 1
        if not names:
            del self._names[worker_id]

    def drop(self, worker_id: str) -> None:
        """Remove all shared blocks of a worker."""
        for name, engine in self._names.pop(worker_id, {}).items():
            self._leave(worker_id, name, engine)

    # --- grants attached to a prefix -------------------------------------------------------------

    def attach(self, worker_id: str, chain: Sequence[int], number: int) -> None:
        """Attach the grant of that number to its chain: it alone counts without the shared blocks."""
        self._leaning.setdefault(worker_id, {})[chain[0]] = number

    def detach(self, worker_id: str, chain: Sequence[int], number: int) -> None:
        """Release the prefix of a grant that is no longer outstanding."""
        leaning = self._leaning.get(worker_id)
        if leaning is not None and chain and leaning.get(chain[0]) == number:
            del leaning[chain[0]]
            if not leaning:
                del self._leaning[worker_id]

    def detach_all(self, worker_id: str) -> None:
        """Release the prefixes of all grants of the worker."""
        self._leaning.pop(worker_id, None)

    def leaning_on(self, worker_id: str) -> Sequence[int]:
        """Return the numbers of the grants attached to prefixes of the worker."""
        leaning = self._leaning.get(worker_id)
        return () if leaning is None else tuple(leaning.values())

    # --- queries ----------------------------------------------------------------------------------

    def any_in(self, engine: str) -> bool:
        """Whether any worker shares a block of the engine."""
        return engine in self._engines

    def run_of(self, chain: Sequence[int], prompt_tokens: int) -> SharedRun:
        """Return the shared beginning of a prompt by worker; ``NOTHING_SHARED`` when no worker shares it."""
        if not chain or chain[0] not in self._workers:
            return NOTHING_SHARED
        return SharedRun(self, chain, prompt_tokens)

    def blocks_on(self, worker_id: str, chain: Sequence[int], prompt_tokens: int) -> int:
        """Return how many leading prefix blocks of the prompt the worker shares, without the block of the
        last token. A name holds its version, so that no other version's blocks are counted."""
        length = shareable_blocks(chain, prompt_tokens)
        if not length or not self._has(worker_id, chain[0]):
            return 0
        reached, step = 1, 1 << length.bit_length()
        while step := step >> 1:
            if reached + step <= length and self._has(worker_id, chain[reached + step - 1]):
                reached += step
        return reached

    def free_blocks_on(self, worker_id: str, chain: Sequence[int], prompt_tokens: int) -> int:
        """Return how many of these blocks another grant may lean on."""
        leaning = self._leaning.get(worker_id)
        if not chain or (leaning is not None and chain[0] in leaning):
            return 0
        return self.blocks_on(worker_id, chain, prompt_tokens)

    def workers_of(self, name: int) -> list[str]:
        return list(self._workers.get(name, ()))

    def check_integrity(self) -> None:
        """Raise AssertionError when the two indexes disagree."""
        counted: dict[str, int] = {}
        for worker_id, names in self._names.items():
            assert names, "a worker without names is kept"
            for name, engine in names.items():
                counted[engine] = counted.get(engine, 0) + 1
                assert worker_id in self._workers[name]
        assert counted == self._engines
        assert sum(counted.values()) == self._count == sum(map(len, self._workers.values()))
        assert self._count <= self._max_names

    # --- inside -----------------------------------------------------------------------------------

    def _has(self, worker_id: str, name: int) -> bool:
        return worker_id in self._workers.get(name, ())

    def _leave(self, worker_id: str, name: int, engine: str) -> None:
        workers = self._workers[name]
        del workers[worker_id]
        if not workers:
            del self._workers[name]
        self._engines[engine] -= 1
        if not self._engines[engine]:
            del self._engines[engine]
        self._count -= 1


class SharedRun:
    """The shared beginning of one prompt by worker. Valid until the index changes."""

    def __init__(self, prefixes: SharedPrefixIndex | None, chain: Sequence[int], prompt_tokens: int) -> None:
        self._prefixes = prefixes
        self._chain = chain
        self._prompt_tokens = prompt_tokens

    def tokens_on(self, worker_id: str) -> int:
        """Return how many tokens of the prompt need no room on the worker."""
        if self._prefixes is None:
            return 0
        blocks = self._prefixes.free_blocks_on(worker_id, self._chain, self._prompt_tokens)
        return blocks * PREFIX_BLOCK_TOKENS

    def workers(self, limit: int, rng: Random) -> Sequence[str]:
        """Return at most ``limit`` workers that share the beginning, starting at a random one."""
        found = [] if self._prefixes is None else self._prefixes.workers_of(self._chain[0])
        if len(found) <= limit:
            return found
        start = int(rng.random() * len(found))
        return (found + found)[start : start + limit]


NOTHING_SHARED: Final = SharedRun(None, (), 0)


def shareable_blocks(chain: Sequence[int], prompt_tokens: int) -> int:
    """Return how many prefix blocks of a prompt another sequence can share. The last token is always
    computed."""
    return min(len(chain), max(0, prompt_tokens - 1) // PREFIX_BLOCK_TOKENS)
