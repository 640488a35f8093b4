"""The certificate authority of an installation: it issues, renews and revokes certificates of roles.

Its folder has one folder per certificate, with the files of ``fairway.tls``, and ``authority``:

    1.crt, 1.key   the first authority; a rotation adds the next number, which issues from then on
    revoked.json   the serials that are revoked, with the Unix times of their revocation
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.state import write_private
from fairway.tls import AUTHORITIES, CERTIFICATE, KEY, REVOKED, Leaf, SpiffeId, leaf_of

TRUST_DOMAIN: Final = "fairway.internal"
DAYS: Final = 90
AUTHORITY_DAYS: Final = 3650
ROLES: Final = (
    "gateway",
    "scheduler",
    "worker",
    "follower",
    "registry",
    "controlplane",
    "operator",  # people and their programs
    "monitor",  # Prometheus
    "autoscaler",  # KEDA
    "etcd",
    "redis",
)
_BEFORE: Final = timedelta(minutes=5)  # most that another machine's clock may be late


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate in the authority's folder."""

    folder: Path
    certificate: x509.Certificate
    leaf: Leaf
    revoked: bool

    @property
    def names(self) -> x509.SubjectAlternativeName:
        return self.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    @property
    def life(self) -> timedelta:
        return self.certificate.not_valid_after_utc - self.certificate.not_valid_before_utc

    def is_due(self, now: datetime) -> bool:
        """Whether less than a third of its life is left."""
        return self.leaf.is_due(now.timestamp())


@contextmanager
def opened_authority(root: Path) -> Iterator[Authority]:
    """Yield the authority in a folder, with the system's time. Only one process has it at a time."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (root / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Authority(root, lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True)
class _Signer:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)


class Authority:
    """The authority in a folder. ``now`` returns the time, with its zone. Files are private."""

    def __init__(self, root: Path, now: Callable[[], datetime]) -> None:
        self.root = root
        self._now = now

    @property
    def exists(self) -> bool:
        return bool(self._numbers())

    def create(self, trust_domain: str = TRUST_DOMAIN) -> None:
        """Return once there is an authority. Raises CliError for a trust domain that is not a DNS name."""
        if not self.exists:
            if not trust_domain.replace(".", "").replace("-", "").isalnum() or not trust_domain.isascii():
                raise CliError(
                    "BAD_TRUST_DOMAIN",
                    f"{trust_domain!r} is no trust domain",
                    next_step=f"choose a DNS name such as {TRUST_DOMAIN}",
                    exit_code=ExitCode.USAGE,
                )
            for folder in (self.root, self.root / "authority"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._add(1, trust_domain.lower())

    def issue(
        self,
        role: str,
        name: str,
        *,
        dns: Sequence[str] = (),
        addresses: Sequence[str] = (),
        days: float = DAYS,
        due_only: bool = False,
    ) -> Issued:
        """Write a certificate for a process, replacing the one of that name, and return it.

        It also names ``localhost``, 127.0.0.1, its own name and its role's. With ``due_only`` one stays that
        has these names, a third of its life left, and is not revoked; further names stay too.
        Raises CliError for a bad name.
        """
        signer = self._signers()[0]
        id_ = SpiffeId(_trust_domain(signer), role, name)
        if role not in ROLES or not _is_name(name) or name == "authority":
            raise CliError(
                "BAD_IDENTITY",
                f"{id_} cannot be issued",
                next_step=f"choose a role of {', '.join(ROLES)}, and a name of letters, digits, - and .",
                exit_code=ExitCode.USAGE,
            )
        try:
            hosts = dict.fromkeys(("localhost", id_.server_name, name, *dns))
            ips = dict.fromkeys(map(ipaddress.ip_address, ("127.0.0.1", *addresses)))
            names = [*map(x509.DNSName, hosts), *map(x509.IPAddress, ips)]
        except ValueError as exc:
            raise CliError(
                "BAD_NAME", f"a name or an address is wrong: {exc}", exit_code=ExitCode.USAGE
            ) from exc
        wanted: list[x509.GeneralName] = [x509.UniformResourceIdentifier(str(id_)), *names]
        folder = self.root / name
        if due_only and (folder / CERTIFICATE).exists():
            present = self._issued(folder)
            has_all = set(wanted) <= set(present.names)
            if has_all and not present.revoked and not present.is_due(self._now()):
                return present
            if wanted[0] in present.names:
                wanted = list(dict.fromkeys([*present.names, *wanted]))
        self._write_leaf(folder, x509.SubjectAlternativeName(wanted), timedelta(days=days))
        return self._issued(folder)

    def issued(self) -> tuple[Issued, ...]:
        """Return the certificates in the folder, by name."""
        return tuple(self._issued(path.parent) for path in sorted(self.root.glob(f"*/{CERTIFICATE}")))

    def renew(self, *, due_only: bool = False) -> tuple[Issued, ...]:
        """Replace the certificates, or those that are due, by ones with the same names and life. Return them.

        A revoked one is not renewed: `issue` makes another for the same name.
        """
        found = []
        for each in self.issued():
            if each.revoked or (due_only and not each.is_due(self._now())):
                continue
            self._write_leaf(each.folder, each.names, each.life - _BEFORE)
            found.append(self._issued(each.folder))
        return tuple(found)

    def revoke(self, serial: int) -> None:
        """Add a serial to the list that servers obey, in every folder."""
        revoked = {**self._revoked(), f"{serial:x}": self._now().timestamp()}
        write_private(self.root / "authority" / "revoked.json", json.dumps(revoked) + "\n")
        self._write_trust()

    def rotate(self, pause: Callable[[str], None]) -> None:
        """Replace the authority in three steps, each of which all processes take before the next.

        ``pause`` is called with what was done, and returns when running processes have read it. An
        interrupted rotation continues.
        """
        numbers = self._numbers()
        if len(numbers) == 1:
            self._add(numbers[-1] + 1, _trust_domain(self._signers()[0]))
            pause("both authorities are trusted")
        self.renew()
        pause("certificates are issued by the second authority")
        for number in self._numbers()[:-1]:
            for kind in ("crt", "key"):
                self._file(number, kind).unlink(missing_ok=True)
        self._write_trust()
        pause("the first authority is not trusted any more")

    def _add(self, number: int, trust_domain: str) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{trust_domain} authority {number}")])
        certificate = (
            self._builder(name, name, key.public_key(), timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.NameConstraints([x509.UniformResourceIdentifier(trust_domain)], None), critical=True
            )
            .sign(key, SHA256())
        )
        write_private(self._file(number, "key"), _key_pem(key).decode())
        write_private(self._file(number, "crt"), certificate.public_bytes(Encoding.PEM).decode())
        self._write_trust()

    def _write_leaf(self, folder: Path, sans: x509.SubjectAlternativeName, life: timedelta) -> None:
        signer, key = self._signers()[0], ec.generate_private_key(ec.SECP256R1())
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key())
        certificate = (
            self._builder(x509.Name([]), signer.certificate.subject, key.public_key(), life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(sans, critical=True)
            .add_extension(usages, critical=False)
            .add_extension(authority, critical=False)
            .sign(signer.key, SHA256())
        )
        folder.mkdir(mode=0o700, exist_ok=True)
        # A process that reads between these writes finds a key that does not fit, and reads again.
        write_private(folder / KEY, _key_pem(key).decode())
        write_private(folder / CERTIFICATE, certificate.public_bytes(Encoding.PEM).decode())
        self._write_trust(folder)

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: timedelta
    ) -> x509.CertificateBuilder:
        now = self._now()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BEFORE)
            .not_valid_after(now + life)
        )

    def _write_trust(self, *folders: Path) -> None:
        """Write the authorities and their lists of revoked certificates into the folders; default: all."""
        signers = self._signers()
        roots = b"".join(each.pem for each in signers).decode()
        lists = b"".join(self._crl(each) for each in signers).decode()
        for folder in folders or [each.parent for each in self.root.glob(f"*/{CERTIFICATE}")]:
            # The lists of more authorities than are trusted are refused, so that the authorities come first.
            write_private(folder / AUTHORITIES, roots)
            write_private(folder / REVOKED, lists)

    def _crl(self, signer: _Signer) -> bytes:
        now = self._now()
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(signer.certificate.subject)
            .last_update(now - _BEFORE)
            .next_update(signer.certificate.not_valid_after_utc)
        )
        for serial, revoked_s in self._revoked().items():
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder()
                .serial_number(int(serial, 16))
                .revocation_date(datetime.fromtimestamp(revoked_s, now.tzinfo))
                .build()
            )
        return builder.sign(signer.key, SHA256()).public_bytes(Encoding.PEM)

    def _issued(self, folder: Path) -> Issued:
        certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
        leaf = leaf_of(certificate)
        return Issued(folder, certificate, leaf, f"{leaf.serial:x}" in self._revoked())

    def _revoked(self) -> dict[str, float]:
        path = self.root / "authority" / "revoked.json"
        return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in (self.root / "authority").glob("*.crt"))

    def _file(self, number: int, kind: str) -> Path:
        return self.root / "authority" / f"{number}.{kind}"

    def _signers(self) -> list[_Signer]:
        """Return the trusted authorities; the first one issues. Raises CliError without any."""
        found = []
        for number in reversed(self._numbers()):
            certificate = x509.load_pem_x509_certificate(self._file(number, "crt").read_bytes())
            key = load_pem_private_key(self._file(number, "key").read_bytes(), None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            found.append(_Signer(certificate, key))
        if not found:
            raise CliError(
                "NO_AUTHORITY",
                f"there is no certificate authority in {self.root}",
                next_step="make one with `fairway certs init`, or start with `fairway up`",
                exit_code=ExitCode.NOT_RUNNING,
            )
        return found


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _trust_domain(signer: _Signer) -> str:
    found = signer.certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    assert found.permitted_subtrees is not None
    return str(found.permitted_subtrees[0].value)


def _is_name(name: str) -> bool:
    return 0 < len(name) <= 63 and name[0].isalnum() and name.replace("-", "").replace(".", "").isalnum()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
