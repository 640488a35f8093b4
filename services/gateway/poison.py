"""Inputs that end the process which computes them: refused at admission, condemned by their own losses."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from services.core.errors import PoisonedInput, StoreUnavailable
from services.core.generation import GenerationSpec
from services.core.poison.fingerprint import fingerprint_of
from services.gateway.telemetry import CONDEMNED, GatewayTelemetry
from services.ports.clock import Clock
from services.ports.poison.quarantine import Quarantine
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

_WRITE_S: Final = 2.0


class PoisonGate:
    """The gateway's use of the fleet's quarantine. ``secret`` keys the fingerprints."""

    def __init__(
        self,
        quarantine: Quarantine,
        *,
        secret: bytes,
        clock: Clock,
        supervisor: Supervisor,
        telemetry: GatewayTelemetry,
    ) -> None:
        self._quarantine = quarantine
        self._secret = secret
        self._clock = clock
        self._supervisor = supervisor
        self._telemetry = telemetry

    def check(self, spec: GenerationSpec) -> None:
        """Return if the input may run. Raises PoisonedInput. Without an entry of the version nothing is
        hashed."""
        digest = spec.version_digest
        self._telemetry.may_be_poisoned(spec.model, digest)
        if not self._quarantine.holds(digest):
            return
        found = self._quarantine.find(digest, fingerprint_of(spec, self._secret))
        if found is None:
            return
        self._telemetry.poisoned(spec.model, digest, "refused")
        left_s = max(1, round(found.until_unix_s - self._clock.unix_s()))
        raise PoisonedInput(
            f"this input ended the engine of version {digest} on {found.deaths} tries; it is refused on this "
            f"version for another {left_s} s",
            version_digest=digest,
            model=spec.model,
            deaths=found.deaths,
            left_s=left_s,
        )

    async def condemn(self, spec: GenerationSpec, deaths: int) -> None:
        """Return once the fleet refuses the input, or the store did not take it in time.

        A caller that is cancelled meanwhile does not stop the write.
        """
        digest = spec.version_digest
        self._telemetry.poisoned(spec.model, digest, CONDEMNED)
        log.error("input.condemned", request_id=spec.request_id, version_digest=digest, deaths=deaths)
        writing = self._supervisor.spawn(f"quarantine {spec.request_id}", self._add(spec, deaths))
        await asyncio.wait({writing}, timeout=_WRITE_S)

    async def _add(self, spec: GenerationSpec, deaths: int) -> None:
        try:
            await self._quarantine.add(
                spec.version_digest, fingerprint_of(spec, self._secret), model=spec.model, deaths=deaths
            )
        except StoreUnavailable as error:
            log.warning("input.quarantined_here_only", request_id=spec.request_id, error=error.message)


def condemned_error(spec: GenerationSpec, deaths: int) -> PoisonedInput:
    """Return the error of a request whose input is the cause of its losses."""
    return PoisonedInput(
        f"this input ended the engine of version {spec.version_digest} on {deaths} tries, alone in its step",
        version_digest=spec.version_digest,
        model=spec.model,
        deaths=deaths,
    )
