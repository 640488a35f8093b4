"""Authentication and authorization of callers, by API keys and by tokens of an OpenID provider.

A key is found by its public name and verified by the sha256 of its secret: one hash and two look-ups in the
local copy of the fleet state. So there is no cache that an unauthenticated caller could fill. Until the
secret is verified, every rejection has the same text and cost, whether the key exists or not. After that the
caller owns the key, so the rejection can state its reason.

What does not begin as a key does is a token where the installation has a provider. The caller of a token has
no record: its role and tenant are claims, and its tenant's limits apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from difflib import get_close_matches
from itertools import islice
from typing import Final

from services.core.errors import (
    FairwayError,
    ModelNotFound,
    PermissionDenied,
    ResidencyUnavailable,
    Unauthenticated,
)
from services.core.generation import Principal
from services.core.records import KEYS, TENANTS, ApiKey, Meta, Tenant
from services.ports.clock import Clock
from services.runtime import secrets
from services.runtime.fleet_state.informer import RecordView

MAX_TOKEN_CHARS: Final = 8192
MAX_HEADER_CHARS: Final = MAX_TOKEN_CHARS + 64
_KEY_BEGINS: Final = "fw_"
_MAX_COMPARED: Final = 64  # names, about a millisecond
# The hash for names that do not exist; no secret has it.
_NO_HASH: Final = "0" * 64
_principal: ContextVar[Principal] = ContextVar("principal")


def act_for(who: Principal) -> None:
    """Make ``who`` the caller of what runs in this task from now on."""
    _principal.set(who)


def principal() -> Principal:
    """Return the caller of the RPC that runs in this task. Raises Unauthenticated outside of one."""
    found = _principal.get(None)
    if found is None:
        raise Unauthenticated("no API key was given")
    return found


def caller_tenant() -> str:
    """Return the tenant that bounds what this task may read and change; empty: nothing does."""
    found = _principal.get(None)
    return "" if found is None else found.tenant_id


class KeyDirectory:
    """API keys and tenants of the fleet."""

    def __init__(
        self,
        keys: RecordView[ApiKey],
        tenants: RecordView[Tenant],
        clock: Clock,
        *,
        verify_token: Callable[[str], Principal] | None = None,
        region: str | None = None,
    ) -> None:
        """``verify_token`` returns a token's caller or raises as ``authenticate``; None: all are refused.

        ``region``: where what is stored here lies; None: nothing of tenants is.
        """
        self._keys = keys
        self._tenants = tenants
        self._clock = clock
        self._verify_token = verify_token
        self._region = region

    def authenticate(self, credentials: str | None) -> Principal:
        """Return the owner of the key or token in an ``authorization`` header, or of the bare one.

        Raises Unauthenticated. Its text describes the expected credential and nothing sent or stored. For a
        token it raises PermissionDenied where no role is its owner's, and Unavailable while the provider's
        keys are being read.
        """
        text = _bare(credentials)
        if self._verify_token is None or text.startswith(_KEY_BEGINS):
            return self._owner(text)
        found = self._verify_token(text)
        if found.role.of_tenant:
            self.tenant(found.tenant_id)
        return found

    def _owner(self, text: str) -> Principal:
        """Return the owner of a key. Raises Unauthenticated."""
        try:
            name, secret = secrets.parse_key(text)
        except FairwayError:
            raise Unauthenticated("the API key is not valid") from None
        held = self._keys.view.get(KEYS + name)
        key = held.record if held is not None else None
        now_s = self._clock.unix_s()
        # Both comparisons are always made, so that the response time reveals nothing about the name.
        current = secrets.verify(secret, key.secret_hash if key is not None else _NO_HASH)
        has_previous = key is not None and bool(key.previous_secret_hash)
        previous = secrets.verify(secret, key.previous_secret_hash if key and has_previous else _NO_HASH)
        if key is None or not (current or (previous and has_previous)):
            raise Unauthenticated("the API key is not valid")
        shown = key.secret_hash if current else key.previous_secret_hash
        _require_in_time(key, shown, now_s)
        if key.role.of_tenant:
            self.tenant(key.tenant)
        return Principal(name, key.role, key.tenant, key.models, shown)

    def still_valid(self, principal: Principal) -> Tenant:
        """Return the tenant of a caller authenticated earlier, such as on a long stream.

        Raises Unauthenticated as ``require_current`` does, and when the tenant was disabled meanwhile.
        """
        self.require_current(principal)
        return self.tenant(principal.tenant_id)

    def tenant_and_key(self, principal: Principal) -> tuple[Tenant, ApiKey]:
        """Return the tenant and the key of a caller authenticated earlier. Raises as ``still_valid``.

        A token has no stored key: the one returned has no limits of its own.
        """
        tenant = self.still_valid(principal)
        if principal.of_token:
            return tenant, ApiKey(Meta(principal.key_id), principal.role, "", principal.tenant_id)
        return tenant, self._keys.view[KEYS + principal.key_id].record

    def require_current(self, principal: Principal) -> None:
        """Return if the key or token with which a stream was opened is still valid.

        Raises Unauthenticated when it was deleted or expired, or when the grace period of a rotated secret
        ended.
        """
        if principal.of_token:
            if 0 < principal.expire_unix_s <= self._clock.unix_s():
                raise Unauthenticated("the token has expired: log in again")
            return
        held = self._keys.view.get(KEYS + principal.key_id)
        key = held.record if held is not None else None
        # What outlives its request, such as a batch, has the tenant of the key and not its exact role.
        if key is None or (key.role.of_tenant, key.tenant) != (principal.role.of_tenant, principal.tenant_id):
            raise Unauthenticated("the API key is not valid any more")
        _require_in_time(key, principal.secret_hash or key.secret_hash, self._clock.unix_s())

    def tenant(self, tenant_id: str) -> Tenant:
        """Return a tenant that may use the platform here.

        Raises Unauthenticated for any other, ResidencyUnavailable where its data may not be.
        """
        held = self._tenants.view.get(TENANTS + tenant_id) if tenant_id else None
        if held is None or held.record.disabled:
            raise Unauthenticated("the tenant of this caller is not active")
        if not self.may_hold(tenant_id):
            region = held.record.residency
            raise ResidencyUnavailable(
                f"the data of this tenant stays in {region}, and this gateway stores nothing there: "
                f"use a gateway of {region}",
                residency=region,
            )
        return held.record

    def record(self, tenant_id: str) -> Tenant | None:
        """Return the present record of a tenant, which may be disabled; None without one."""
        held = self._tenants.view.get(TENANTS + tenant_id)
        return None if held is None else held.record

    def may_hold(self, tenant_id: str) -> bool:
        """Return whether data of the tenant may be stored here."""
        return self._region is None or self.residency(tenant_id) in ("", self._region)

    def residency(self, tenant_id: str) -> str:
        """Return the region that the tenant's data does not leave; empty: any."""
        found = self.record(tenant_id)
        return "" if found is None else found.residency

    def retention_s(self, owner: str) -> float:
        """Return the bound of a tenant for what is stored of it; 0: none. ``owner``: as in ``RecordKey``."""
        found = self.record(owner.partition("/")[0])
        return 0.0 if found is None else found.retention_s

    def may_use(self, principal: Principal, model: str) -> bool:
        """Return whether the key currently permits this model, which may not exist."""
        held = self._keys.view.get(KEYS + principal.key_id)
        models = principal.models if held is None else held.record.models
        return not models or model in models

    def not_found(self, principal: Principal, model: str, names: Iterable[str]) -> ModelNotFound:
        """Return the error for a model that the caller cannot use, with those of ``names`` that it can."""
        return model_not_found(model, (name for name in names if self.may_use(principal, name)))

    def authorise_model(
        self,
        principal: Principal,
        model: str,
        *,
        requested_name: str = "",
        names: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Return if the caller may run this model; ``requested_name`` is its name in the request.

        Raises PermissionDenied for a key that belongs to no tenant. A model that the key does not permit gets
        the same ModelNotFound as one that does not exist.
        """
        require_tenant(principal)
        if not self.may_use(principal, model):
            raise self.not_found(principal, requested_name or model, names())


def require_tenant(principal: Principal) -> None:
    """Return if the caller may run models. Raises PermissionDenied for a role without a tenant."""
    if not principal.role.of_tenant:
        raise PermissionDenied(
            f"models are run with a tenant's API key or token, not with the role {principal.role}",
            role=principal.role,
        )


def _require_in_time(key: ApiKey, shown_hash: str, now_s: float) -> None:
    """Return if the presented secret of the key is valid at this time. Raises Unauthenticated."""
    in_grace = shown_hash == key.previous_secret_hash and now_s < key.previous_expire_unix_s
    if shown_hash != key.secret_hash and not in_grace:
        raise Unauthenticated("the API key was rotated: use its new secret")
    if key.expire_unix_s and key.expire_unix_s <= now_s:
        raise Unauthenticated("the API key has expired")


def model_not_found(model: str, usable: Iterable[str] = ()) -> ModelNotFound:
    """Return the same error for every model that the caller cannot use, whatever the cause.

    ``usable``: names that the caller may use; the text has those that resemble the model's.
    """
    shown = model[:128]
    near = get_close_matches(shown, islice(usable, _MAX_COMPARED))
    text = f"the model {shown!r} does not exist or this API key is not for it"
    if near:
        text += f"; did you mean {' or '.join(map(repr, near))}?"
    return ModelNotFound(text, model=shown, field="model")


def _bare(credentials: str | None) -> str:
    """Return the key or token. Raises Unauthenticated."""
    if not credentials:
        raise Unauthenticated("no API key was given: send `authorization: Bearer <key>`")
    if len(credentials) > MAX_HEADER_CHARS:
        raise Unauthenticated("the API key is not valid")
    scheme, separator, rest = credentials.strip().partition(" ")
    if separator and scheme.lower() != "bearer":
        raise Unauthenticated("the authorization scheme must be Bearer")
    return rest.strip() if separator else scheme
