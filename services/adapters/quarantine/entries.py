"""The entries of a quarantine: which are in force, and which make room for another. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.ports.poison.quarantine import Quarantined

TTL_S: Final = 3600


@dataclass(frozen=True, slots=True)
class QuarantineLimits:
    """``ttl_s`` is how long an input is refused. The other limits are the most entries of a version, and of
    all."""

    ttl_s: int = TTL_S
    max_of_version: int = 256
    max_entries: int = 4096


def in_force(entry: Quarantined | None, now_unix_s: float) -> Quarantined | None:
    return entry if entry is not None and now_unix_s < entry.until_unix_s else None


def displaced(
    entries: Iterable[Quarantined], added: Quarantined, limits: QuarantineLimits
) -> tuple[Quarantined, ...]:
    """Return the entries that ``added`` replaces: the oldest of its version, then the oldest of all."""
    key = added.version_digest, added.fingerprint
    others = sorted(
        (entry for entry in entries if (entry.version_digest, entry.fingerprint) != key),
        key=lambda entry: (entry.until_unix_s, entry.version_digest, entry.fingerprint),
    )
    same = [entry for entry in others if entry.version_digest == added.version_digest]
    out = same[: max(0, len(same) + 1 - limits.max_of_version)]
    left = [entry for entry in others if entry not in out]
    return (*out, *left[: max(0, len(left) + 1 - limits.max_entries)])
