"""What rows spend between this gateway and each worker, both ways, as batches have to leave it to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.core.estimates.sketch import Sketch

LEVEL: Final = 0.99
_WINDOW: Final = 512.0  # rows of a worker, after which they weigh half
_REFRESH: Final = 32  # rows after which the level is computed again
_MOST_WORKERS: Final = 4096  # the least recently used goes first


@dataclass(slots=True)
class _Observed:
    seconds: Sketch = field(default_factory=lambda: Sketch(error_ratio=0.05, floor=1e-6, max_buckets=64))
    level_s: float = 0.0
    unrefreshed: int = 0


class WorkerTransport:
    """Single writer: the gateway's event loop."""

    def __init__(self) -> None:
        self._workers: dict[str, _Observed] = {}

    def note(self, worker_id: str, seconds: float) -> None:
        """Count a row that took ``seconds`` longer here than its stay on the worker."""
        found = self._workers.pop(worker_id, None) or _Observed()
        while len(self._workers) >= _MOST_WORKERS:
            del self._workers[next(iter(self._workers))]
        self._workers[worker_id] = found
        found.seconds.add(max(1e-6, seconds))
        found.unrefreshed += 1
        if found.unrefreshed >= _REFRESH:
            found.unrefreshed = 0
            found.level_s = found.seconds.quantile(LEVEL) or 0.0
            if found.seconds.count > _WINDOW:
                found.seconds.keep(0.5)

    def level_s(self, worker_id: str) -> float:
        """Return the seconds that 99 of 100 rows stay within; 0 while too few were seen."""
        found = self._workers.get(worker_id)
        return 0.0 if found is None else found.level_s
