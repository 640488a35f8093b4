"""Addresses of a fleet's services that this command did not start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class FleetAddresses(Protocol):
    """host:port of the services that a bootstrap calls."""

    def of(self, name: str) -> str:
        """Address of "registry" or "controlplane"."""
        ...

    def grpc_of(self, name: str) -> str:
        """gRPC address of one of ``gateway_names``."""
        ...

    @property
    def gateway_names(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class RemoteAddresses:
    """``FleetAddresses`` from the command line. A gateway's name is its address."""

    registry: str
    controlplane: str
    gateways: tuple[str, ...]

    def of(self, name: str) -> str:
        return {"registry": self.registry, "controlplane": self.controlplane}[name]

    def grpc_of(self, name: str) -> str:
        return name if name in self.gateways else self.gateways[0]

    @property
    def gateway_names(self) -> tuple[str, ...]:
        return self.gateways
