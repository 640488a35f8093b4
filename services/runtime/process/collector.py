"""When the cycle collector runs."""

from __future__ import annotations

import gc
from typing import Final

_YOUNG_OBJECTS: Final = 20_000


def rest_collector() -> None:
    """The collector never walks again what is there now, and walks what is new less often.

    What is built at the start lives as long as the process. Of what follows nearly all goes without the
    collector, as soon as nothing refers to it. Of a queue, a fleet and a ring of decisions it finds only what
    is in use, at a cost that grows with them: with 256 workers a tenth of the scheduler's time, and its
    longest turns. Cycles are rare, so that what they hold meanwhile is little.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
