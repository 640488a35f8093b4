"""Signatures of versions in OpenSSF's model-signing form, and who may sign the versions of a model.

A bundle signs a folder with one file, ``manifest.json``: the version's manifest, whose sha256 names the
version. So a bundle is verified by the version's digest alone. model_signing takes 0.4 s to import, and is
imported at the first use.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.mirror import Mirror, Pair
from fairway.v1 import registry_pb2

if TYPE_CHECKING:
    from model_signing import hashing, manifest

MANIFEST_NAME: Final = "manifest.json"
MAX_BUNDLE_BYTES: Final = 32 * 1024
MAX_BUNDLES: Final = 8  # most signatures of one version
_CURVES: Final = (ec.SECP256R1, ec.SECP384R1)


class BadSignature(ValueError):
    """A bundle or a key that cannot sign or verify anything, with the reason."""


@dataclass(frozen=True, slots=True)
class Signer:
    """Who may sign: the holder of a key, or an identity that a sigstore certificate names."""

    public_key: str = ""  # PEM, EC P-256 or P-384
    identity: str = ""  # subject of the certificate, as an address or a URI
    issuer: str = ""  # OpenID Connect issuer that vouched for the identity
    expire_unix_s: float = 0.0  # time after which loads refuse its signatures; 0: none

    @property
    def name(self) -> str:
        return f"{self.identity} of {self.issuer}" if self.identity else f"key {key_id(self.public_key)[:12]}"


@dataclass(frozen=True, slots=True)
class SignerPolicy:
    """Who may sign the versions of a model. A signature of no signer is refused, required or not."""

    model: str
    signers: tuple[Signer, ...] = ()
    required: bool = False  # whether a version without a signature is refused
    trust_config: str = ""  # JSON of sigstore's client trust configuration, which has its roots of trust


def _timestamp(unix_s: float) -> Timestamp:
    found = Timestamp()
    found.FromMicroseconds(round(unix_s * 1e6))
    return found


_EXPIRY: Final = Pair("expire_time", _timestamp, lambda found: found.ToMicroseconds() / 1e6, unset=True)
_SIGNER: Final = Mirror(Signer, registry_pb2.Signer, {"expire_unix_s": _EXPIRY})
_POLICY: Final = Mirror(SignerPolicy, registry_pb2.SignerPolicy, {"signers": _SIGNER.each("signers")})
policy_from_proto: Final = _POLICY.from_proto
policy_to_proto: Final = _POLICY.to_proto


class Reason(StrEnum):
    """Why a version is not trusted."""

    MISSING = "SIGNATURE_MISSING"
    NOT_ALLOWED = "SIGNER_NOT_ALLOWED"
    INVALID = "SIGNATURE_INVALID"


@dataclass(frozen=True, slots=True)
class Distrust:
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class SignerClaim:
    """What an unverified bundle states of its signer: the id of a key, or a certificate."""

    key_id: str = ""
    certificate: bytes = b""

    @property
    def name(self) -> str:
        return f"key {self.key_id[:12]}" if self.key_id else "a sigstore identity"


def key_id(public_key: str) -> str:
    """Return the hex digits by which bundles name a key. Raises BadSignature for one that cannot verify."""
    try:
        key = serialization.load_pem_public_key(public_key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadSignature("the signer's key is no public key in PEM form") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
        raise BadSignature("the signer's key is not of the curve P-256 or P-384")
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.PEM, form)).hexdigest()


def check_policy(policy: SignerPolicy) -> None:
    """Return if the policy can be applied. Raises BadSignature that says what to change."""
    if policy.required and not policy.signers:
        raise BadSignature("signatures are required and no signer is named: every version would be refused")
    for signer in policy.signers:
        if bool(signer.public_key) == bool(signer.identity and signer.issuer):
            raise BadSignature("a signer is either a public key or an identity with its issuer")
        if signer.public_key:
            key_id(signer.public_key)
        elif not policy.trust_config:
            raise BadSignature(f"{signer.name} needs the trust configuration of its sigstore")
    if policy.trust_config:
        from sigstore.models import ClientTrustConfig

        try:
            ClientTrustConfig.from_json(policy.trust_config)
        except Exception as error:  # the parser's exceptions have no common base
            raise BadSignature(f"the trust configuration is malformed: {error}"[:400]) from error


def sign(manifest_json: bytes, private_key: Path) -> str:
    """Return the bundle of a manifest, signed with a key in PEM form. Raises BadSignature."""
    public_key_of(private_key)
    from model_signing import signing

    with TemporaryDirectory(prefix="fw-sign-") as name:
        folder, bundle = Path(name, "version"), Path(name, "bundle.json")
        folder.mkdir()
        (folder / MANIFEST_NAME).write_bytes(manifest_json)
        signing.Config().use_elliptic_key_signer(private_key=private_key).sign(folder, bundle)
        return bundle.read_text("utf-8")


def public_key_of(private_key: Path) -> str:
    """Return the public key of a key in PEM form. Raises BadSignature for one that cannot sign."""
    try:
        key = serialization.load_pem_private_key(private_key.read_bytes(), None)
    except TypeError as error:
        raise BadSignature(
            f"{private_key} is encrypted: decrypt it, or sign with model_signing itself"
        ) from error
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise BadSignature(f"{private_key} is no private key in PEM form: {error}") from error
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public_key = key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()
    key_id(public_key)
    return public_key


def claim_of(bundle: str, digest: str) -> SignerClaim:
    """Return the signer that a bundle of this version names. Nothing is verified.

    Raises BadSignature for a malformed bundle or one of another version.
    """
    if len(bundle.encode()) > MAX_BUNDLE_BYTES:
        raise BadSignature(f"a bundle has at most {MAX_BUNDLE_BYTES} bytes")
    try:
        read = msgspec.json.decode(bundle, type=_Bundle)
        statement = msgspec.json.decode(base64.b64decode(read.dsseEnvelope.payload), type=_Statement)
        material = read.verificationMaterial
        certificate = base64.b64decode(material.certificate.rawBytes) if material.certificate else b""
    except (ValueError, RecursionError) as error:
        raise BadSignature(f"the bundle is malformed: {error}") from error
    named = [(one.name, one.algorithm, one.digest) for one in statement.predicate.resources]
    if named != [(MANIFEST_NAME, "sha256", digest.removeprefix("sha256:"))]:
        raise BadSignature(f"the bundle does not sign {MANIFEST_NAME} of {digest}: it is of another version")
    key = material.publicKey.hint if material.publicKey else ""
    if bool(key) == bool(certificate):
        raise BadSignature("the bundle names no signer: a key's id or a certificate")
    return SignerClaim(key, certificate)


def distrust(
    bundles: Sequence[str], digest: str, policy: SignerPolicy | None, *, now_unix_s: float
) -> Distrust | None:
    """Return why a version with these bundles may not be loaded; None: it may. Blocks for I/O.

    One valid signature of one signer that has not expired is enough.
    """
    if policy is None or not (bundles or policy.required):
        return None
    if not bundles:
        allowed = ", ".join(signer.name for signer in policy.signers)
        return Distrust(Reason.MISSING, f"{digest} has no signature: {allowed} may sign it")
    found: list[Distrust] = []
    for bundle in bundles:
        try:
            claim = claim_of(bundle, digest)
            signer = _signer_of(claim, policy.signers)
            if signer is None:
                refused = (
                    f"{digest} is signed by {claim.name}, which is none of the signers of {policy.model}"
                )
                found.append(Distrust(Reason.NOT_ALLOWED, refused))
            elif 0 < signer.expire_unix_s <= now_unix_s:
                day = datetime.fromtimestamp(signer.expire_unix_s, UTC).date()
                found.append(
                    Distrust(Reason.NOT_ALLOWED, f"{signer.name}, who signed {digest}, expired {day}")
                )
            else:
                _verify(bundle, digest, signer, policy.trust_config)
                return None
        except BadSignature as error:
            found.append(Distrust(Reason.INVALID, f"a signature of {digest} is invalid: {error}"))
    return min(found, key=lambda one: one.reason is not Reason.INVALID)


def _signer_of(claim: SignerClaim, signers: Iterable[Signer]) -> Signer | None:
    """Return the signer that the bundle names, the one that expires last; None: it names none of them."""
    if claim.certificate:
        matching = [one for one in signers if one.identity and _is_of(claim.certificate, one)]
    else:
        matching = [one for one in signers if one.public_key and key_id(one.public_key) == claim.key_id]
    return max(matching, key=lambda one: one.expire_unix_s or float("inf"), default=None)


def _is_of(certificate: bytes, signer: Signer) -> bool:
    from cryptography import x509
    from sigstore.errors import VerificationError
    from sigstore.verify import policy

    try:
        found = x509.load_der_x509_certificate(certificate)
        policy.Identity(identity=signer.identity, issuer=signer.issuer).verify(found)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise BadSignature("its certificate is malformed") from error
    except VerificationError:
        return False
    return True


def _verify(bundle: str, digest: str, signer: Signer, trust_config: str) -> None:
    """Return if the signer signed exactly this version. Raises BadSignature."""
    from model_signing import verifying

    with TemporaryDirectory(prefix="fw-verify-") as name:
        signature, trusted = Path(name, "bundle.json"), Path(name, "trusted")
        signature.write_text(bundle, "utf-8")
        trusted.write_text(signer.public_key or trust_config, "utf-8")
        config = verifying.Config().set_hashing_config(_hashing_of(digest))
        try:
            if signer.public_key:
                config.use_elliptic_key_verifier(public_key=trusted)
            else:
                config.use_sigstore_verifier(
                    identity=signer.identity, oidc_issuer=signer.issuer, trust_config=trusted
                )
            config.verify(Path(name), signature)
        except Exception as error:  # whatever its parsers raise: only a return is a verified signature
            why = f"{type(error).__name__} {error}"
            raise BadSignature(f"not signed by {signer.name}: {why}"[:400]) from error


def _hashing_of(digest: str) -> hashing.Config:
    """Return a hashing of model_signing whose result is a folder with the manifest of this version."""
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest

    class KnownDigest(hashing.Config):
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> manifest.Manifest:
            form = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
            value = Digest("sha256", bytes.fromhex(digest.removeprefix("sha256:")))
            kind = manifest.SerializationType.from_args(form)
            return manifest.Manifest("version", [kind.new_item(MANIFEST_NAME, value)], kind)

    return KnownDigest()  # type: ignore[no-untyped-call]


class _PublicKey(msgspec.Struct):
    hint: str = ""


class _Certificate(msgspec.Struct):
    rawBytes: str


class _Material(msgspec.Struct):
    publicKey: _PublicKey | None = None
    certificate: _Certificate | None = None


class _Envelope(msgspec.Struct):
    payload: str


class _Bundle(msgspec.Struct):
    verificationMaterial: _Material
    dsseEnvelope: _Envelope


class _Resource(msgspec.Struct):
    name: str
    algorithm: str
    digest: str


class _Predicate(msgspec.Struct):
    resources: list[_Resource]


class _Statement(msgspec.Struct):
    predicate: _Predicate
