"""Which prefix blocks the live sequences of a worker share, as its reports tell: another costs no room there.

A worker tells of the blocks that its live sequences refer to (``PoolSnapshot.prefix_shared``; of those that
were of use to one alone it is silent), in the same instant as of what it has reserved, which counts each of
them once. A sequence that begins with such a block therefore lacks only the rest. What is merely cached, by
contrast, is free to the worker until somebody refers to it: a sequence that begins with that needs all of
its blocks. A name stands for a whole prefix, so a worker that shares a block shares all before it, and a run
is found by doubling back.

Of the grants on their way to a worker only one *leans* on a prefix, the others of the same beginning count
whole until a report speaks for it. For should all that hold the prefix end and its blocks be evicted before
the grants arrive, then what that sets free is enough for one of them, and each of several would compute its
own.

Bound: of ``max_names`` names over all workers no more are taken; what is not known counts as not shared,
which errs towards less room. Pure; single writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Final

from services.core.prefix import PREFIX_BLOCK_TOKENS


class SharedPrefixes:
    """Names of shared blocks by worker and version, and the workers by name."""

    def __init__(self, max_names: int = 65_536) -> None:
        self._max_names = max_names
        self._names: dict[str, dict[str, set[int]]] = {}  # by worker and version
        self._workers: dict[int, dict[str, None]] = {}  # by name, which holds its version
        self._pools: dict[str, int] = {}  # those that share anything, by version
        self._count = 0
        self._leaning: dict[str, dict[int, int]] = {}  # by worker and first name, the number of the grant

    def __len__(self) -> int:
        return self._count

    # --- what reports tell ------------------------------------------------------------------------

    def change(self, worker_id: str, digest: str, added: Iterable[int], removed: Iterable[int]) -> None:
        """These are shared on the worker from now on, and those no more. What is not known is ignored."""
        pools = self._names.setdefault(worker_id, {})
        names = pools.get(digest)
        if names is None:
            names = pools[digest] = set()
            self._pools[digest] = self._pools.get(digest, 0) + 1
        for name in removed:
            if name in names:
                names.discard(name)
                self._leave(worker_id, name)
        for name in added:
            if self._count >= self._max_names:
                break
            workers = self._workers.setdefault(name, {})
            if worker_id not in workers:
                workers[worker_id] = None
                names.add(name)
                self._count += 1
        if not names:
            self._drop_pool(worker_id, digest)

    def drop(self, worker_id: str) -> None:
        """Nothing is shared on the worker."""
        for digest, names in list(self._names.get(worker_id, {}).items()):
            for name in sorted(names):
                self._leave(worker_id, name)
            self._drop_pool(worker_id, digest)

    # --- what grants lean on ----------------------------------------------------------------------

    def lean(self, worker_id: str, chain: Sequence[int], number: int) -> None:
        """The grant of that number counts without what is shared of its chain, and no other does."""
        self._leaning.setdefault(worker_id, {})[chain[0]] = number

    def let_go(self, worker_id: str, chain: Sequence[int], number: int) -> None:
        """The grant is no longer on its way."""
        leaning = self._leaning.get(worker_id)
        if leaning is not None and chain and leaning.get(chain[0]) == number:
            del leaning[chain[0]]
            if not leaning:
                del self._leaning[worker_id]

    def let_all_go(self, worker_id: str) -> None:
        """No grant is on its way to the worker."""
        self._leaning.pop(worker_id, None)

    def leaning_on(self, worker_id: str) -> Sequence[int]:
        """Return the numbers of the grants that lean on what the worker shares."""
        leaning = self._leaning.get(worker_id)
        return () if leaning is None else tuple(leaning.values())

    # --- what is asked ----------------------------------------------------------------------------

    def any_in(self, digest: str) -> bool:
        """Whether any worker shares anything of the version."""
        return digest in self._pools

    def run_of(self, digest: str, chain: Sequence[int], prompt_tokens: int) -> SharedRun:
        """Return who shares how much of a prompt; ``NOTHING_SHARED`` when nobody does."""
        if not chain or chain[0] not in self._workers:
            return NOTHING_SHARED
        return SharedRun(self, digest, chain, prompt_tokens)

    def blocks_on(self, worker_id: str, digest: str, chain: Sequence[int], prompt_tokens: int) -> int:
        """Return how many leading prefix blocks of the prompt the worker shares, the last token's apart."""
        pools = self._names.get(worker_id)
        names = None if pools is None else pools.get(digest)
        length = shareable_blocks(chain, prompt_tokens)
        if names is None or not length or chain[0] not in names:
            return 0
        reached, step = 1, 1 << length.bit_length()
        while step := step >> 1:
            if reached + step <= length and chain[reached + step - 1] in names:
                reached += step
        return reached

    def free_blocks_on(self, worker_id: str, digest: str, chain: Sequence[int], prompt_tokens: int) -> int:
        """Return how many of these blocks another grant may count on."""
        leaning = self._leaning.get(worker_id)
        if not chain or (leaning is not None and chain[0] in leaning):
            return 0
        return self.blocks_on(worker_id, digest, chain, prompt_tokens)

    def workers_of(self, name: int) -> list[str]:
        return list(self._workers.get(name, ()))

    def check_integrity(self) -> None:
        """Raise AssertionError when the two indexes disagree."""
        counted: dict[str, int] = {}
        count = 0
        for worker_id, pools in self._names.items():
            assert pools, "a worker without pools is kept"
            assert all(pools.values()), "a pool without names is kept"
            for digest, names in pools.items():
                counted[digest] = counted.get(digest, 0) + 1
                count += len(names)
                assert all(worker_id in self._workers[name] for name in names)
        assert counted == self._pools
        assert count == self._count == sum(map(len, self._workers.values())) <= self._max_names

    # --- inside -----------------------------------------------------------------------------------

    def _leave(self, worker_id: str, name: int) -> None:
        workers = self._workers[name]
        del workers[worker_id]
        if not workers:
            del self._workers[name]
        self._count -= 1

    def _drop_pool(self, worker_id: str, digest: str) -> None:
        pools = self._names[worker_id]
        del pools[digest]
        if not pools:
            del self._names[worker_id]
        self._pools[digest] -= 1
        if not self._pools[digest]:
            del self._pools[digest]


class SharedRun:
    """What of one prompt is shared where. Good until the index changes."""

    def __init__(
        self, prefixes: SharedPrefixes | None, digest: str, chain: Sequence[int], prompt_tokens: int
    ) -> None:
        self._prefixes = prefixes
        self._digest = digest
        self._chain = chain
        self._prompt_tokens = prompt_tokens

    def tokens_on(self, worker_id: str) -> int:
        """Return how many tokens of the prompt cost the worker no room."""
        if self._prefixes is None:
            return 0
        blocks = self._prefixes.free_blocks_on(worker_id, self._digest, self._chain, self._prompt_tokens)
        return blocks * PREFIX_BLOCK_TOKENS

    def workers(self, limit: int, rng: Random) -> Sequence[str]:
        """Return at most ``limit`` workers that share the beginning, from a random one on."""
        found = [] if self._prefixes is None else self._prefixes.workers_of(self._chain[0])
        if len(found) <= limit:
            return found
        start = int(rng.random() * len(found))
        return (found + found)[start : start + limit]


NOTHING_SHARED: Final = SharedRun(None, "", (), 0)


def shareable_blocks(chain: Sequence[int], prompt_tokens: int) -> int:
    """Return how many prefix blocks of a prompt another sequence can share. The last token is computed."""
    return min(len(chain), max(0, prompt_tokens - 1) // PREFIX_BLOCK_TOKENS)
