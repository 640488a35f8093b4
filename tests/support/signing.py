"""Keys that sign versions in tests, and policies that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fairway.formats.signatures import Signer, SignerPolicy, public_key_of

MANIFEST: Final = b'{"files":[],"schema":2}'


def key_file(folder: Path, name: str, key: Any = None) -> Path:
    """Write a private key, of P-256 unless given, and its public key beside it."""
    found = key or ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    path = folder / f"{name}.pem"
    path.write_bytes(
        found.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    path.with_suffix(".pub").write_bytes(found.public_key().public_bytes(serialization.Encoding.PEM, form))
    return path


def policy_of(model: str, *keys: Path, required: bool = True, expire_unix_s: float = 0.0) -> SignerPolicy:
    """Return the policy that lets the holders of these keys sign."""
    signers = tuple(Signer(public_key_of(key), expire_unix_s=expire_unix_s) for key in keys)
    return SignerPolicy(model, signers, required)
