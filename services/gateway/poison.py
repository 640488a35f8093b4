"""Inputs that end the process which computes them: refused at admission, condemned by their own losses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from services.core.errors import PoisonedInput, StoreUnavailable
from services.core.fixed_cost.rows import RawTensor
from services.core.generation import GenerationSpec
from services.core.poison.fingerprint import fingerprint_of, fingerprint_of_row
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

    def may_refuse(self, version_digest: str) -> bool:
        """Whether an input of the version is quarantined."""
        return self._quarantine.holds(version_digest)

    def check(self, spec: GenerationSpec) -> None:
        """Return if the input may run. Raises PoisonedInput. Without an entry of the version nothing is
        hashed."""
        if self._may_hold(spec.model, spec.version_digest):
            self._check(spec.model, spec.version_digest, fingerprint_of(spec, self._secret))

    def check_rows(self, model: str, version_digest: str, rows: Sequence[Sequence[RawTensor]]) -> None:
        """Return if every row of a fixed-cost model may run. Raises PoisonedInput, as ``check`` does."""
        if self._may_hold(model, version_digest):
            for row in rows:
                self._check(model, version_digest, fingerprint_of_row(row, self._secret))

    async def condemn(self, spec: GenerationSpec, deaths: int) -> None:
        """Return once the fleet refuses the input, or the store did not take it in time.

        A caller that is cancelled meanwhile does not stop the write.
        """
        fingerprint = fingerprint_of(spec, self._secret)
        await self._condemn(spec.request_id, spec.model, spec.version_digest, fingerprint, deaths)

    async def condemn_row(
        self, request_id: str, model: str, version_digest: str, row: Sequence[RawTensor], deaths: int
    ) -> None:
        """As ``condemn``, for one row of a fixed-cost model."""
        fingerprint = fingerprint_of_row(row, self._secret)
        await self._condemn(request_id, model, version_digest, fingerprint, deaths)

    def _may_hold(self, model: str, digest: str) -> bool:
        self._telemetry.may_be_poisoned(model, digest)
        return self._quarantine.holds(digest)

    def _check(self, model: str, digest: str, fingerprint: str) -> None:
        found = self._quarantine.find(digest, fingerprint)
        if found is None:
            return
        self._telemetry.poisoned(model, digest, "refused")
        left_s = max(1, round(found.until_unix_s - self._clock.unix_s()))
        ended = f"ended the engine of version {digest} on {found.deaths} tries"
        if not found.deaths:
            ended = f"raised an exception in the model of version {digest}, alone in its batch"
        raise PoisonedInput(
            f"this input {ended}; it is refused on this version for another {left_s} s",
            version_digest=digest,
            model=model,
            deaths=found.deaths,
            left_s=left_s,
        )

    async def _condemn(self, request_id: str, model: str, digest: str, fingerprint: str, deaths: int) -> None:
        self._telemetry.poisoned(model, digest, CONDEMNED)
        log.error("input.condemned", request_id=request_id, version_digest=digest, deaths=deaths)
        writing = self._supervisor.spawn(
            f"quarantine {request_id}", self._add(request_id, model, digest, fingerprint, deaths)
        )
        await asyncio.wait({writing}, timeout=_WRITE_S)

    async def _add(self, request_id: str, model: str, digest: str, fingerprint: str, deaths: int) -> None:
        try:
            await self._quarantine.add(digest, fingerprint, model=model, deaths=deaths)
        except StoreUnavailable as error:
            log.warning("input.quarantined_here_only", request_id=request_id, error=error.message)


def condemned_error(spec: GenerationSpec, deaths: int) -> PoisonedInput:
    """Return the error of a request whose input is the cause of its losses."""
    return PoisonedInput(
        f"this input ended the engine of version {spec.version_digest} on {deaths} tries, alone in its step",
        version_digest=spec.version_digest,
        model=spec.model,
        deaths=deaths,
    )
