"""The lines that a batch writes, in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw, Struct

from services.gateway.batches.records import BatchStatus

_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What the HTTP API answers to a line's body: status and JSON.

    ``waited_s`` is the part of its run that passed in the scheduler's queue and in waits for the engine.
    """

    status: int
    body: bytes
    request_id: str
    waited_s: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status != 200


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """Why the lines that are left do not run, and the batch's status at its end."""

    status: BatchStatus
    code: str
    message: str


class LineResponse(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class LineError(Struct, frozen=True):
    code: str
    message: str


class OutputLine(Struct, frozen=True):
    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


def output_line(name: str, custom_id: str, outcome: LineAnswer | EarlyEnd) -> bytes:
    """Return the line, with its end. ``name`` is unique in the batch."""
    if isinstance(outcome, EarlyEnd):
        line = OutputLine(name, custom_id, None, LineError(outcome.code, outcome.message))
    else:
        response = LineResponse(outcome.status, outcome.request_id, Raw(outcome.body))
        line = OutputLine(name, custom_id, response, None)
    return _encode(line) + b"\n"
