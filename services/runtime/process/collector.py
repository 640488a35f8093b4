"""Tuning of Python's cycle collector."""

from __future__ import annotations

import gc
from typing import Final

_YOUNG_OBJECTS: Final = 20_000


def rest_collector() -> None:
    """Exclude existing objects from collection, and collect new ones less often.

    Objects built at the start live as long as the process. Nearly all later ones are freed by reference
    counting. The collector would only scan queues, fleet state and the decision ring, all in use, at a cost
    that grows with them: with 256 workers a tenth of the scheduler's time, and its longest pauses. Cycles are
    rare, so they hold little memory between collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
