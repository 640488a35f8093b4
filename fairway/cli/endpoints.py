"""Addresses and keys of an installation: ``.fairway/endpoints.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from fairway.cli.state import read_json, write_json


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses are host:port, except ``http``.

    If a role has several processes, the singular field has the first one and the plural field all of them.
    """

    # URL without a path.
    http: str
    grpc: str  # the first gateway
    api_key: str  # for the data plane
    admin_key: str  # for the control plane and the registry
    # "": none is deployed.
    model: str
    registry: str = ""  # gRPC server
    controlplane: str = ""  # the first control plane
    scheduler: str = ""  # the first scheduler
    workers: tuple[str, ...] = ()  # gRPC servers of all workers
    gateways: tuple[str, ...] = ()  # gRPC servers of all gateways
    schedulers: tuple[str, ...] = ()  # gRPC servers of all schedulers
    controlplanes: tuple[str, ...] = ()  # gRPC servers of all control planes
    # By process: the server of /metrics, /healthz and /readyz.
    metrics: dict[str, str] = field(default_factory=dict)
    supervisor_pid: int = 0  # 0: unknown
    # By process.
    pids: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file in one step, mode 0600."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Endpoints | None:
        """Return the content of ``path``, or None without a complete file of the right types."""
        raw = read_json(path)
        try:
            return None if raw is None else msgspec.convert(raw, cls)
        except msgspec.ValidationError:
            return None
