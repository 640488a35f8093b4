"""The versions that one engine serves: those whose computation is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.worker.streams.live_sequence import WorkerSequence
from services.worker.telemetry import VersionTelemetry


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """One version of an engine: what its sequences are counted for."""

    version_digest: str
    model: str = ""  # the deployment
    telemetry: VersionTelemetry | None = None


class ServedVersions:
    """In order of their arrival, never empty. Single writer: the sequence table.

    ``engine`` names the engine as long as it runs, whichever versions join and leave.
    """

    def __init__(self, first: ServedVersion) -> None:
        self.engine = first.version_digest
        self._versions = {first.version_digest: first}

    def __iter__(self) -> Iterator[str]:
        return iter(self._versions)

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, version_digest: str) -> bool:
        return version_digest in self._versions

    @property
    def first(self) -> str:
        """The one that the engine's cached blocks are reported with."""
        return next(iter(self._versions))

    @property
    def shared_as(self) -> str:
        """The engine's name for the scheduler; empty while it is that of its only version."""
        return "" if list(self._versions) == [self.engine] else self.engine

    def add(self, version: ServedVersion) -> None:
        assert version.version_digest not in self._versions, "the engine serves the version already"
        self._versions[version.version_digest] = version

    def remove(self, version_digest: str) -> None:
        assert len(self._versions) > 1, "an engine without a version"
        del self._versions[version_digest]

    def model_of(self, version_digest: str) -> str:
        return self._versions[version_digest].model

    def note_ended(self, sequence: WorkerSequence, reason: str) -> None:
        """Record the end of a sequence in the metrics of its version."""
        telemetry = self._versions[sequence.version_digest].telemetry
        if telemetry is not None:
            telemetry.ended(sequence, reason)
