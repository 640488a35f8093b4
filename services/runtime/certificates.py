"""The certificate of this process, which is replaced while it runs: from files, or from a Workload API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from ssl import SSLContext
from typing import Final, Protocol, TypeVar

import structlog
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fairway.tls import (
    FILES,
    CertificateProblem,
    TlsIdentity,
    checked_identity,
    read_folder,
    ssl_context,
)
from services.ports.clock import Clock
from services.runtime.config import ConfigError

log = structlog.get_logger()

Made = TypeVar("Made")
FIRST_S: Final = 10.0
_OPTION: Final = "install Fairway with its option `spiffe`, or set FAIRWAY_TLS_DIR instead"
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


class WorkloadCertificates:
    """The first identity that an agent such as SPIRE's has for this process. Implements ``Certificates``.

    A thread of the library follows the agent's stream. The identity of an agent that went away stays in use
    until it expires. Lives are short, so the Workload API has no list of revoked certificates.
    """

    def __init__(self, socket: str, *, first_s: float = FIRST_S) -> None:
        """Return once the agent sent an identity. Raises ConfigError after ``first_s``."""
        try:
            from spiffe import X509Source
            from spiffe.errors import PySpiffeError
        except ImportError as exc:
            raise ConfigError(f"FAIRWAY_SPIFFE_SOCKET needs the package `spiffe`: {_OPTION}") from exc
        self._ended = PySpiffeError
        try:
            self._source = X509Source(socket_path=socket, timeout_in_seconds=first_s)
        except PySpiffeError as exc:
            raise ConfigError(
                f"the agent at {socket} sent no identity ({exc}): set FAIRWAY_SPIFFE_SOCKET to its socket, "
                "and register this process with it"
            ) from exc
        self._svid: object = None
        self._bundle: object = None
        try:
            self._identity = self._read()
        except CertificateProblem as exc:
            self.close()
            raise ConfigError(str(exc)) from exc

    def current(self) -> TlsIdentity:
        try:
            self._identity = self._read()
        except (self._ended, CertificateProblem) as exc:
            log.warning("certificate.not_replaced", problem=str(exc))
        return self._identity

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._source.close()

    def _read(self) -> TlsIdentity:
        context = self._source.get_x509_context()
        svid = context.default_svid
        bundle = context.x509_bundle_set.get_bundle_for_trust_domain(svid.spiffe_id.trust_domain)
        if bundle is None:
            raise CertificateProblem(f"the agent sent no authorities of {svid.spiffe_id.trust_domain}")
        if svid is self._svid and bundle is self._bundle:
            return self._identity
        key = svid.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        chain = b"".join(each.public_bytes(Encoding.PEM) for each in svid.cert_chain)
        roots = b"".join(sorted(each.public_bytes(Encoding.PEM) for each in bundle.x509_authorities))
        found = checked_identity(chain, key, roots, b"", f"the identity {svid.spiffe_id}")
        self._svid, self._bundle = svid, bundle
        return found


def renewed(certificates: Certificates | None, make: Callable[[], Made]) -> Callable[[], Made]:
    """Return a source of what ``make`` returns, which is made again after the certificate was replaced."""
    used, made = certificates and certificates.current(), make()

    def present() -> Made:
        nonlocal used, made
        if certificates is not None and (found := certificates.current()) is not used:
            used, made = found, make()
        return made

    return present


def renewed_context(
    certificates: Certificates, *, server: bool, verify_peer: bool
) -> Callable[[], SSLContext]:
    """Return a source of contexts with the present certificate."""
    return renewed(
        certificates, lambda: ssl_context(certificates.current(), server=server, verify_peer=verify_peer)
    )
