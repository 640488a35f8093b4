"""What a step's sampler receives of its constraints: which tokens may not come next, by row."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Biases = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RuledRows:
    """``biases`` [rows, vocabulary] is added to the logits of ``rows[i]``: 0 where a token may come next,
    else minus infinity. On a CPU an addition is several times as fast as a masked fill.

    ``problems``: by sampling row, why an output cannot go on. ``late``: sampling rows whose masks were not
    computed; they are to be computed again. The biases of both are 0. The next step overwrites ``biases``.
    """

    rows: list[int]
    biases: Biases
    problems: dict[int, str] = field(default_factory=dict)
    late: frozenset[int] = frozenset()


# The masks of a step that is computed meanwhile.
StepMasks: TypeAlias = Future[RuledRows]
