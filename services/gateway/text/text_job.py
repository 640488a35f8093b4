"""One text of a tenant that a text process is to read, and the order that the process receives for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from services.core.errors import FairwayError
from services.core.generation import Constraint
from services.gateway.text.child import Cause, TextLimits
from services.gateway.text.messages import (
    CheckConstraint,
    DecodePicture,
    DecodeTokens,
    EncodeChat,
    EncodePrompt,
    EncodeRows,
    Order,
)
from services.gateway.text.text_model import (
    Conversation,
    DecodedText,
    EncodedRows,
    EncodedText,
    PictureFile,
    Pixels,
    RowTexts,
    TokenRun,
)

# A short text takes at most about 20 ms of a processor: the longest delay of another tenant's.
SHORT_BYTES: Final = 16 * 1024

# What is read, and what becomes of it.
AnyText = str | Conversation | RowTexts | PictureFile | TokenRun | Constraint
AnyRead = EncodedText | EncodedRows | Pixels | DecodedText | Constraint


@dataclass(eq=False, slots=True)
class TextJob:
    """It waits or is being read; ``future`` receives what becomes of it."""

    tenant_id: str
    text: AnyText
    size_bytes: int
    future: asyncio.Future[AnyRead]
    retried: bool = False

    @property
    def is_long(self) -> bool:
        """Constraints and pictures are: their cost does not follow from their size, and may end a process."""
        return self.size_bytes > SHORT_BYTES or isinstance(self.text, Constraint | PictureFile)

    def fail(self, error: FairwayError) -> None:
        """Return the error to the caller, unless it has a result or is gone."""
        if not self.future.done():
            self.future.set_exception(error)


def order_of(job: TextJob, limits: TextLimits) -> Order:
    """Return the order that reads the text."""
    cpu_s = limits.cpu_s(job.size_bytes)
    match job.text:
        case Constraint() as constraint:
            return CheckConstraint(constraint, limits.constraint_cpu_s, limits.load_cpu_s)
        case str(text):
            return EncodePrompt(text, cpu_s)
        case RowTexts() as rows:
            return EncodeRows(rows, cpu_s)
        case PictureFile() as picture:
            return DecodePicture(picture, cpu_s)
        case TokenRun() as run:
            return DecodeTokens(run, cpu_s)
        case chat:
            return EncodeChat(chat, cpu_s)


def ended_error(job: TextJob, cause: Cause, limits: TextLimits) -> FairwayError:
    """Return the error of a text on which its process ended."""
    if isinstance(job.text, Constraint):
        return limits.constraint_error(cause)
    if isinstance(job.text, PictureFile):
        return limits.picture_error(cause, job.size_bytes)
    return limits.read_error(cause, job.size_bytes)
