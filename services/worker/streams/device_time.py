"""Device time of a worker: reported to the usage outbox by sequence and by interval.

``busy`` time is that of engine steps; sequences are charged the ``attributed`` part of it. Where several
engines run at once on the device their steps overlap: busy time is their sum, and idle time what is left of
the interval, if anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.core.generation import Usage
from services.core.usage import DeviceInterval, SequenceDeviceUse
from services.ports.clock import Clock
from services.ports.usage import UsageOutbox
from services.worker.streams.live_sequence import WorkerSequence

INTERVAL_S: Final = 10.0
IDLE_INTERVAL_S: Final = 60.0  # the interval while nothing runs


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A worker's device, as reported. ``cost_per_hour`` is in any one currency; 0: unknown."""

    worker_id: str
    device_type: str = ""
    cost_per_hour: float = 0.0


class DeviceTime:
    """Single writer: the worker's event loop."""

    def __init__(self, kind: DeviceKind, outbox: UsageOutbox, clock: Clock) -> None:
        self._kind = kind
        self._outbox = outbox
        self._clock = clock
        self.busy_s = 0.0
        self.attributed_s = 0.0
        self._began_s = self._interval_s = clock.monotonic_s()
        self._interval_unix_s = clock.unix_s()
        self._reported_busy_s = 0.0
        self._reported_attributed_s = 0.0
        self._idle_s = 0.0

    @property
    def idle_s(self) -> float:
        """Time since the start in which no engine was in a step. It never falls."""
        elapsed_s = self._clock.monotonic_s() - self._began_s
        self._idle_s = max(self._idle_s, elapsed_s - self.busy_s)
        return self._idle_s

    def sequence_ended(self, sequence: WorkerSequence, ended_s: float) -> None:
        """Report a sequence that ended at ``ended_s``, monotonic, and is charged no more."""
        spec = sequence.spec
        self._report_use(
            request_id=spec.generation.request_id,
            choice=spec.choice,
            tenant=spec.tenant_id,
            model=sequence.model,
            version_digest=sequence.version_digest,
            usage=usage_here(sequence),
            age_s=self._clock.monotonic_s() - ended_s,
        )

    def rows_ended(
        self, *, request_id: str, tenant: str, model: str, version_digest: str, usage: Usage
    ) -> None:
        """Report the rows of one request that ran on this worker, once the last has ended."""
        self._report_use(
            request_id=request_id,
            choice=0,
            tenant=tenant,
            model=model,
            version_digest=version_digest,
            usage=usage,
            age_s=0.0,
        )

    def sweep(self, now_s: float) -> None:
        """Report the interval when it is due: sooner if an engine ran in it."""
        elapsed_s = now_s - self._interval_s
        if elapsed_s >= INTERVAL_S and (self.busy_s > self._reported_busy_s or elapsed_s >= IDLE_INTERVAL_S):
            self._report(now_s)

    def close(self) -> None:
        """Report the interval under way."""
        self._report(self._clock.monotonic_s())

    def _report_use(
        self,
        *,
        request_id: str,
        choice: int,
        tenant: str,
        model: str,
        version_digest: str,
        usage: Usage,
        age_s: float,
    ) -> None:
        kind = self._kind
        self._outbox.add(
            SequenceDeviceUse(
                request_id=request_id,
                choice=choice,
                tenant=tenant,
                model=model,
                version_digest=version_digest,
                worker_id=kind.worker_id,
                device_type=kind.device_type,
                cost_per_hour=kind.cost_per_hour,
                ended_unix_s=self._clock.unix_s() - age_s,
                usage=usage,
                device_s=usage.device_s,
            )
        )

    def _report(self, now_s: float) -> None:
        began_unix_s, ended_unix_s = self._interval_unix_s, self._clock.unix_s()
        busy_s = self.busy_s - self._reported_busy_s
        # What corrects an earlier interval by more than this one has is left to the next.
        attributed_s = min(busy_s, max(0.0, self.attributed_s - self._reported_attributed_s))
        self._interval_s, self._interval_unix_s = now_s, ended_unix_s
        self._reported_busy_s += busy_s
        self._reported_attributed_s += attributed_s
        kind = self._kind
        self._outbox.add(
            DeviceInterval(
                kind.worker_id,
                kind.device_type,
                kind.cost_per_hour,
                began_unix_s,
                ended_unix_s,
                busy_s=busy_s,
                attributed_s=attributed_s,
            )
        )


def usage_here(sequence: WorkerSequence) -> Usage:
    """Return the tokens that this worker computed or read from its cache, without output of earlier runs."""
    prefilled = sequence.spec.prefill_tokens
    if sequence.first_token_s is None:
        prefilled -= sequence.prefill_left
    return Usage(
        prompt_tokens=min(prefilled, sequence.prompt_tokens),
        output_tokens=sequence.output_tokens - len(sequence.spec.produced_ids),
        cached_tokens=min(sequence.cached_tokens, sequence.prompt_tokens),
        device_s=sequence.device_us / 1e6,
    )
