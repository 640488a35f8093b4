"""Unigram and bigram models over token ids, fitted on the tokens that the network trains on."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint16]
Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Baselines:
    """`unigram` [vocab] and `bigram` [vocab, vocab], rows being the token before; every row sums to one."""

    unigram: Probabilities
    bigram: Probabilities

    def nats(self, ids: Ids) -> tuple[float, float]:
        """What the unigram and the bigram pay for `ids` after its first token."""
        return (
            float(-np.log(self.unigram[ids[1:]]).sum()),
            float(-np.log(self.bigram[ids[:-1], ids[1:]]).sum()),
        )


def fit_baselines(documents: Iterable[Ids], *, vocab: int) -> Baselines:
    """Add-one for the unigram; Witten-Bell for the bigram: a row with many followers leans on the unigram."""
    pairs = np.zeros((vocab, vocab))
    for ids in documents:
        np.add.at(pairs, (ids[:-1], ids[1:]), 1)
    unigram = pairs.sum(0) + 1
    unigram /= unigram.sum()
    seen = pairs.sum(1, keepdims=True)
    followers = (pairs > 0).sum(1, keepdims=True)
    bigram = (pairs + np.maximum(followers, 1) * unigram) / (seen + np.maximum(followers, 1))
    return Baselines(unigram, bigram)
