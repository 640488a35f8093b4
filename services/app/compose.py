"""The builder of each role. Only the modules of ``roles`` build objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from services.app.environment import Environment
from services.app.process import Role
from services.app.roles.controlplane import controlplane
from services.app.roles.gateway import gateway
from services.app.roles.registry import registry
from services.app.roles.scheduler import scheduler
from services.app.roles.worker import worker

ROLES: Final[Mapping[str, Callable[[Environment], Role]]] = {
    "registry": registry,
    "controlplane": controlplane,
    "scheduler": scheduler,
    "worker": worker,
    "gateway": gateway,
}
