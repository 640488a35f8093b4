"""Which versions compete for the room of one engine on some worker."""

from __future__ import annotations

from collections.abc import Iterable

from services.core.fleet import PoolSnapshot


class EngineGroups:
    """Groups of versions, from the reports of all workers. Single writer: the fleet view.

    Versions are in one group if they share an engine anywhere, or each with a third. An engine keeps the name
    of a version that may have left it; that one is in the group too.
    """

    def __init__(self) -> None:
        self._engines: dict[str, frozenset[tuple[str, ...]]] = {}  # versions of each engine, by worker
        self._groups: dict[str, tuple[str, ...]] = {}

    def learn(self, worker_id: str, pools: Iterable[PoolSnapshot]) -> None:
        """Replace what a worker reported last."""
        engines: dict[str, list[str]] = {}
        for pool in pools:
            if pool.engine:
                engines.setdefault(pool.engine, [pool.engine]).append(pool.digest)
        found = frozenset(tuple(sorted({*versions})) for versions in engines.values())
        if found == self._engines.get(worker_id, frozenset()):
            return
        if found:
            self._engines[worker_id] = found
        else:
            del self._engines[worker_id]
        self._groups = _groups_of(one for engines_ in self._engines.values() for one in engines_)

    def versions_of(self, digest: str) -> tuple[str, ...]:
        """Return the versions of the group, itself included, in one order."""
        return self._groups.get(digest, (digest,))


def _groups_of(engines: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, set[str]] = {}
    for versions in sorted(set(engines)):
        joined = set(versions).union(*(groups[version] for version in versions if version in groups))
        groups.update(dict.fromkeys(sorted(joined), joined))
    return {version: tuple(sorted(group)) for version, group in groups.items()}
