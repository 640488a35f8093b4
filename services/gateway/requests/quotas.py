"""The quotas of a request while it is admitted: what it takes of the limiter, and gives back if it fails.

A slot that the store granted is always released, also when the caller is cancelled before the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final

import structlog

from services.core.errors import FairwayError, InvalidInput, OverQuota, UsageUnrecorded
from services.core.generation import Principal, Usage
from services.core.limits import Claim, Limit, Price
from services.core.usage import RequestUsage
from services.gateway.policy.claims import Payer, RequestBound
from services.gateway.service_types import Ports
from services.ports.limiter import NO_PRICE, AtOnce, Reservation
from services.runtime.identity import KeyDirectory

log = structlog.get_logger()
_FULL_RETRY_S: Final = 5.0
_MAX_PAYERS: Final = 10_000
_ADMITTED: Final = "ADMITTED"


class RequestQuotas:
    """Acquires the slots of all requests of a gateway."""

    def __init__(self, identity: KeyDirectory, ports: Ports) -> None:
        self._identity = identity
        self._ports = ports
        self._payers: dict[str, Payer] = {}  # without an end user, by key; as their records were

    def payer(self, principal: Principal, user: str) -> Payer:
        """Return whose limits and budgets apply. Raises Unauthenticated for a key that is not valid now.

        The end user of a token is its owner, whatever ``user`` the request names.
        """
        tenant, key = self._identity.tenant_and_key(principal)
        user = principal.key_id if principal.of_token else user
        budgets = self._ports.budgets_of(tenant.meta.name)
        if user:
            return Payer(tenant, key, user, budgets)
        found = self._payers.get(principal.key_id)
        if (
            found is None
            or found.tenant is not tenant
            or found.key is not key
            or found.budgets is not budgets
        ):
            if len(self._payers) >= _MAX_PAYERS:
                self._payers.clear()
            found = self._payers[principal.key_id] = Payer(tenant, key, user, budgets)
        return found

    def require_recorded(self, payer: Payer) -> None:
        """Raises UsageUnrecorded while the use of a tenant with budgets cannot be recorded."""
        problem = self._ports.unrecorded() if payer.budgets else ""
        if problem:
            error = UsageUnrecorded(
                f"this tenant's use cannot be recorded: {problem}", retry_after_s=_FULL_RETRY_S
            )
            self._ports.telemetry.admission(error.reason)
            raise error

    async def reserve(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[Claim] = (),
        price: Price = NO_PRICE,
    ) -> HeldQuota:
        """Return the slot, with the claims if the store reserves them at once.

        A call cancelled before the store's answer releases all of it afterwards.
        """
        ports = self._ports
        if ports.limiter is None:
            return HeldQuota(Reservation(tenant_id, request_id), ports)
        answer = ports.limiter.admit(tenant_id, request_id, limits, claims, price)
        if isinstance(answer, AtOnce):
            ports.telemetry.admission(_ADMITTED)
            return HeldQuota(answer.value, ports)
        admission = ports.supervisor.spawn(f"admit {request_id}", _as_value(answer))
        try:
            reservation = granted(await asyncio.shield(admission), ports)
        except asyncio.CancelledError:
            ports.supervisor.spawn(f"undo {request_id}", self._undo(admission))
            raise
        finally:
            del admission  # a refusal's traceback refers to this frame
        ports.telemetry.admission("ADMITTED_LOCALLY" if reservation.local else _ADMITTED)
        return HeldQuota(reservation, ports)

    async def _undo(self, admission: asyncio.Task[Reservation | FairwayError]) -> None:
        outcome = await admission
        if not isinstance(outcome, FairwayError):
            await HeldQuota(outcome, self._ports).release()


class HeldQuota:
    """What one request holds from its admission until it runs."""

    def __init__(self, reservation: Reservation, ports: Ports) -> None:
        self.reservation = reservation
        self._ports = ports
        self._claiming: asyncio.Task[Reservation | FairwayError] | None = None

    async def claim(self, claims: Sequence[Claim], price: Price) -> None:
        """Reserve tokens and budgets too, at most once, unless the admission reserved all of them.

        Raises TokenRateExceeded, BudgetExceeded.
        """
        ports = self._ports
        if ports.limiter is None or all(claim in self.reservation.claims for claim in claims):
            return
        answer = ports.limiter.reserve(self.reservation, claims, price)
        if not isinstance(answer, AtOnce):
            name = f"reserve {self.reservation.request_id}"
            self._claiming = ports.supervisor.spawn(name, _as_value(answer))
            self.reservation = granted(await asyncio.shield(self._claiming), ports)

    async def undo(self, error: BaseException) -> None:
        """Release everything because of an error, which is returned to the client afterwards.

        So the client's next request finds the slot free.
        """
        if isinstance(error, OverQuota):  # the request stays counted against this rate
            error.request_rate = self.reservation.request_rate
        undoing = self._ports.supervisor.spawn(f"undo {self.reservation.request_id}", self.release())
        await asyncio.shield(undoing)

    async def release(self) -> None:
        """Release what the request holds, including the tokens that ``claim`` may have reserved."""
        claiming, self._claiming = self._claiming, None
        if claiming is not None and isinstance(outcome := await claiming, Reservation):
            self.reservation = outcome
        if self._ports.limiter is not None:
            settling = self._ports.limiter.settle(self.reservation, Usage(0, 0))
            await _settled_or_logged(settling, self.reservation)


async def settled(ports: Ports, reservation: Reservation, event: RequestUsage) -> None:
    """Return once the slot is released, before the terminal event: the client's next request finds it free.

    It is released as well when the caller is cancelled meanwhile. A store that does not answer must not delay
    a finished output: the reservation expires by itself.

    The usage is reported after the settlement. If the gateway is killed between them, the workers' reports of
    the request are booked; in the other order the ledger would have what the limiter never charged.
    """
    try:
        settling = ports.limiter.settle(reservation, event.usage) if ports.limiter is not None else None
        if settling is not None and not isinstance(settling, AtOnce):
            name, logged = f"settle {reservation.request_id}", _settled_or_logged(settling, reservation)
            await asyncio.shield(ports.supervisor.spawn(name, logged))
    finally:
        ports.report_usage(event)


def granted(outcome: Reservation | FairwayError, ports: Ports) -> Reservation:
    """Return the reservation. Raises the refusal, and counts it."""
    if isinstance(outcome, FairwayError):
        ports.telemetry.admission(outcome.reason)
        try:
            raise outcome
        finally:
            del outcome  # its traceback refers to this frame
    return outcome


def check_timeout(asked_s: float, longest: RequestBound) -> None:
    """Raises InvalidInput for a requested time above the limit. Without a request the limit applies."""
    if longest.exceeded(asked_s):
        raise InvalidInput(
            f"timeout {asked_s:g} s is above {longest.name}, {longest.value:g} s",
            field="timeout",
            timeout_s=asked_s,
            limit_s=longest.value,
        )


async def _settled_or_logged(settling: Awaitable[None], reservation: Reservation) -> None:
    try:
        await settling
    except FairwayError as error:
        log.warning("request.settle_failed", request_id=reservation.request_id, reason=error.reason)


async def _as_value(call: Awaitable[Reservation]) -> Reservation | FairwayError:
    """Return a refusal as a value: an exception that leaves a task of the supervisor is a crash."""
    try:
        return await call
    except FairwayError as error:
        return error
