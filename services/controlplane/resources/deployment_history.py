"""The earlier states of a deployment: each change stores one, in the transaction of the change.

A state has a key of its own, named by the time of the change, so that concurrent changes of different
deployments, and retries of one, never conflict here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.controlplane.fleet import readable
from services.core.records import ROOT, Deployment, dump
from services.ports.store import Delete, Operation, Put, Store

DEPLOYMENT_HISTORY: Final = ROOT + "deployment-history/"
MAX_REVISIONS: Final = 32


@dataclass(frozen=True, slots=True)
class DeploymentRevision:
    """A state that a deployment had from a time on. ``cause``: update, or the rollout that ended in it."""

    time_unix_s: float
    deployment: Deployment
    cause: str = ""


def revision_put(deployment: Deployment, time_unix_s: float, cause: str) -> Put:
    """Return the write that keeps a state."""
    revision = DeploymentRevision(time_unix_s, deployment, cause)
    return Put(f"{_prefix(deployment.meta.name)}{_name_of(time_unix_s)}", dump(revision))


async def revisions_of(store: Store, name: str) -> tuple[tuple[str, DeploymentRevision], ...]:
    """Return the stored states with their names, the newest first."""
    listing = await store.list(_prefix(name))
    found = [(entry.key.rpartition("/")[2], readable(entry, DeploymentRevision)) for entry in listing.entries]
    return tuple((key, one) for key, one in reversed(found) if one is not None)


async def kept(store: Store, deployment: Deployment, time_unix_s: float, cause: str) -> Sequence[Operation]:
    """Return the writes that keep a state and drop those beyond ``MAX_REVISIONS``."""
    entries = (await store.list(_prefix(deployment.meta.name))).entries
    surplus = entries[: max(0, len(entries) + 1 - MAX_REVISIONS)]
    return [*(Delete(entry.key) for entry in surplus), revision_put(deployment, time_unix_s, cause)]


def _prefix(name: str) -> str:
    return f"{DEPLOYMENT_HISTORY}{name}/"


def _name_of(time_unix_s: float) -> str:
    return f"{round(time_unix_s * 1e6):017d}"
