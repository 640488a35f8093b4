"""Token streams: documents joined end to end, and windows drawn from them."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from bpe import EOS_ID
from chat import chat_documents
from corpus import Corpus, Document, Kind
from tokenizers import Tokenizer
from torch import Tensor

CHAT_SHARE = 0.14

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document as ids: BOS first, EOS last; `size_bytes` is the length of its text in UTF-8."""

    kind: Kind
    ids: Ids
    size_bytes: int


def encode_side(documents: Sequence[Document], tokenizer: Tokenizer, *, seed: int) -> list[Encoded]:
    """The documents of one side of the split and chat examples made from them, in random order.

    Chat examples are added until they hold CHAT_SHARE of all tokens.
    """
    rng = random.Random(seed)
    plain = _encode(documents, tokenizer)
    room = sum(len(e.ids) for e in plain) * CHAT_SHARE / (1 - CHAT_SHARE)
    mixed = list(plain)
    for example in _encode(chat_documents(documents, rng=rng), tokenizer):
        room -= len(example.ids)
        if room < 0:
            break
        mixed.append(example)
    rng.shuffle(mixed)
    return mixed


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> list[Encoded]:
    """Chat texts hold their special tokens already; the others get BOS and EOS here."""
    encoded: list[Encoded] = []
    for document in documents:
        is_chat = document.kind == "chat"
        ids = tokenizer.encode(document.text, add_special_tokens=not is_chat).ids
        size_bytes = len(document.text.encode())
        encoded.append(
            Encoded(document.kind, np.array(ids if is_chat else [*ids, EOS_ID], np.uint16), size_bytes)
        )
    return encoded


def load_streams(corpus: Corpus, tokenizer: Tokenizer, *, seed: int) -> tuple[list[Encoded], list[Encoded]]:
    """The training side and the held-out side, each with chat examples from its own documents only."""
    return encode_side(corpus.train, tokenizer, seed=seed), encode_side(corpus.held_out, tokenizer, seed=seed)


def join(encoded: Iterable[Encoded]) -> Ids:
    """One stream of all ids, in order."""
    return np.concatenate([e.ids for e in encoded])


class Windows:
    """Batches of a stream as a function of the step, so that a resumed run sees what an unbroken one would.

    Every epoch cuts the stream at a new phase and visits its windows in a new order, each once.
    """

    def __init__(self, stream: Ids, *, seed: int) -> None:
        self._stream = stream
        self._seed = seed
        self._order_of: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def batch(self, step: int, *, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [rows, length] each."""
        starts = [self._start(step * rows + row, length) for row in range(rows)]
        picked = np.stack([self._stream[start : start + length + 1] for start in starts]).astype(np.int64)
        ids = torch.from_numpy(picked)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def _start(self, index: int, length: int) -> int:
        per_epoch = (len(self._stream) - length - 1) // length
        epoch, place = divmod(index, per_epoch)
        if (epoch, length) not in self._order_of:
            rng = np.random.default_rng((self._seed, epoch, length))
            phase = rng.integers(length)
            self._order_of = {(epoch, length): rng.permutation(per_epoch) * length + phase}
        return int(self._order_of[epoch, length][place])
