"""Credentials of every kind for one directory of keys and one provider, valid and spoiled ones."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Mapping
from typing import Any

from joserfc import jwt
from joserfc.jwk import RSAKey

from services.adapters.oidc import ProviderSettings, ProviderTokens
from services.core.records import KEYS, TENANTS, ApiKey, KeyRole, Meta, Tenant
from services.runtime import secrets
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Versioned
from services.runtime.identity import KeyDirectory
from tests.support.oidc_provider import AUDIENCE, OidcProvider

NOW_S = time.time()
TENANT = "acme"


class View:
    def __init__(self, records: Mapping[str, Any]) -> None:
        self.view = {key: Versioned(record, 1, 1) for key, record in records.items()}


def settings_of(provider: OidcProvider, **changes: Any) -> ProviderSettings:
    values = {
        "issuer": provider.issuer,
        "audience": AUDIENCE,
        "jwks": provider.jwks_url,
        "roles": {f"{role}s": role for role in KeyRole},
        **changes,
    }
    return ProviderSettings.model_validate(values)


def _key(name: str, number: int, role: KeyRole, tenant: str = TENANT, **fields: Any) -> tuple[str, ApiKey]:
    text, hashed = secrets.new_key(name, bytes([number]) * 32)
    return text, ApiKey(Meta(name), role, hashed, tenant if role.of_tenant else "", **fields)


def _part(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def unsigned(claims: Mapping[str, Any], header: Mapping[str, Any]) -> str:
    return f"{_part(json.dumps(header).encode())}.{_part(json.dumps(claims).encode())}."


def hs256(claims: Mapping[str, Any], header: Mapping[str, Any], secret: bytes) -> str:
    """Return a token with a symmetric signature; the library refuses a public key as its secret."""
    signed = unsigned(claims, {**header, "alg": "HS256"})[:-1]
    return f"{signed}.{_part(hmac.digest(secret, signed.encode(), 'sha256'))}"


def spoiled_tokens(provider: OidcProvider) -> dict[str, str]:
    """Return tokens that open nothing, by what is wrong with them."""
    token, key = provider.token, provider.keys[0]
    now_s = int(time.time())
    claims = {"iss": provider.issuer, "aud": AUDIENCE, "sub": "ann", "iat": now_s, "exp": now_s + 600}
    claims["groups"] = ["admins"]
    whole = token()
    head, body, signature = whole.split(".")
    stranger = RSAKey.generate_key(2048, {"kid": str(key.kid)})
    renamed = RSAKey.generate_key(2048, {"kid": "another"})
    return {
        "expired": token(exp=now_s - 3600),
        "not yet valid": token(nbf=now_s + 3600),
        "from the future": token(iat=now_s + 3600),
        "without end": token(exp=None),
        "end that is no number": token(exp="never"),
        "without owner": token(sub=None),
        "of another audience": token(aud="another"),
        "without audience": token(aud=None),
        "of another issuer": token(iss="https://id.example.com"),
        "alg none": unsigned(claims, {"alg": "none"}),
        "alg none with the key's name": unsigned(claims, {"alg": "none", "kid": key.kid}),
        "unsigned": f"{head}.{body}.",
        "signature of another": f"{head}.{body}.{token(sub='bob').split('.')[2]}",
        "changed claims": f"{head}.{unsigned(claims, {}).split('.')[1]}.{signature}",
        "signed with the public key": hs256(claims, {"kid": key.kid}, key.as_pem(private=False)),
        "signed with a secret": hs256(claims, {"kid": key.kid}, b"k" * 40),
        "signed by a stranger": token(key=stranger),
        "key in the header": token(key=stranger, header={"jwk": stranger.as_dict(private=False)}),
        "address of keys in the header": token(key=stranger, header={"jku": f"{provider.issuer}/other"}),
        "old token of an unknown key": token(key=renamed, iat=now_s - 300),
        "algorithm that is not accepted": jwt.encode(
            {"alg": "RS512", "kid": key.kid}, claims, key, algorithms=["RS512"]
        ),
        "critical header": token(header={"crit": ["cty"], "cty": "JWT"}),
        "of another type": token(header={"typ": "logout+jwt"}),
        "header that is a list": "WyJhbGciXQ." + f"{body}.{signature}",
        "deeply nested": base64.urlsafe_b64encode(b"[" * 3000).decode().rstrip("=") + f".{body}.{signature}",
        "oversized": whole + "A" * 9000,
        "two dots only": "..",
    }


class Credentials:
    """``good``: the role that each opens as; ``bad``: credentials that open nothing, by what is wrong."""

    def __init__(self, provider: OidcProvider) -> None:
        self.provider = provider
        self.good: dict[str, tuple[str, KeyRole]] = {}
        records: dict[str, ApiKey] = {}
        for number, role in enumerate(KeyRole, 1):
            text, records[KEYS + str(role)] = _key(str(role), number, role)
            self.good[f"key of {role}"] = text, role
            token = provider.token(groups=["others", f"{role}s"], tenant=TENANT, sub=str(role))
            self.good[f"token of {role}"] = token, role
        expired, records[KEYS + "old"] = _key("old", 50, KeyRole.ADMIN, expire_unix_s=NOW_S - 1)
        gone, _ = _key("gone", 51, KeyRole.ADMIN)
        off, records[KEYS + "off"] = _key("off", 52, KeyRole.TENANT, "off")
        admin = self.good["key of admin"][0]
        self.bad: dict[str, str] = {
            "expired key": expired,
            "deleted key": gone,
            "key of a disabled tenant": off,
            "token of a disabled tenant": provider.token(groups=["tenants"], tenant="off"),
            "token of an unknown tenant": provider.token(groups=["tenants"], tenant="nobody"),
            "key with another secret": admin[:-1] + ("a" if admin[-1] != "a" else "b"),
            **{f"token {name}": text for name, text in spoiled_tokens(provider).items()},
        }
        self.without_role = {
            "token without a role": provider.token(groups=["others"]),
            "token without a tenant": provider.token(groups=["tenants"]),
        }
        clock = SystemClock()
        self.tokens = ProviderTokens(settings_of(provider), clock)
        tenants = {TENANTS + name: Tenant(Meta(name), disabled=name == "off") for name in (TENANT, "off")}
        self.directory = KeyDirectory(View(records), View(tenants), clock, verify_token=self.tokens.verify)
