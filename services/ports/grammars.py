"""The port to constrained decoding: from a constraint to the tokens that may come next.

A ``Grammars`` belongs to one tokenizer. Its implementations limit what one constraint may cost: a call takes
a bounded time for every constraint, and a constraint that needs more is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from services.core.generation import Constraint

if TYPE_CHECKING:  # text processes import this module; numpy would quintuple their memory
    import numpy as np
    import numpy.typing as npt

Bits: TypeAlias = "npt.NDArray[np.uint8]"


class GrammarRefused(Exception):
    """The constraint is malformed or needs too much. The message is for the client: it may quote its text."""


class TokenizerUnusable(Exception):
    """The tokenizer is of a kind whose tokens have no known bytes."""


class Matcher(Protocol):
    """Where one output stands in its grammar. One caller at a time."""

    def consume(self, tokens: Sequence[int]) -> None:
        """Move on by tokens of the output. Raises GrammarRefused where one of them does not fit, or where
        it needs too much: the matcher is not used again."""

    def fitting(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may follow, one after the other. The place stays."""


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Masks of one output: the first where it stands after ``produced``, then one behind each proposal.

    ``row`` is the first mask's; ``proposals`` fit, and end of sequence is not among them.
    """

    matcher: Matcher
    row: int
    produced: Sequence[int] = ()
    proposals: Sequence[int] = ()


class Grammars(Protocol):
    """Compiles constraints for one tokenizer. Threads may use it at the same time, on different matchers."""

    @property
    def row_bytes(self) -> int:
        """How many bytes a mask takes: one bit per token, the lowest first."""

    def exact(self, constraint: Constraint) -> Constraint:
        """Return the constraint with its schemas as the engine takes them, whose compilation takes no
        processor time under the interpreter's lock. Raises GrammarRefused."""

    def compile(self, constraint: Constraint) -> Matcher:
        """Return a matcher at the beginning of an output. Raises GrammarRefused."""

    def fill(self, requests: Sequence[MaskRequest], into: Bits) -> dict[int, str]:
        """Set the bits of the tokens that may come next, in the rows of ``into`` [rows, row_bytes].

        End of sequence may come exactly where the output is complete. Return by row why an output cannot go
        on; its rows mean nothing.
        """
