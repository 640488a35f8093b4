"""The certificate of this process, which is replaced while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from ssl import SSLContext
from typing import Final, Protocol

import structlog

from fairway.tls import FILES, CertificateProblem, TlsIdentity, read_folder, ssl_context
from services.ports.clock import Clock
from services.runtime.config import ConfigError

log = structlog.get_logger()

LOOK_S: Final = 1.0  # how long a replaced file may go unnoticed


class Certificates(Protocol):
    """A source of this process's certificate. It may be called from any thread, and at each handshake."""

    def current(self) -> TlsIdentity:
        """Return the present certificate: the same object until it is replaced."""
        ...


class FolderCertificates:
    """The certificate in a folder. Its files are read again after one of them changed.

    Files that do not fit together are being replaced, or damaged: the certificate before them stays in use.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        """Raises ConfigError for a folder without a usable certificate."""
        self._folder = folder
        self._clock = clock
        self._read = self._stamps()
        try:
            self._identity = read_folder(folder)
        except CertificateProblem as exc:
            raise ConfigError(str(exc)) from exc
        self._looked_s = clock.monotonic_s()

    def current(self) -> TlsIdentity:
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s < LOOK_S:
            return self._identity
        self._looked_s = now_s
        stamps = self._stamps()
        if stamps != self._read:
            self._read = stamps  # taken before the files are read: a later write makes another difference
            try:
                self._identity = read_folder(self._folder)
                log.info("certificate.replaced", certificate=str(self._identity.leaf))
            except CertificateProblem as exc:
                log.warning("certificate.not_replaced", problem=str(exc))
        return self._identity

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for name in FILES:
            try:
                state = (self._folder / name).stat()
                found.append((state.st_ino, state.st_mtime_ns, state.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)


def renewed_context(
    certificates: Certificates, *, server: bool, verify_peer: bool
) -> Callable[[], SSLContext]:
    """Return a source of contexts: it returns the same one until the certificate is replaced."""
    made: tuple[TlsIdentity, SSLContext] | None = None

    def context() -> SSLContext:
        nonlocal made
        identity = certificates.current()
        if made is None or made[0] is not identity:
            made = identity, ssl_context(identity, server=server, verify_peer=verify_peer)
        return made[1]

    return context
