"""What a step's sampler receives of its constraints: which tokens may not come next, by row."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from services.ports.grammars import Bits


@dataclass(frozen=True, slots=True)
class RuledRows:
    """``allowed`` [rows, bytes] has a bit per token, the lowest first: a token of ``rows[i]`` whose bit is 0
    may not come next.

    ``problems`` states by sampling row why an output cannot continue. ``late`` are sampling rows whose masks
    were not computed; they are to be computed again. All bits of both are 1.
    """

    rows: list[int]
    allowed: Bits
    problems: dict[int, str] = field(default_factory=dict)
    late: frozenset[int] = frozenset()


# The masks of a step that is computed meanwhile.
StepMasks: TypeAlias = Future[RuledRows]
