"""What a signature is accepted for, and why each other one is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from fairway.formats.signatures import (
    BadSignature,
    Reason,
    Signer,
    SignerPolicy,
    check_policy,
    claim_of,
    distrust,
    policy_from_proto,
    policy_to_proto,
    sign,
)
from services.core.manifest import sha256_of
from tests.support.signing import MANIFEST, key_file, policy_of

DIGEST = sha256_of(MANIFEST)
OTHER = sha256_of(b"another version")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path, "release")


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1()], ids=["p256", "p384"])
def test_the_signature_of_an_allowed_key_is_trusted(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    key = key_file(tmp_path, "release", ec.generate_private_key(curve))
    bundle = sign(MANIFEST, key)
    assert distrust([bundle], DIGEST, policy_of("m", key), now_unix_s=0.0) is None


def test_a_model_without_a_policy_takes_any_version(key: Path) -> None:
    assert distrust([], DIGEST, None, now_unix_s=0.0) is None
    assert distrust([], DIGEST, policy_of("m", key, required=False), now_unix_s=0.0) is None


def test_each_refusal_has_its_reason_and_names_the_signer(tmp_path: Path, key: Path) -> None:
    foreign, policy = key_file(tmp_path, "foreign"), policy_of("m", key)
    good, strange = sign(MANIFEST, key), sign(MANIFEST, foreign)
    cases: list[tuple[list[str], str, SignerPolicy, float, Reason]] = [
        ([], DIGEST, policy, 0.0, Reason.MISSING),
        ([strange], DIGEST, policy, 0.0, Reason.NOT_ALLOWED),
        ([strange], DIGEST, replace(policy, required=False), 0.0, Reason.NOT_ALLOWED),
        ([good], DIGEST, policy_of("m", foreign), 0.0, Reason.NOT_ALLOWED),
        ([good], DIGEST, policy_of("m", key, expire_unix_s=100.0), 100.0, Reason.NOT_ALLOWED),
        ([good], OTHER, policy, 0.0, Reason.INVALID),
        ([strange, "{}"], DIGEST, policy, 0.0, Reason.INVALID),
    ]
    for bundles, digest, rules, now_unix_s, reason in cases:
        found = distrust(bundles, digest, rules, now_unix_s=now_unix_s)
        assert found is not None
        assert found.reason is reason
        assert digest in found.message
    expiring = policy_of("m", key, expire_unix_s=100.0)
    assert distrust([good], DIGEST, expiring, now_unix_s=99.0) is None
    assert distrust([strange, "{}", good], DIGEST, policy, now_unix_s=0.0) is None


def test_no_flipped_byte_of_payload_signature_or_signer_is_accepted(key: Path) -> None:
    policy = policy_of("m", key)
    bundle = json.loads(sign(MANIFEST, key))
    envelope = bundle["dsseEnvelope"]
    places = ((envelope, "payload"), (envelope["signatures"][0], "sig"))
    flips = 0
    for holder, name in places:
        text, body = holder[name], base64.b64decode(holder[name])
        for place in range(0, len(body), 7):
            spoiled = bytes([*body[:place], body[place] ^ 1, *body[place + 1 :]])
            holder[name] = base64.b64encode(spoiled).decode()
            found = distrust([json.dumps(bundle)], DIGEST, policy, now_unix_s=0.0)
            assert found is not None
            assert found.reason is Reason.INVALID
            flips += 1
        holder[name] = text
    assert flips > 100
    assert distrust([json.dumps(bundle)], DIGEST, policy, now_unix_s=0.0) is None


def test_a_signature_of_another_key_under_an_allowed_name_is_invalid(tmp_path: Path, key: Path) -> None:
    forged = json.loads(sign(MANIFEST, key_file(tmp_path, "foreign")))
    honest = json.loads(sign(MANIFEST, key))
    forged["verificationMaterial"] = honest["verificationMaterial"]
    found = distrust([json.dumps(forged)], DIGEST, policy_of("m", key), now_unix_s=0.0)
    assert found is not None
    assert found.reason is Reason.INVALID


def _without_hint(bundle: Any) -> None:
    del bundle["verificationMaterial"]["publicKey"]["hint"]


def _with_both(bundle: Any) -> None:
    bundle["verificationMaterial"]["certificate"] = {"rawBytes": "AAAA"}


def _with_more_files(bundle: Any) -> None:
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    statement["predicate"]["resources"] *= 2
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()


def _as_message(bundle: Any) -> None:
    bundle["messageSignature"] = bundle.pop("dsseEnvelope")


def _deep(bundle: Any) -> None:
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(b"[" * 12_000).decode()


@pytest.mark.parametrize("spoil", [_without_hint, _with_both, _with_more_files, _as_message, _deep])
def test_a_bundle_of_another_form_is_malformed(key: Path, spoil: Callable[[Any], None]) -> None:
    bundle = json.loads(sign(MANIFEST, key))
    spoil(bundle)
    with pytest.raises(BadSignature):
        claim_of(json.dumps(bundle), DIGEST)


def test_a_giant_bundle_is_refused_before_it_is_parsed(key: Path) -> None:
    with pytest.raises(BadSignature, match="at most 32768 bytes"):
        claim_of(sign(MANIFEST, key) + " " * 32_768, DIGEST)


@pytest.mark.parametrize(
    "private_key",
    [
        ec.generate_private_key(ec.SECP521R1()),
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 2048),
    ],
    ids=["p521", "ed25519", "rsa"],
)
def test_keys_of_other_kinds_neither_sign_nor_verify(tmp_path: Path, private_key: Any) -> None:
    key = key_file(tmp_path, "odd", private_key)
    with pytest.raises(BadSignature, match="P-256 or P-384"):
        sign(MANIFEST, key)
    with pytest.raises(BadSignature, match="P-256 or P-384"):
        check_policy(SignerPolicy("m", (Signer(key.with_suffix(".pub").read_text()),)))


def test_an_encrypted_key_and_what_is_no_key_are_refused_by_name(tmp_path: Path) -> None:
    encryption = serialization.BestAvailableEncryption(b"secret")
    body = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )
    (tmp_path / "encrypted.pem").write_bytes(body)
    with pytest.raises(BadSignature, match=r"encrypted\.pem is encrypted"):
        sign(MANIFEST, tmp_path / "encrypted.pem")
    (tmp_path / "text.pem").write_text("no key")
    for name in ("text.pem", "absent.pem"):
        with pytest.raises(BadSignature, match=name):
            sign(MANIFEST, tmp_path / name)


def test_a_policy_that_cannot_be_applied_is_refused(key: Path) -> None:
    who = Signer(identity="ci@acme.example", issuer="https://id.acme.example")
    (known,) = policy_of("m", key).signers
    refused = {
        "no signer is named": SignerPolicy("m", (), required=True),
        "either a public key or an identity": SignerPolicy("m", (Signer(),)),
        "a public key or an identity with": SignerPolicy("m", (replace(who, public_key=known.public_key),)),
        "needs the trust configuration": SignerPolicy("m", (who,)),
        "configuration is malformed": SignerPolicy("m", (who,), trust_config="{}"),
        "no public key in PEM": SignerPolicy("m", (Signer("key"),)),
    }
    for message, policy in refused.items():
        with pytest.raises(BadSignature, match=message):
            check_policy(policy)


def test_a_policy_survives_the_wire(key: Path) -> None:
    who = Signer(identity="ci@acme.example", issuer="https://id.acme.example", expire_unix_s=1.5)
    policy = replace(policy_of("m", key), signers=(*policy_of("m", key).signers, who), trust_config="{}")
    assert policy_from_proto(policy_to_proto(policy)) == policy
