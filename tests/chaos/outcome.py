"""What a client saw of one request: plain values that the checker judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class End(StrEnum):
    """How a request ended for its client."""

    FINISHED = "finished"  # with the terminal event
    ERROR = "error"  # with an error of the server's own, which is a terminal event, too
    CANCELLED = "cancelled"  # the client left, as it meant to
    TRANSPORT = "transport"  # the connection broke: no word of the server
    TRUNCATED = "truncated"  # the stream ended well and without a terminal event
    HANGING = "hanging"  # neither an event nor an end within the client's time


@dataclass(slots=True)
class Outcome:
    """One request. Times are the client's monotonic seconds; ``gateway`` is the last one it was sent to."""

    number: int
    spec: int
    gateway: str
    began_s: float
    slow: bool = False
    tenant: str = ""
    accepted_s: float | None = None
    ended_s: float = 0.0
    end: End | None = None
    reason: str = ""
    message: str = ""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    problems: list[str] = field(default_factory=list)
    # Longest time without an event, the start and the end being events, too.
    silence_s: float = 0.0
    moves: int = 0
    # How often it was told to come back later, before anything of its output.
    deferrals: int = 0
    resumes: int = 0
    request_id: str = ""

    def take(self, offset: int, ids: Sequence[int], text: str) -> None:
        """Note a chunk; what is wrong with it is noted as well."""
        if self.end is not None:
            self.problems.append("an event after the terminal one")
        if offset != len(self.ids):
            kind = "repeated" if offset < len(self.ids) else "lost"
            self.problems.append(f"tokens {kind}: offset {offset} came where {len(self.ids)} was due")
        self.ids.extend(ids)
        self.text += text
