"""Tokens of an OpenID provider: the file that describes the provider, its keys, and the verification.

A token's signature is verified once. Verified callers are kept by the hash of their token until it ends;
nothing of a refused one is kept. The keys are read outside of any call: at the start, regularly, and soon
after a token that a newer key seems to have signed, at most once per ``REFETCH_S``. Headers that name other
keys (jku, jwk, x5u, x5c) are ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import structlog
import yaml
from joserfc import jws
from joserfc.errors import ClaimError, ExpiredTokenError, JoseError
from joserfc.jwk import JWKRegistry, Key
from joserfc.jwt import JWTClaimsRegistry
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fairway.http_json import MAX_BYTES, FetchFailed, checked_url, request_json
from services.adapters.threads import in_thread
from services.core.errors import PermissionDenied, Unauthenticated, Unavailable
from services.core.generation import TOKEN_KEY, Principal
from services.core.records import KeyRole
from services.ports.clock import Clock
from services.runtime.config import ConfigError
from services.runtime.identity import MAX_TOKEN_CHARS

log = structlog.get_logger()

REFETCH_S: Final = 10.0
MAX_VERIFIED: Final = 10_000
_LOOK_S: Final = 1.0
_MAX_KEYS: Final = 64
_MAX_HEADER_BYTES: Final = 4096
_MAX_NAME_CHARS: Final = 122  # longest subject in a name, which must fit those of keys
_LONGEST_S: Final = 10 * 365 * 86_400.0
_TYPES: Final = ("", "jwt", "at+jwt", "application/at+jwt")
_INVALID: Final = "the API key or token is not valid"

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519"
]


class ProviderSettings(BaseModel):
    """The content of FAIRWAY_OIDC_FILE."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The `iss` of its tokens.
    issuer: str
    # The `aud` that a token must have, one of several.
    audience: tuple[str, ...] = Field(min_length=1, max_length=16)
    # https URL or file of its keys (a JWK Set).
    jwks: str
    algorithms: tuple[Algorithm, ...] = Field(default=("RS256", "ES256"), min_length=1)
    # Roles by a value of the role claim. The first in the file that a token has is its role.
    roles: dict[str, KeyRole] = Field(min_length=1, max_length=1000)
    # Name of the claim with those values, or its path with dots.
    role_claim: str = "groups"
    # Name or path of the claim with the tenant, for roles that are bound to one.
    tenant_claim: str = "tenant"
    # Name of the console as a public client there; empty: people sign in to it by key alone.
    console_client_id: str = Field(default="", max_length=256)
    # Scope that it requests; with offline_access its sign-ins outlive a token.
    console_scope: str = Field(default="openid", max_length=256)
    # Most seconds by which the provider's clock may differ.
    clock_skew_s: int = Field(default=30, ge=0, le=300)
    # Seconds between readings of the keys.
    refresh_s: float = Field(default=300.0, ge=REFETCH_S, le=86_400)
    # Seconds that the last keys are used while they cannot be read again.
    keys_max_age_s: float = Field(default=86_400.0, ge=REFETCH_S, le=2_592_000)

    @field_validator("audience", "algorithms", mode="before")
    @classmethod
    def _several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("issuer")
    @classmethod
    def _valid_issuer(cls, value: str) -> str:
        return checked_url(value)

    @field_validator("jwks")
    @classmethod
    def _valid_source(cls, value: str) -> str:
        return checked_url(value) if "://" in value else value


def read_provider(path: Path) -> ProviderSettings:
    """Return the provider that a YAML or JSON file describes. Raises ConfigError naming what is wrong."""
    try:
        found = ProviderSettings.model_validate(yaml.safe_load(path.read_text("utf-8")))
        if "://" not in found.jwks:
            found = found.model_copy(update={"jwks": str(path.parent / found.jwks)})
            _keys_of(_read(found.jwks))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, FetchFailed) as error:
        raise ConfigError(f"cannot use {path} of FAIRWAY_OIDC_FILE: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ConfigError(f"{path} of FAIRWAY_OIDC_FILE: {where}: {first['msg']}") from error
    return found


class ProviderTokens:
    """Verifies the tokens of one provider. Event loop only; ``run`` reads the keys."""

    def __init__(self, settings: ProviderSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._registry = jws.JWSRegistry(algorithms=settings.algorithms, strict_check_header=False)
        self._registry.max_header_length = _MAX_HEADER_BYTES
        self._keys: Mapping[str, Key] = {}
        self._verified: OrderedDict[bytes, Principal] = OrderedDict()
        self._began_s = 0.0  # start of the last reading
        self._read_s: float | None = None  # start of the last one that succeeded
        self._read_unix_s = 0.0
        self._error = "they were not read yet"
        self._wanted = True

    def __len__(self) -> int:
        """Return how many verified tokens are kept."""
        return len(self._verified)

    async def run(self) -> None:
        """Read the keys until cancelled."""
        while True:
            self._began_s, unix_s = self._clock.monotonic_s(), self._clock.unix_s()
            self._wanted = False
            try:
                keys = _keys_of(await in_thread(_read, self._settings.jwks))
            except FetchFailed as error:
                self._error, self._wanted = str(error), True
                log.warning("issuer_keys.not_read", error=self._error)
            else:
                self._read_s, self._read_unix_s, self._error = self._began_s, unix_s, ""
                if {name: key.as_dict() for name, key in keys.items()} != {
                    name: key.as_dict() for name, key in self._keys.items()
                }:
                    self._keys = keys
                    self._verified.clear()  # a key that its issuer withdrew opens nothing
                    log.info("issuer_keys.changed", keys=sorted(keys))
            while self._clock.monotonic_s() - self._began_s < self._interval_s:
                await self._clock.sleep(_LOOK_S)

    @property
    def _interval_s(self) -> float:
        return REFETCH_S if self._wanted else self._settings.refresh_s

    def problem(self) -> str:
        """Return why tokens are refused, or will be if it lasts; empty without a problem."""
        if self._read_s is None:
            return f"tokens are refused: the issuer's keys were not read: {self._error}"
        age_s = self._clock.monotonic_s() - self._read_s
        refused = "tokens are refused: " if age_s > self._settings.keys_max_age_s else ""
        return f"{refused}the issuer's keys were read {age_s:.0f} s ago: {self._error}" if self._error else ""

    def verify(self, text: str) -> Principal:
        """Return the caller of a token.

        Raises Unauthenticated; PermissionDenied for an owner without a role; Unavailable while the keys are
        too old, or when the token may be of a key that is read next.
        """
        if len(text) > MAX_TOKEN_CHARS or not text.isascii():
            raise Unauthenticated(_INVALID)
        self._require_keys()
        name, now_s = hashlib.sha256(text.encode()).digest(), self._clock.unix_s()
        found = self._verified.get(name)
        if found is None:
            found = self._checked(text, now_s)
            self._verified[name] = found
            if len(self._verified) > MAX_VERIFIED:
                self._verified.popitem(last=False)
        elif found.expire_unix_s <= now_s:
            del self._verified[name]
            raise Unauthenticated("the token has expired: log in again")
        else:
            self._verified.move_to_end(name)
        return found

    def _require_keys(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._read_s is None or now_s - self._read_s > self._settings.keys_max_age_s:
            raise Unavailable(
                "tokens cannot be verified: the keys of their issuer could not be read; API keys work",
                retry_after_s=self._until_read_s(),
            )

    def _until_read_s(self) -> float:
        return max(0.0, self._began_s + REFETCH_S - self._clock.monotonic_s()) + _LOOK_S

    def _checked(self, text: str, now_s: float) -> Principal:
        """Return the caller of a token that was not seen before. Raises as ``verify``."""
        try:
            token = jws.extract_compact(text.encode(), None, self._registry)
            header = token.protected
            if "crit" in header or "b64" in header:
                raise Unauthenticated(_INVALID)
            self._registry.check_header(header)
            if str(header.get("typ", "")).lower() not in _TYPES:
                raise Unauthenticated("the token is of a type that is no access token")
            if header["alg"] not in self._settings.algorithms:
                raise Unauthenticated("the token is signed by an algorithm that is not accepted here")
            key = self._key(header.get("kid"))
            if key is None:
                raise self._unknown_key(_claims_of(token))
            if not jws.validate_compact(token, key, self._settings.algorithms, self._registry):
                raise Unauthenticated(_INVALID)
            return self._caller(_claims_of(token), now_s)
        except (JoseError, ValueError, TypeError, AttributeError, RecursionError):
            raise Unauthenticated(_INVALID) from None

    def _key(self, kid: str | None) -> Key | None:
        if kid is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(kid)

    def _unknown_key(self, claims: Mapping[str, Any]) -> Unauthenticated | Unavailable:
        """Return the refusal of a token with another key, and cause a reading if that may be a new one."""
        issued, newest_s = claims.get("iat"), self._read_unix_s - self._settings.clock_skew_s
        ours = claims.get("iss") == self._settings.issuer
        if ours and isinstance(issued, int | float) and issued > newest_s:
            self._wanted = True
            return Unavailable(
                "the token is newer than the issuer's keys that are known here: they are read again",
                retry_after_s=self._until_read_s(),
            )
        return Unauthenticated("its issuer does not publish the key that signed the token: log in again")

    def _caller(self, claims: dict[str, Any], now_s: float) -> Principal:
        """Return the caller that verified claims describe. Raises Unauthenticated, PermissionDenied."""
        settings = self._settings
        expected = JWTClaimsRegistry(
            now=int(now_s),
            leeway=settings.clock_skew_s,
            iss={"essential": True, "value": settings.issuer},
            aud={"essential": True, "values": list(settings.audience)},
            exp={"essential": True},
            sub={"essential": True},
        )
        try:
            expected.validate(claims)
        except ExpiredTokenError:
            raise Unauthenticated("the token has expired: log in again") from None
        except ClaimError as error:
            raise Unauthenticated(f"the token is not for this installation: {error.description}") from None
        values = _claim(claims, settings.role_claim)
        held = values if isinstance(values, list) else [values]
        role = next((role for value, role in settings.roles.items() if value in held), None)
        if role is None:
            raise PermissionDenied(
                f"the token has no role here: its claim {settings.role_claim} has no configured value"
            )
        tenant = _claim(claims, settings.tenant_claim) if role.of_tenant else ""
        if not isinstance(tenant, str) or bool(tenant) is not role.of_tenant:
            raise PermissionDenied(f"the token has no tenant: its claim {settings.tenant_claim} is no name")
        end_s = min(claims["exp"], now_s + _LONGEST_S) + settings.clock_skew_s
        subject: str = claims["sub"]
        name = subject
        if len(name) > _MAX_NAME_CHARS or not (name.isascii() and name.isprintable()):
            name = hashlib.sha256(subject.encode()).hexdigest()
        return Principal(
            TOKEN_KEY + name,
            role,
            tenant,
            subject=subject[:_MAX_NAME_CHARS],
            issuer=settings.issuer,
            expire_unix_s=float(end_s),
        )


def _claims_of(token: jws.CompactSignature) -> dict[str, Any]:
    """Return the claims of a token, verified or not. Raises ValueError."""
    claims = json.loads(token.payload or b"")
    if not isinstance(claims, dict):
        raise ValueError("the claims are no object")
    return claims


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its name, else by its path; None without it."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _read(source: str) -> dict[str, Any]:
    """Return the JWK Set of a URL or a file. Raises FetchFailed."""
    if "://" in source:
        status, found = request_json(source)
        if status != 200:
            raise FetchFailed(f"{source}: status {status}")
        return found
    try:
        with Path(source).open("rb") as file:
            found = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise FetchFailed(f"{source}: {error}") from error
    return found if isinstance(found, dict) else {}


def _keys_of(found: Mapping[str, Any]) -> dict[str, Key]:
    """Return the public keys for signatures by their ids. Raises FetchFailed without any."""
    listed = found.get("keys")
    keys: dict[str, Key] = {}
    for each in listed[:_MAX_KEYS] if isinstance(listed, list) else ():
        if not isinstance(each, dict) or each.get("kty") == "oct" or each.get("use", "sig") != "sig":
            continue
        try:
            key = JWKRegistry.import_key(each)
            key.ensure_kid()
        except (JoseError, ValueError, TypeError, KeyError):
            continue  # RFC 7517, section 5: an unsuitable key does not spoil the others
        keys[str(key.kid)] = key
    if not keys:
        raise FetchFailed("there is no public key for signatures in the JWK Set")
    return keys
