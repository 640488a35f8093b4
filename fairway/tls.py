"""Certificates of roles and operators: the files in a folder, and the SPIFFE id in a certificate.

    tls.crt   the certificate, then its intermediates
    tls.key   its private key
    ca.crt    the authorities whose certificates are trusted
    ca.crl    the certificates that these revoked; it may be missing

The names are those of Kubernetes secrets and of cert-manager. The id is ``spiffe://TRUST_DOMAIN/ROLE/NAME``.
"""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"
REVOKED: Final = "ca.crl"
FILES: Final = (CERTIFICATE, KEY, AUTHORITIES, REVOKED)
MAX_BYTES: Final = 1024**2
_SCHEME: Final = "spiffe://"
RENEW_RATIO: Final = 1 / 3  # part of its life that a certificate has left when it is due
_LATE_RATIO: Final = 1 / 6  # part that one has left which nobody renewed when it was due
_RENEW: Final = "`fairway certs rotate` renews certificates"


class CertificateProblem(Exception):
    """Files that cannot serve as a certificate. The message names the file and the next step."""


@dataclass(frozen=True, slots=True)
class SpiffeId:
    """The identity in a certificate. ``name`` may contain slashes."""

    trust_domain: str
    role: str
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.trust_domain}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> SpiffeId | None:
        """Return the id in a URI, None for any other URI."""
        trust_domain, _, path = uri.removeprefix(_SCHEME).partition("/")
        role, _, name = path.partition("/")
        found = uri.startswith(_SCHEME) and trust_domain and role and name
        return cls(trust_domain, role, name) if found else None

    @property
    def server_name(self) -> str:
        """The DNS name in the certificates of this role: callers verify it, whatever the address is."""
        return f"{self.role}.{self.trust_domain}"


@dataclass(frozen=True, slots=True)
class Leaf:
    """The facts of a certificate that decide whether it is accepted. Times are Unix seconds."""

    id: SpiffeId | None
    serial: int
    begin_s: float
    expire_s: float

    def __str__(self) -> str:
        return f"the certificate of {self.id or 'no identity'} (serial {self.serial:x})"

    def problem(self, now_s: float) -> str:
        """Return why it is not valid at this time and what to do; empty while it is."""
        if now_s >= self.expire_s:
            return f"{self} expired {now_s - self.expire_s:.0f} s ago; {_RENEW}"
        if now_s < self.begin_s:
            return f"{self} is valid only in {self.begin_s - now_s:.0f} s: set clocks from one time source"
        return ""

    def is_due(self, now_s: float) -> bool:
        """Whether less than a third of its life is left."""
        return self._left_ratio(now_s) <= RENEW_RATIO

    def notice(self, now_s: float) -> str:
        """Return ``problem``, or that it was not renewed when it was due; empty while neither is so."""
        if found := self.problem(now_s):
            return found
        left_h = (self.expire_s - now_s) / 3600
        return f"{self} expires in {left_h:.1f} h; {_RENEW}" if self._left_ratio(now_s) <= _LATE_RATIO else ""

    def _left_ratio(self, now_s: float) -> float:
        return (self.expire_s - now_s) / (self.expire_s - self.begin_s)


@dataclass(frozen=True, slots=True, eq=False)
class TlsIdentity:
    """A certificate with its key, and whom it trusts. A renewed one is another object."""

    leaf: Leaf
    chain_pem: bytes
    key_pem: bytes
    roots_pem: bytes
    crl_pem: bytes = b""
    revoked: frozenset[int] = frozenset()  # serials

    @property
    def id(self) -> SpiffeId:
        assert self.leaf.id is not None
        return self.leaf.id

    def issuer_problem(self) -> str:
        """Return why no trusted authority vouches for the certificate; empty if one does."""
        chain = x509.load_pem_x509_certificates(self.chain_pem)
        for root in x509.load_pem_x509_certificates(self.roots_pem):
            try:
                chain[-1].verify_directly_issued_by(root)
                return ""
            except (ValueError, TypeError, InvalidSignature):
                continue
        return f"{self.leaf} is not signed by an authority in {AUTHORITIES}; {_RENEW}"


def leaf_of(certificate: x509.Certificate) -> Leaf:
    """Return the facts of a certificate. One with several URIs, or another one, has no id."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    return Leaf(
        SpiffeId.parse(uris[0]) if len(uris) == 1 else None,
        certificate.serial_number,
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )


@lru_cache(maxsize=4096)
def parsed_leaf(pem: bytes) -> Leaf:
    """Return the facts of a certificate whose signature was verified."""
    return leaf_of(x509.load_pem_x509_certificate(pem))


def read_folder(folder: Path) -> TlsIdentity:
    """Return the identity in a folder. Raises CertificateProblem."""
    files = {name: _read(folder / name, optional=name == REVOKED) for name in FILES}
    return checked_identity(files[CERTIFICATE], files[KEY], files[AUTHORITIES], files[REVOKED], str(folder))


def checked_identity(
    chain_pem: bytes, key_pem: bytes, roots_pem: bytes, crl_pem: bytes, place: str
) -> TlsIdentity:
    """Return the identity of these files; ``place`` names them in errors. Raises CertificateProblem.

    The key is that of the certificate, and a trusted authority signed each list of revoked certificates.
    """
    try:
        leaf, *_ = x509.load_pem_x509_certificates(chain_pem)
        roots = x509.load_pem_x509_certificates(roots_pem)
        key = serialization.load_pem_private_key(key_pem, None)
        lists = [x509.load_pem_x509_crl(each) for each in _crls(crl_pem)]
    except (ValueError, TypeError) as exc:
        raise CertificateProblem(f"{place} has a file that is not PEM of the expected kind: {exc}") from exc
    if key.public_key() != leaf.public_key():
        raise CertificateProblem(f"{place}: {KEY} is not the key of {CERTIFICATE}; write both again")
    facts = leaf_of(leaf)
    if facts.id is None:
        raise CertificateProblem(
            f"{place}: {CERTIFICATE} has no URI spiffe://TRUST_DOMAIN/ROLE/NAME; "
            "`fairway certs issue` makes one that has"
        )
    revoked = set[int]()
    for each in lists:
        if not any(_signed(each, root) for root in roots):
            raise CertificateProblem(f"{place}: {REVOKED} is not signed by an authority in {AUTHORITIES}")
        revoked.update(one.serial_number for one in each)
    return TlsIdentity(facts, chain_pem, key_pem, roots_pem, crl_pem, frozenset(revoked))


def ssl_context(identity: TlsIdentity, *, server: bool, verify_peer: bool) -> ssl.SSLContext:
    """Return a context with the identity's certificate.

    With ``verify_peer`` the peer needs a certificate of the identity's authorities that is not revoked; a
    client also compares the host name.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The module loads certificates from files only. This one is private and ends here.
    with tempfile.NamedTemporaryFile("wb") as file:
        file.write(identity.key_pem + b"\n" + identity.chain_pem)
        file.flush()
        context.load_cert_chain(file.name)
    if verify_peer:
        context.load_verify_locations(cadata=identity.roots_pem.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        if identity.crl_pem:
            with tempfile.NamedTemporaryFile("wb") as file:
                file.write(identity.crl_pem)
                file.flush()
                context.load_verify_locations(cafile=file.name)
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    return context


def _read(path: Path, *, optional: bool) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(MAX_BYTES + 1)
    except FileNotFoundError as exc:
        if optional:
            return b""
        raise CertificateProblem(f"{path} does not exist; `fairway certs issue` makes certificates") from exc
    except OSError as exc:
        raise CertificateProblem(f"cannot read {path}: {exc.strerror}; this user needs to read it") from exc
    if len(found) > MAX_BYTES:
        raise CertificateProblem(f"{path} has more than {MAX_BYTES} bytes")
    return found


def _crls(pem: bytes) -> list[bytes]:
    begin = b"-----BEGIN X509 CRL-----"
    return [begin + part for part in pem.split(begin)[1:]]


def _signed(crl: x509.CertificateRevocationList, root: x509.Certificate) -> bool:
    key = root.public_key()
    try:
        return isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey) and crl.is_signature_valid(key)
    except InvalidSignature:
        return False
