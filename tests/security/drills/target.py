"""What an attacker is given of the installation: addresses, and the keys that it is to have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.security.drills.judge import MAX_GAP_S, Found

# Sources of an attack; the canaries and the installation itself come from 127.0.0.1.
SOURCES: Final = tuple(f"127.0.0.{number}" for number in range(66, 82))


@dataclass(frozen=True, slots=True)
class Gateway:
    name: str
    grpc: str
    http: str


@dataclass(frozen=True, slots=True)
class Target:
    """``roles`` and ``metrics``: host:port by process. ``share``: which of how many attackers this is."""

    state: Path
    model: str
    admin_key: str
    gateways: Sequence[Gateway]
    roles: Mapping[str, str]
    metrics: Mapping[str, str]
    keys: dict[str, str]
    share: tuple[int, int] = (0, 1)

    @property
    def controlplane(self) -> str:
        return self.roles["controlplane"]

    @property
    def registry(self) -> str:
        return self.roles["registry"]


@dataclass(frozen=True, slots=True)
class Attack:
    """``kills``: role processes that it ends on purpose. ``pauses``: no canary can be served meanwhile.

    ``processes``: how many attackers share it. ``stores``: it takes a store's data, so that what was settled
    before is compared before. ``ends``: the installation is of no use afterwards. ``max_gap_s``: how long a
    canary may wait for an event.
    """

    name: str
    what: str
    holds: str
    act: Callable[[Target], Awaitable[Found]]
    limit_s: float = 60.0
    processes: int = 1
    kills: tuple[str, ...] = ()
    pauses: bool = False
    stores: bool = False
    ends: bool = False
    max_gap_s: float = MAX_GAP_S
