"""Identifiers and seeds from the system's random source. Tests pass their own."""

from __future__ import annotations

import secrets
from typing import Final

# Prefixes of response ids in the OpenAI API, before the request id.
ANSWER_PREFIXES: Final = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "responses": "resp_",
    "messages": "msg_",
}


def request_id_of(answer_id: str) -> str:
    """Return the request id, given it or a response id."""
    for prefix in ANSWER_PREFIXES.values():
        if answer_id.startswith(prefix):
            return answer_id.removeprefix(prefix)
    return answer_id


class Ids:
    """Draws from the operating system's random source."""

    def request_id(self) -> str:
        """Return a new id of a request: "req_" and 24 hex digits."""
        return "req_" + secrets.token_hex(12)

    def incident_id(self) -> str:
        """Return a new id that links an error response to a log line."""
        return "inc_" + secrets.token_hex(8)

    def source_id(self) -> str:
        """Return a new id of one life of a process, as a source of usage events."""
        return "src-" + secrets.token_hex(12)

    def store_generation(self) -> str:
        """Return a new id of a store of fleet state: "gen_" and 32 hex digits."""
        return "gen_" + secrets.token_hex(16)

    def seed(self) -> int:
        """Return a sampling seed of 63 bits."""
        return secrets.randbits(63)
