"""What a step's sampler receives of its constraints: which tokens may not come next, by row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Forbidden = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RuledRows:
    """``forbidden`` [rows, vocabulary] is true for each token that may not come next in ``rows[i]``.

    ``problems``: by sampling row, why an output cannot go on. The rows of such an output mean nothing.
    """

    rows: list[int]
    forbidden: Forbidden
    problems: dict[int, str] = field(default_factory=dict)


class StepMasks(Protocol):
    """The masks of a step that is computed meanwhile."""

    def wait(self) -> RuledRows:
        """Return the masks once they are computed; any number of times."""
