"""Where an installation listens and what opens it: ``.fairway/endpoints.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from fairway.cli.state import read_json, write_json


@dataclass(frozen=True, slots=True)
class Endpoints:
    """``http`` is a URL without a path; every other address is host:port. ``model`` is "" without one.

    Where a role has several processes, the singular names the first one and the plural all of them.
    ``metrics`` is where each process serves /metrics, /healthz and /readyz.
    """

    http: str
    grpc: str
    api_key: str
    admin_key: str
    model: str
    registry: str = ""
    controlplane: str = ""
    scheduler: str = ""
    workers: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    schedulers: tuple[str, ...] = ()
    controlplanes: tuple[str, ...] = ()
    metrics: dict[str, str] = field(default_factory=dict)
    supervisor_pid: int = 0
    pids: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file in one step, mode 0600."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Endpoints | None:
        """Return what ``path`` holds, or None when there is no complete file of the right types."""
        raw = read_json(path)
        try:
            return None if raw is None else msgspec.convert(raw, cls)
        except msgspec.ValidationError:
            return None
