"""Messages between a gateway and its text processes: one answer per order, over a stream socket.

A message is a length of four bytes and msgpack. Token ids are native 32-bit integers: both ends are on one
machine.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from struct import Struct as Layout
from typing import Final

import msgspec

from services.core.errors import (
    ConstraintRefused,
    FailedPrecondition,
    FairwayError,
    InternalError,
    InvalidInput,
    PromptTooLong,
    UnsupportedFeature,
)
from services.core.generation import Constraint
from services.gateway.text.text_model import (
    Conversation,
    DecodedText,
    EncodedRows,
    PictureFile,
    Pixels,
    RowTexts,
    TextModel,
    TokenRun,
)

LENGTH: Final = Layout("<I")
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
# Exit codes of a text process.
EXIT_MEMORY: Final = 3
EXIT_PANIC: Final = 4
_ERRORS: Final[dict[str, type[FairwayError]]] = {
    kind.reason: kind
    for kind in (ConstraintRefused, FailedPrecondition, InvalidInput, PromptTooLong, UnsupportedFeature)
}


class LoadText(msgspec.Struct, frozen=True, tag="LoadText"):
    """The first order: read a version's files. ``cpu_s`` and ``memory_bytes`` bound it."""

    folder: str
    version_digest: str
    cpu_s: float
    memory_bytes: int


class EncodePrompt(msgspec.Struct, frozen=True, tag=True):
    text: str
    cpu_s: float


class EncodeChat(msgspec.Struct, frozen=True, tag=True):
    chat: Conversation
    cpu_s: float


class EncodeRows(msgspec.Struct, frozen=True, tag=True):
    rows: RowTexts
    cpu_s: float


class DecodePicture(msgspec.Struct, frozen=True, tag=True):
    picture: PictureFile
    cpu_s: float


class DecodeTokens(msgspec.Struct, frozen=True, tag=True):
    run: TokenRun
    cpu_s: float


class CheckConstraint(msgspec.Struct, frozen=True, tag=True):
    """Compile a constraint. ``open_cpu_s`` is the time of the first one, which prepares the tokenizer."""

    constraint: Constraint
    cpu_s: float
    open_cpu_s: float


class Loaded(msgspec.Struct, frozen=True, tag=True):
    model: TextModel


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """``ids`` is empty where ``count`` is more than the model's context."""

    count: int
    ids: bytes


class RowsEncoded(msgspec.Struct, frozen=True, tag=True):
    rows: EncodedRows


class PictureDecoded(msgspec.Struct, frozen=True, tag=True):
    pixels: Pixels


class Decoded(msgspec.Struct, frozen=True, tag=True):
    decoded: DecodedText


class ConstraintPassed(msgspec.Struct, frozen=True, tag=True):
    """The constraint was compiled, and an output can begin; ``exact`` is the one for workers."""

    exact: Constraint


class TextRefused(msgspec.Struct, frozen=True, tag="TextRefused"):
    """A domain error by its stable reason."""

    reason: str
    message: str
    metadata: dict[str, str]


Order = LoadText | EncodePrompt | EncodeChat | EncodeRows | DecodePicture | DecodeTokens | CheckConstraint
Answer = Loaded | Encoded | RowsEncoded | PictureDecoded | Decoded | ConstraintPassed | TextRefused

encode_message: Final = msgspec.msgpack.Encoder().encode
# Both raise msgspec.DecodeError.
decode_order: Final[Callable[[bytes | bytearray], Order]] = msgspec.msgpack.Decoder(Order).decode
decode_answer: Final[Callable[[bytes | bytearray], Answer]] = msgspec.msgpack.Decoder(Answer).decode


def framed(message: Order | Answer) -> bytes:
    """Return a message as it is sent."""
    data = encode_message(message)
    return LENGTH.pack(len(data)) + data


def encoded(ids: Sequence[int], max_tokens: int) -> Encoded:
    """Return the answer that carries these ids, or their number alone beyond ``max_tokens``."""
    return Encoded(len(ids), array("I", ids).tobytes() if len(ids) <= max_tokens else b"")


def ids_of(answer: Encoded) -> tuple[int, ...]:
    """Return the ids that an answer carries."""
    return tuple(memoryview(answer.ids).cast("I"))


def refused(error: FairwayError) -> TextRefused:
    """Return the answer that carries an error."""
    return TextRefused(error.reason, error.message, error.metadata)


def error_of(answer: TextRefused) -> FairwayError:
    """Return the error that an answer carries."""
    error = _ERRORS.get(answer.reason, InternalError)(answer.message)
    error.metadata.update(answer.metadata)
    return error
