"""The engine in bfloat16 against transformers, and how much bfloat16 itself changes there.

What a checkpoint means is what transformers computes in float32 with the weights rounded to bfloat16. An
engine is off from that by roundings, and how far depends on the checkpoint: sharp attention makes much of a
small error. transformers in bfloat16 rounds in the same places, so its errors show the effect of roundings:

- A token may be chosen instead of the best where its logit is lower by twice the greatest error that
  transformers' bfloat16 makes in this sequence, in any logit: each of the two may be off by so much.
- Such divergences are counted, and so are those of transformers' bfloat16 in the same contexts. Of two such
  counts with one mean m, the first is greater by 4 * sqrt(2 * m) once in 30,000 times. More than that fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tests.support.engine_oracle import Oracle, Shape, oracle_of

ERRORS: Final = 2.0  # of two logits that change places
DEVIATIONS: Final = 4.0


@dataclass(slots=True)
class Bfloat16Oracle:
    """``exact`` is float32 with rounded weights, ``rounded`` bfloat16; ``theirs`` are its divergences."""

    exact: Oracle
    rounded: Oracle
    compared: int = 0
    excused: int = 0
    theirs: int = 0

    def judge(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Count the output. Raises AssertionError for a token that the margin rule does not excuse."""
        exact, rounded = (oracle.logits(prompt, output).float() for oracle in (self.exact, self.rounded))
        bound = ERRORS * float((exact - rounded).abs().max())
        best, chosen = exact.max(dim=-1), torch.tensor(output)
        margins = best.values - exact.gather(1, chosen[:, None])[:, 0]
        for position in (chosen != best.indices).nonzero()[:, 0].tolist():
            margin = float(margins[position])
            assert margin <= bound, f"position {position}: {output[position]}, {margin:.2g} > {bound:.2g}"
        self.compared += len(output)
        self.excused += int((chosen != best.indices).sum())
        self.theirs += int((rounded.argmax(dim=-1) != best.indices).sum())

    def check(self) -> None:
        """Raise AssertionError if many more positions needed the excuse than transformers' bfloat16 does."""
        check_counts(self.excused, self.theirs)


def check_counts(excused: int, theirs: int) -> None:
    """Raise AssertionError if these are more divergences than chance makes of as many as ``theirs``."""
    assert excused <= theirs + DEVIATIONS * math.sqrt(2 * max(theirs, 1)), (excused, theirs)


def bfloat16_oracle(shape: Shape, folder: Path, model: Any) -> Bfloat16Oracle:
    """Return the oracle of a checkpoint; ``model``, which is that in ``folder``, has its weights rounded."""
    half = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval()
    assert half.model.rotary_emb.inv_freq.dtype is torch.float32
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return Bfloat16Oracle(oracle_of(shape, model), oracle_of(shape, half))
