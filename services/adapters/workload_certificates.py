"""Certificates from SPIRE's Workload API, or any other agent that serves it, in place of files."""

from __future__ import annotations

from typing import Final

import structlog
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fairway.tls import CertificateProblem, TlsIdentity, checked_identity
from services.runtime.config import ConfigError

log = structlog.get_logger()

FIRST_S: Final = 10.0
_OPTION: Final = "install Fairway with its option `spiffe`, or set FAIRWAY_TLS_DIR instead"


class WorkloadCertificates:
    """The first identity that the agent has for this process. Implements ``Certificates``.

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
