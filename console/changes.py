"""The changes that buttons make: the method of each, and its request from the fields of the form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.v1 import controlplane_pb2 as cp
from services.core.errors import InvalidInput

Form = Mapping[str, str]
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Change:
    """``fields`` returns those of the request, ``back`` the page that shows the result."""

    method: str
    done: str  # what the next page reports, with the name
    back: Callable[[Form], str]
    fields: Callable[[Form, float], Mapping[str, Any]]


def _rollout(form: Form) -> str:
    return f"/rollouts/{quote(form.get('name', ''), safe='')}"


def _tenant(form: Form) -> str:
    return f"/tenants/{quote(form.get('tenant', ''), safe='')}"


def _fleet(form: Form) -> str:
    return "/"


def _name(form: Form, unix_s: float) -> dict[str, Any]:
    return {"name": form.get("name", "")}


def _promoted(form: Form, unix_s: float) -> dict[str, Any]:
    return {**_name(form, unix_s), "to_end": form.get("to_end") == "on", "arm": form.get("arm", "")}


def _reasoned(form: Form, unix_s: float) -> dict[str, Any]:
    return {**_name(form, unix_s), "reason": form.get("reason", "")[:256]}


def _hours(form: Form, name: str) -> float:
    """Return a number of hours; 0 for none. Raises InvalidInput."""
    text = form.get(name, "").strip()
    try:
        found = float(text or 0)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 24 * 3650:
        raise InvalidInput(f"{text!r} is no number of hours: write one such as 24, or nothing for none")
    return found


def _rotated(form: Form, unix_s: float) -> dict[str, Any]:
    return {**_name(form, unix_s), "grace": Duration(seconds=round(_hours(form, "grace_h") * _HOUR_S))}


def _created(form: Form, unix_s: float) -> dict[str, Any]:
    role = "KEY_ROLE_" + form.get("role", "").upper().replace("-", "_")
    if role not in cp.KeyRole.DESCRIPTOR.values_by_name:
        raise InvalidInput(f"{form.get('role')!r} is no role of a tenant's key: choose one")
    key = cp.Key(role=cp.KeyRole.Value(role), tenant=form.get("tenant", ""))
    key.metadata.name = form.get("name", "")
    if hours := _hours(form, "expire_h"):
        key.expire_time.CopyFrom(Timestamp(seconds=int(unix_s + hours * _HOUR_S)))
    return {"key": key}


CHANGES: Final[Mapping[str, Change]] = {
    "promote": Change("PromoteRollout", "was promoted", _rollout, _promoted),
    "pause": Change("PauseRollout", "is paused", _rollout, _name),
    "resume": Change("ResumeRollout", "continues", _rollout, _name),
    "abort": Change("AbortRollout", "is being aborted", _rollout, _reasoned),
    "revert": Change("RevertRollout", "is being reverted", _rollout, _reasoned),
    "cordon": Change("CordonNode", "is cordoned", _fleet, _name),
    "uncordon": Change("UncordonNode", "takes work again", _fleet, _name),
    "drain": Change("DrainNode", "is being drained", _fleet, _name),
    "create-key": Change("CreateKey", "was created", _tenant, _created),
    "rotate-key": Change("RotateKey", "was rotated", _tenant, _rotated),
    "delete-key": Change("DeleteKey", "was deleted", _tenant, _name),
}
