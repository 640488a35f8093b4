"""Events of resources, as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """The kind of resource that an event concerns."""

    TENANT = "tenant"
    KEY = "key"
    DEPLOYMENT = "deployment"
    NODE = "node"
    MODEL = "model"
    LEADER = "leader"
    BUDGET = "budget"
    ROLLOUT = "rollout"
    OBJECTIVE = "objective"


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One event. Key: ``EVENTS`` and a name that sorts by time. ``reason`` is a stable word."""

    time_unix_s: float
    kind: EventKind
    resource: str
    reason: str
    message: str
    warning: bool = False
