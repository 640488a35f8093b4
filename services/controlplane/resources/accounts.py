"""Tenants and API keys: the operations of operators."""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from services.controlplane.resources.resources import Resources, Stored
from services.core.errors import (
    FailedPrecondition,
    IntegrityError,
    InvalidInput,
    ModelNotFound,
    NotFound,
    PermissionDenied,
    StoreUnavailable,
    Unauthenticated,
)
from services.core.limits import UsageLimits
from services.core.records import (
    BUDGETS,
    DEPLOYMENTS,
    KEYS,
    MAX_KEY_GENERATIONS,
    ROOT,
    TENANT_KEYS,
    TENANTS,
    ApiKey,
    Budget,
    Deployment,
    KeyRole,
    Meta,
    Tenant,
    TenantKeyring,
    TrainingConsent,
    dump,
    pack_users_key,
)
from services.ports.clock import Clock
from services.ports.store import Committed, Delete, ModRevisionIs, Put, Store
from services.runtime import secrets
from services.runtime.audit import deciding
from services.runtime.idempotent_writes import WriteRequest, WriteSet
from services.runtime.identity import caller_tenant, principal

log = structlog.get_logger()

# A name that fits a key, a placement and a limit.
_TENANT_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?")
_DEPLOYMENT: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,126}[a-z0-9])?")
_USERS_OF_TENANT: Final = ROOT + "guards/tenant-keys/"
_TRIES: Final = 5
_MAX_FILE_BYTES: Final = 1024
SECRET_BYTES: Final = 32
_NONCE_BYTES: Final = 16
_PURPOSE: Final = b"fairway sealed answer v1"


class Sealer:
    """Sealed secrets: the answers to repeated requests, stored for the ten minutes of a request id.

    The store holds ``nonce, secret XOR pad`` where the pad is an HMAC-SHA256 over nonce and context, under a
    key derived for this purpose alone. A reader of the store without the installation's key learns nothing;
    the hash that is stored with the key detects a changed secret. Every control plane of an installation has
    the same ``key``.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) < 16:
            raise ValueError("a sealing key has at least 16 bytes")
        self._key = hmac.digest(key, _PURPOSE, "sha256")

    def seal(self, secret: bytes, context: str, nonce: bytes) -> str:
        """Return a secret of ``SECRET_BYTES`` as text. ``nonce`` is random and used once."""
        if len(secret) != SECRET_BYTES or len(nonce) < _NONCE_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, a nonce at least {_NONCE_BYTES}")
        nonce = nonce[:_NONCE_BYTES]
        return (nonce + _xor(secret, self._pad(nonce, context))).hex()

    def open(self, sealed: str, context: str) -> bytes:
        """Return the secret sealed in this context. Another context or key gives another secret."""
        try:
            data = bytes.fromhex(sealed)
        except ValueError as exc:
            raise IntegrityError("a sealed answer is malformed") from exc
        if len(data) != _NONCE_BYTES + SECRET_BYTES:
            raise IntegrityError("a sealed answer has another size")
        return _xor(data[_NONCE_BYTES:], self._pad(data[:_NONCE_BYTES], context))

    def _pad(self, nonce: bytes, context: str) -> bytes:
        return hmac.digest(self._key, nonce + context.encode(), "sha256")


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


class Tenants:
    """Stateless: every answer comes from the store, every write is conditional on what was read."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._tenants = Resources(store, clock, TENANTS, Tenant)
        self._keys = Resources(store, clock, KEYS, ApiKey)
        self._budgets = Resources(store, clock, BUDGETS, Budget)

    async def create(self, tenant: Tenant, *, request_id: str = "") -> Stored[Tenant]:
        if not _TENANT_NAME.fullmatch(tenant.meta.name):
            raise InvalidInput(
                "a tenant's name has at most 64 lower-case letters, digits and hyphens",
                field="tenant.metadata.name",
            )
        _require_consistent(tenant)
        request = self._tenants.request("create", tenant, request_id)
        if await self._tenants.replayed(request) is None:
            await _require_deployed(
                self._store, _degraded_models(tenant), field="tenant.degrade.smaller_models"
            )
        keys, pack = await self._without_former_keys(tenant.meta.name), await self._user_of_pack(tenant)
        together = WriteSet((*keys.conditions, *pack.conditions), (*keys.operations, *pack.operations))
        tenant = self._consented(tenant, TrainingConsent())
        created = await self._tenants.create(tenant, request, together=together)
        log.info("tenant.created", tenant=tenant.meta.name)
        return created

    async def get(self, name: str) -> Stored[Tenant]:
        return await self._tenants.get(name)

    async def page(self, *, size: int = 0, token: str = "") -> tuple[tuple[Stored[Tenant], ...], str]:
        return await self._tenants.page(size=size, token=token)

    async def update(self, tenant: Tenant, *, etag: str = "", request_id: str = "") -> Stored[Tenant]:
        """Replace a tenant. Its limits apply from the next request that a gateway admits.

        Once a gateway receives the change, it rejects new requests of a disabled tenant; running requests
        finish. Raises ModelNotFound for a model that is new in its policy and not deployed.
        """
        _require_consistent(tenant)
        request = self._tenants.request("update", tenant, request_id, etag=etag)
        together = WriteSet()
        if await self._tenants.replayed(request) is None:
            before = (await self._tenants.get(tenant.meta.name)).record
            together = await self._user_of_pack(tenant)
            had = _degraded_models(before)
            added = [model for model in _degraded_models(tenant) if model not in had]
            await _require_deployed(self._store, added, field="tenant.degrade.smaller_models")
            if not tenant.disabled and (await self.keyring(tenant.meta.name)).erase_unix_s:
                raise FailedPrecondition(
                    f"tenant {tenant.meta.name} was erased: delete it, and create it again",
                    name=tenant.meta.name,
                )
        updated = await self._tenants.update(
            tenant.meta.name,
            lambda stored: self._consented(tenant, stored.training_consent),
            request,
            etag=etag,
            together=together,
        )
        log.info("tenant.updated", tenant=tenant.meta.name, disabled=tenant.disabled)
        return updated

    async def delete(self, name: str, *, etag: str = "", request_id: str = "") -> None:
        """Remove a tenant. Raises FailedPrecondition while it has keys or budgets."""
        request = self._tenants.request("delete", name, request_id, etag=etag)
        if await self._tenants.done(request):
            return
        guard = await self._store.get(_USERS_OF_TENANT + name)
        owned = [key.record.meta.name for key in await self._keys.all() if key.record.tenant == name]
        if owned:
            raise FailedPrecondition(
                f"tenant {name} has {len(owned)} keys, {owned[0]} among them; delete them first",
                name=name,
                keys=len(owned),
            )
        budgets = [one.record.meta.name for one in await self._budgets.all() if one.record.tenant == name]
        if budgets:
            raise FailedPrecondition(
                f"tenant {name} has {len(budgets)} budgets, {budgets[0]} among them; delete them first",
                name=name,
                budgets=len(budgets),
            )
        # A key or a budget created after that read moved the guard; the commit then fails.
        unmoved = ModRevisionIs(_USERS_OF_TENANT + name, guard.mod_revision if guard else 0)
        together = WriteSet((unmoved,), (Delete(_USERS_OF_TENANT + name),))
        await self._tenants.delete(name, request, etag=etag, together=together)
        log.info("tenant.deleted", tenant=name)

    async def keyring(self, name: str) -> TenantKeyring:
        """Return the data keys of a tenant, wrapped; none before its first data is stored."""
        entry = await self._store.get(TENANT_KEYS + name)
        return TenantKeyring() if entry is None else entry.load(TenantKeyring)

    async def erase(self, name: str, *, etag: str = "", request_id: str = "") -> Stored[Tenant]:
        """Destroy every generation of a tenant's data key, and disable the tenant, in one commit.

        Gateways use no key that they hold from the moment they receive the change, and delete what is stored.
        """
        request = self._tenants.request("erase", name, request_id, etag=etag)
        ring = TenantKeyring(erase_unix_s=self._clock.unix_s())
        together = WriteSet(operations=(Put(TENANT_KEYS + name, dump(ring)),))
        erased = await self._tenants.update(
            name, lambda tenant: replace(tenant, disabled=True), request, etag=etag, together=together
        )
        log.info("tenant.erased", tenant=name)
        return erased

    async def rotate_key(self, name: str, *, request_id: str = "") -> None:
        """Let a gateway make another data key, which seals from then on. Raises FailedPrecondition for an
        erased tenant and for one with as many keys as may be, Conflict after a concurrent write."""
        request = self._tenants.request("rotate-key", name, request_id)
        if await self._tenants.done(request):
            return
        entry = await self._store.get(TENANT_KEYS + name)
        ring = TenantKeyring() if entry is None else entry.load(TenantKeyring)
        if ring.erase_unix_s or len(ring.generations) >= MAX_KEY_GENERATIONS:
            why = "was erased" if ring.erase_unix_s else f"has {len(ring.generations)} data keys, the most"
            raise FailedPrecondition(f"tenant {name} {why}", name=name)
        ring = replace(ring, rotate_unix_s=self._clock.unix_s())
        unmoved = ModRevisionIs(TENANT_KEYS + name, 0 if entry is None else entry.mod_revision)
        together = WriteSet((unmoved,), (Put(TENANT_KEYS + name, dump(ring)),))
        await self._tenants.update(name, lambda tenant: tenant, request, together=together)
        log.info("tenant.key_rotated", tenant=name)

    async def _without_former_keys(self, name: str) -> WriteSet:
        """Return what removes the keys of an earlier tenant of this name: the new one opens nothing of it.

        Raises FailedPrecondition while gateways delete what was stored of it.
        """
        entry = await self._store.get(TENANT_KEYS + name)
        if entry is None:
            return WriteSet()
        ring = entry.load(TenantKeyring)
        if ring.erase_unix_s and not ring.collect_unix_s:
            raise FailedPrecondition(
                f"gateways still delete what was stored of tenant {name}; try again in a few seconds",
                name=name,
            )
        return WriteSet((ModRevisionIs(entry.key, entry.mod_revision),), (Delete(entry.key),))

    async def _user_of_pack(self, tenant: Tenant) -> WriteSet:
        """Return the condition that the tenant's safety pack is there, and what its deletion detects.

        Raises NotFound, InvalidInput for the deployment of a model.
        """
        name = tenant.safety_pack
        if not name:
            return WriteSet()
        entry = await self._store.get(DEPLOYMENTS + name)
        if entry is None:
            raise NotFound(
                f"there is no safety pack {name}: `fairway policies create FILE --name {name}` makes it",
                name=name,
            )
        if not entry.load(Deployment).of_pack:
            raise InvalidInput(
                f"the deployment {name} is of a model, not of a safety pack", field="tenant.safety_pack"
            )
        exists = ModRevisionIs(entry.key, entry.mod_revision)
        return WriteSet((exists,), (Put(pack_users_key(name), b""),))

    def _consented(self, tenant: Tenant, before: TrainingConsent) -> Tenant:
        """Return the tenant with who recorded its consent, and when, if that is not the one before."""
        wanted = tenant.training_consent
        if (wanted.purpose, wanted.granted_by) == (before.purpose, before.granted_by):
            return replace(tenant, training_consent=before)
        consent = replace(wanted, recorded_by=principal().key_id, record_unix_s=self._clock.unix_s())
        return replace(tenant, training_consent=consent)


class Keys:
    """API keys; stateless as ``Tenants``."""

    def __init__(
        self, store: Store, clock: Clock, sealer: Sealer, *, new_secret: Callable[[], bytes]
    ) -> None:
        self._store = store
        self._clock = clock
        self._sealer = sealer
        self._new_secret = new_secret
        self._keys = Resources(store, clock, KEYS, ApiKey)

    async def create(self, key: ApiKey, *, request_id: str = "") -> tuple[Stored[ApiKey], str]:
        """Return a new key and its text; only the text's hash is stored.

        The text is stored sealed for the ten minutes of a request id, so that a repeated request returns it
        again. The admin of a tenant creates keys that begin with the tenant's name and a dot, so that it can
        neither find nor occupy names of others.
        """
        name, tenant = key.meta.name, caller_tenant()
        request = self._keys.request("create", _bare(key), request_id)
        if (found := await self._keys.replayed(request)) is not None:
            return self._unsealed(found, request)
        if key.expire_unix_s and key.expire_unix_s <= self._clock.unix_s():
            raise InvalidInput("expire_time is in the past", field="key.expire_time")
        if tenant and not name.startswith(f"{tenant}."):
            raise InvalidInput(
                f"name it {tenant}.NAME: names of keys are shared by all tenants", field="key.metadata.name"
            )
        together = await self._owner_of(key)
        _require_within(key, await self._ceiling())
        await _require_deployed(self._store, key.models, field="key.models")
        secret = self._new_secret()
        text, hashed = secrets.new_key(name, secret)
        made = await self._keys.create(
            replace(_bare(key), secret_hash=hashed),
            request,
            together=together,
            sealed=self._seal(secret, request),
        )
        if made.replayed:
            return self._unsealed(made, request)
        log.info("key.created", key=name, role=key.role.value, tenant=key.tenant)
        return made, text

    async def get(self, name: str) -> Stored[ApiKey]:
        return await self._keys.get(name)

    async def page(self, *, size: int = 0, token: str = "") -> tuple[tuple[Stored[ApiKey], ...], str]:
        return await self._keys.page(size=size, token=token)

    async def delete(self, name: str, *, etag: str = "", request_id: str = "") -> None:
        """Remove a key; each gateway rejects it once it receives the change."""
        await self._keys.delete(name, self._keys.request("delete", name, request_id, etag=etag), etag=etag)
        log.info("key.deleted", key=name)

    async def update(self, wanted: ApiKey, *, etag: str = "", request_id: str = "") -> Stored[ApiKey]:
        """Replace a key's models, expiry, limits and labels. Rejects changes of its role, tenant or secret.

        Raises ModelNotFound for a model that is new and not deployed, PermissionDenied beyond the ceiling.
        """
        ceiling = await self._ceiling()

        def changed(key: ApiKey) -> ApiKey:
            if wanted.role is not key.role or wanted.tenant != key.tenant:
                raise InvalidInput("the role and the tenant of a key never change", field="key.role")
            if not key.role.of_tenant:
                _require_bare(wanted)
            meta = replace(key.meta, labels=wanted.meta.labels)
            changed = replace(key, meta=meta, models=wanted.models, expire_unix_s=wanted.expire_unix_s)
            changed = replace(changed, limits=wanted.limits)
            _require_within(changed, ceiling)
            return changed

        request = self._keys.request("update", wanted, request_id, etag=etag)
        if wanted.role.of_tenant and await self._keys.replayed(request) is None:
            had = (await self._keys.get(wanted.meta.name)).record.models
            added = [model for model in wanted.models if model not in had]
            await _require_deployed(self._store, added, field="key.models")
        stored = await self._keys.update(wanted.meta.name, changed, request, etag=etag)
        log.info("key.updated", key=wanted.meta.name)
        return stored

    async def rotate(
        self, name: str, *, grace_s: float, etag: str = "", request_id: str = ""
    ) -> tuple[Stored[ApiKey], str]:
        """Return the key with a new text; the old text stays valid for ``grace_s`` more seconds.

        A repeated request id returns the same text without another rotation, so a retry does not shorten the
        old text's grace. Without an id each call rotates. Raises PermissionDenied beyond the ceiling.
        """
        ceiling = await self._ceiling()
        request = self._keys.request("rotate", (name, grace_s), request_id, etag=etag)
        secret = self._new_secret()
        text, hashed = secrets.new_key(name, secret)

        def rotated(key: ApiKey) -> ApiKey:
            _require_within(key, ceiling)
            return replace(
                key,
                secret_hash=hashed,
                previous_secret_hash=key.secret_hash if grace_s > 0 else "",
                previous_expire_unix_s=self._clock.unix_s() + grace_s if grace_s > 0 else 0.0,
            )

        stored = await self._keys.update(
            name, rotated, request, etag=etag, sealed=self._seal(secret, request)
        )
        if stored.replayed:
            return self._unsealed(stored, request)
        log.info("key.rotated", key=name, grace_s=grace_s)
        return stored, text

    async def _ceiling(self) -> ApiKey | None:
        """Return the most that a key may be which the caller creates, changes or rotates; None: anything.

        The admin of a tenant hands out what its own key may do.
        """
        if not caller_tenant():
            return None
        who = principal()
        if who.of_token:
            return ApiKey(Meta(who.key_id), who.role, "", who.tenant_id)
        return (await self._keys.get(who.key_id)).record

    def _seal(self, secret: bytes, request: WriteRequest) -> str:
        if not request.request_id:
            return ""
        return self._sealer.seal(secret, request.key, self._new_secret())

    def _unsealed(self, stored: Stored[ApiKey], request: WriteRequest) -> tuple[Stored[ApiKey], str]:
        text, hashed = secrets.new_key(stored.record.meta.name, self._sealer.open(stored.sealed, request.key))
        if hashed != stored.record.secret_hash:
            raise IntegrityError("the sealed secret is not the one that was given: rotate the key again")
        return stored, text

    async def _owner_of(self, key: ApiKey) -> WriteSet:
        """The condition that ties a key to its tenant: it exists, and its deletion detects the key."""
        if not key.role.of_tenant:
            _require_bare(key)
            return WriteSet()
        if not key.tenant:
            raise InvalidInput(f"a {key.role} key needs its tenant", field="key.tenant")
        return await tenant_exists(self._store, key.tenant, user=key.meta.name)


async def tenant_exists(store: Store, tenant: str, *, user: str) -> WriteSet:
    """Return what ties ``user``, a new key or budget, to its tenant: the tenant exists, and its deletion
    detects the user. Raises FailedPrecondition.
    """
    entry = await store.get(TENANTS + tenant)
    if entry is None or caller_tenant() not in ("", tenant):
        raise FailedPrecondition(f"there is no tenant {tenant}", tenant=tenant)
    return WriteSet(
        conditions=(ModRevisionIs(entry.key, entry.mod_revision),),
        operations=(Put(_USERS_OF_TENANT + tenant, user.encode()),),
    )


async def _require_deployed(store: Store, models: Iterable[str], *, field: str) -> None:
    """Raises ModelNotFound for the first name without a deployment: most often it is misspelt."""
    for model in models:
        if not (_DEPLOYMENT.fullmatch(model) and await store.get(DEPLOYMENTS + model)):
            raise ModelNotFound(
                f"there is no deployment {model[:128]!r}: create it first, and name it then",
                model=model[:128],
                field=field,
            )


def _require_bare(key: ApiKey) -> None:
    """Raises InvalidInput for a key of the installation with what only a tenant's key has."""
    for field, present in (
        ("tenant", key.tenant),
        ("models", key.models),
        ("limits", key.limits != UsageLimits()),
    ):
        if present:
            raise InvalidInput(f"a key of the role {key.role} has no {field}", field=f"key.{field}")


def _require_within(key: ApiKey, ceiling: ApiKey | None) -> None:
    """Raises PermissionDenied for a key that may do more than ``ceiling``, where there is one."""
    if ceiling is None:
        return
    ends_in_time = not ceiling.expire_unix_s or 0 < key.expire_unix_s <= ceiling.expire_unix_s
    for field, within in (
        ("role", key.role.of_tenant),
        ("models", not ceiling.models or (key.models and {*key.models} <= {*ceiling.models})),
        ("expire_time", ends_in_time),
        ("limits", key.limits.within(ceiling.limits)),
    ):
        if not within:
            raise PermissionDenied(
                f"the key would have more than your own: lower its {field}, or let an admin do it",
                field=f"key.{field}",
            )


def _require_consistent(tenant: Tenant) -> None:
    """Raises InvalidInput for a limit or a policy that can never apply."""
    consent = tenant.training_consent
    if bool(consent.purpose) != bool(consent.granted_by):
        raise InvalidInput(
            "a consent has both a purpose and who granted it; both empty withdraw it",
            field="tenant.training_consent",
        )
    if 0 < tenant.tokens_per_minute < tenant.committed_tokens_per_minute:
        raise InvalidInput(
            f"{tenant.committed_tokens_per_minute} tokens per minute are committed, and only "
            f"{tenant.tokens_per_minute} are allowed: raise tokens_per_minute, or commit fewer",
            field="tenant.committed_tokens_per_minute",
        )
    for model, smaller in tenant.degrade.smaller_models.items():
        if not (_DEPLOYMENT.fullmatch(model) and _DEPLOYMENT.fullmatch(smaller)):
            raise InvalidInput(
                f"{model} and {smaller} must both be names of deployments",
                field="tenant.degrade.smaller_models",
            )
        if model == smaller:
            raise InvalidInput(
                f"{model} would be answered by itself; name a smaller model",
                field="tenant.degrade.smaller_models",
            )


def _degraded_models(tenant: Tenant) -> tuple[str, ...]:
    return tuple(name for pair in tenant.degrade.smaller_models.items() for name in pair)


def _bare(key: ApiKey) -> ApiKey:
    return replace(key, secret_hash="", previous_secret_hash="", previous_expire_unix_s=0.0)


async def bootstrap(store: Store, clock: Clock, admin_key_file: Path) -> str:
    """Return the name of the admin key in the file, whose hash is now stored.

    The file holds ``fw_<name>_<secret>`` and is authoritative: it replaces another secret under that name.
    Raises FailedPrecondition for a file that is missing, readable by others or without a key, and when the
    name is a key of another role.
    """
    name, secret = _read(admin_key_file)
    hashed = secrets.secret_hash(secret)
    for _ in range(_TRIES):
        entry = await store.get(KEYS + name)
        now_s = clock.unix_s()
        if entry is None:
            key = ApiKey(Meta(name, create_unix_s=now_s, update_unix_s=now_s), KeyRole.ADMIN, hashed)
        else:
            old = entry.load(ApiKey)
            if old.role is not KeyRole.ADMIN:
                raise FailedPrecondition(
                    f"key {name} in {admin_key_file.name} is a key of the role {old.role}", name=name
                )
            if old.secret_hash == hashed and not old.expire_unix_s:
                return name
            meta = replace(old.meta, update_unix_s=now_s)
            key = ApiKey(meta, KeyRole.ADMIN, hashed)
        condition = ModRevisionIs(KEYS + name, 0 if entry is None else entry.mod_revision)
        with deciding("Keys/Bootstrap", name):
            done = await store.commit([Put(KEYS + name, dump(key))], [condition])
        if isinstance(done, Committed):
            log.info("key.bootstrapped", key=name)
            return name
    raise StoreUnavailable(f"key {name} is being changed by others")


def _read(path: Path) -> tuple[str, str]:
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            data = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise FailedPrecondition(f"the admin key file {path.name} cannot be read: {exc.strerror}") from exc
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (os.geteuid(), 0):
        raise FailedPrecondition(f"the admin key file {path.name} is readable by others: chmod 600 it")
    try:
        return secrets.parse_key(data.decode("ascii").strip())
    except (Unauthenticated, UnicodeDecodeError) as exc:
        raise FailedPrecondition(
            f"the admin key file {path.name} holds no key of the form fw_<name>_<secret>"
        ) from exc
