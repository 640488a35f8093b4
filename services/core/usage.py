"""What requests used, on its way to the usage ledger.

A gateway reports each request once, when it has settled it. A worker reports each sequence once, when it has
ended there; only workers measure device time. The ledger joins both by request id: tokens and list price
come from the gateway, device time from the workers, and the tokens of a request whose gateway died from its
workers.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field

from services.core.generation import Usage


class RequestUsage(Struct, frozen=True):
    """A settled request, as its gateway reports it."""

    request_id: str
    tenant: str
    key_id: str
    user: str  # the client's name of its end user; empty: none
    model: str  # the deployment
    version_digest: str
    ended_unix_s: float
    usage: Usage
    list_micros: int  # cost at list price
    labels: dict[str, str] = field(default_factory=dict)  # the key's labels, such as its cost centre
    # Whether the tenant has budgets: the outbox has room of its own for such events. Not stored.
    budgeted: bool = False


class SequenceDeviceUse(Struct, frozen=True):
    """What one sequence used on one worker until it ended there."""

    request_id: str
    choice: int
    tenant: str
    model: str  # the deployment
    version_digest: str
    worker_id: str
    device_type: str
    cost_per_hour: float  # the device's cost in currency units
    ended_unix_s: float
    usage: Usage  # tokens computed or read from the cache on this worker
    device_s: float  # its share of the steps that it took part in


class Residence(Struct, frozen=True):
    """A deployment that is loaded on a device."""

    deployment: str
    owner: str  # the owner of the deployment; empty: not stated
    memory_ratio: float  # its engine's part of the device's memory


class DeviceInterval(Struct, frozen=True):
    """How a device spent an interval. ``busy_s``: engine steps; the rest of the interval it was idle."""

    worker_id: str
    device_type: str
    cost_per_hour: float
    began_unix_s: float
    ended_unix_s: float
    busy_s: float
    attributed_s: float  # part of ``busy_s`` that sequences were charged
    residents: tuple[Residence, ...] = ()  # what was loaded at its end


UsageEvent = RequestUsage | SequenceDeviceUse | DeviceInterval

MAX_MICROS_PER_TOKEN: Final = 1_000_000  # the highest price that a deployment can have
MAX_INTERVAL_S: Final = 1e6


def implausible(event: UsageEvent) -> tuple[str, str] | None:
    """Return a field that contradicts the others and why; None for an event that can have been measured."""
    match event:
        case RequestUsage(usage=usage, list_micros=list_micros):
            most = (usage.prompt_tokens + usage.output_tokens) * MAX_MICROS_PER_TOKEN
            if list_micros > most:
                return "list_micros", f"is {list_micros}; its tokens cost at most {most}"
        case DeviceInterval():
            if event.ended_unix_s - event.began_unix_s > MAX_INTERVAL_S:
                return "began_unix_ms", f"is more than {MAX_INTERVAL_S:g} s before ended_unix_ms"
            if event.attributed_s > event.busy_s * 1.001 + 1e-3:
                return "attributed_s", f"is {event.attributed_s:g}; busy_s is {event.busy_s:g}"
            if (held := sum(one.memory_ratio for one in event.residents)) > 1.001:
                return "residents", f"have {held:g} of the device's memory"
    return None
