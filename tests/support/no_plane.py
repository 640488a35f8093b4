"""What answers operators' queries where no control plane leads."""

from __future__ import annotations

from typing import Any

from services.core.errors import NoLeader


class NoPlane:
    """``LeadingPlane``, and each of the servicer's protocols that answers from what the leader has."""

    async def _refuse(self, *request: object, forwarded: bool = False) -> Any:
        raise NoLeader("no control plane leads")

    ask = page = finished = get = diagnose = save_baseline = _refuse
