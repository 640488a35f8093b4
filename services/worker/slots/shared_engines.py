"""The engines of a worker by what they compute: versions that agree in it are served by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.worker.slots.version_engine import VersionEngine


class SharedEngines:
    """Single writer: the slots. An engine is here from its first claim until its last owner has left."""

    def __init__(self) -> None:
        self._engines: dict[str, VersionEngine] = {}

    def claim(self, computation: str, engine: VersionEngine) -> VersionEngine:
        """Return the engine that computes this: the given one where there is none. Empty: it shares with
        none."""
        return self._engines.setdefault(computation, engine) if computation else engine

    def drop(self, engine: VersionEngine) -> None:
        """Forget an engine that no version uses. Idempotent."""
        for computation in [key for key, one in self._engines.items() if one is engine]:
            del self._engines[computation]
