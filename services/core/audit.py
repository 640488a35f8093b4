"""Entries of the audit log, and the state of the log in the store.

An entry has the fields of ``AuditEntry`` and no others: no prompt, no output, no secret and no content of a
resource has a place in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Final, TypeVar

# Outside the root: an entry does not wake the watchers of the fleet's state.
AUDIT: Final = "/fairway/v1-audit/"
PENDING: Final = AUDIT + "pending/"
HEAD: Final = AUDIT + "head"
MAX_ENTRY_BYTES: Final = 4096
OK: Final = "OK"
PLATFORM: Final = "platform"  # the role of what no caller asked for
_MAX_TEXT: Final = {"resource": 320, "subject": 256}  # UTF-8 bytes of a text
_MAX_OTHERS: Final = 128
_UNSAFE: Final = re.compile(r"[^\x20-\x7e\xa0-\uffff]")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts. All are empty for a caller that was not authenticated, but for its address and ``key``."""

    key: str = ""  # the key's id; for a failed authentication, the one that was claimed
    role: str = ""
    tenant: str = ""
    subject: str = ""  # the subject of a token
    certificate: str = ""  # the identity in a certificate
    address: str = ""  # the peer of the connection, without its port


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What happened."""

    method: str  # Service/Method, or the method and path of a route
    actor: Actor
    resource: str = ""
    unix_s: float = 0.0  # the time of the first of ``count``
    outcome: str = OK  # OK, or the reason of the error
    request_id: str = ""
    source: str = ""  # the role that recorded it
    count: int = 1  # how many equal ones it stands for
    revision: int = 0  # the store's revision that contains the change

    def bounded(self) -> AuditEntry:
        """Return the entry with each text cut to its length and without control characters.

        Encoded, it has at most ``MAX_ENTRY_BYTES``.
        """
        return replace(_cut(self), actor=_cut(self.actor))


def _cut(record: T) -> T:
    texts = {
        each.name: _short(text, _MAX_TEXT.get(each.name, _MAX_OTHERS))
        for each in fields(record)  # type: ignore[arg-type]
        if isinstance(text := getattr(record, each.name), str)
    }
    return replace(record, **texts)  # type: ignore[type-var]


def _short(text: str, most_bytes: int) -> str:
    text = _UNSAFE.sub("?", text)
    encoded = text.encode()
    return text if len(encoded) <= most_bytes else encoded[:most_bytes].decode("utf-8", "ignore")


@dataclass(frozen=True, slots=True)
class AuditHead:
    """The log in the store: what was written of it, and the batch that comes next, in its order.

    A batch is fixed before any of it is written, so that whoever continues writes the same bytes.
    """

    origin: str
    size: int = 0
    root: str = ""  # hash of the tree in hex; empty: no entry
    checkpoint: str = ""  # the signed note; empty: no entry
    verifiers: tuple[str, ...] = ()  # keys that signed it
    batch: tuple[str, ...] = ()  # JSON texts of the entries
