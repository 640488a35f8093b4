"""What bounds a gateway's requests and keeps their records: one Redis, with the helpers around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from secrets import token_bytes
from typing import Final

import structlog

from services.adapters.keys.key_file import KeyFile
from services.adapters.keys.pkcs11 import Pkcs11Keys
from services.adapters.keys.tenant_keys import KeyTimes, TenantKeys
from services.adapters.quotas.gateway_limiter import GatewayLimiter, LimiterTelemetry
from services.adapters.quotas.settlement_spool import SettlementSpool
from services.adapters.record_cipher import EncryptedRecords, RecordCipher
from services.adapters.redis.idempotency import RedisIdempotency
from services.adapters.redis.memory import RedisMemory
from services.app.environment import Environment
from services.app.roles.shared import open_redis, redis_access
from services.core.errors import StoreUnavailable
from services.core.limits import TOKEN_RATES, LimitKind
from services.core.records import GATEWAYS, TENANT_KEYS, Gateway, TenantKeyring, dump
from services.ports.idempotency import RecordLimits
from services.ports.key_wrapper import KeyWrapper
from services.runtime.config import Settings, read_secrets
from services.runtime.fleet_state.informer import RecordView
from services.runtime.fleet_state.lease import Registration
from services.runtime.identity import KeyDirectory
from services.runtime.process.health import Check
from services.runtime.reserve import Reserve

log = structlog.get_logger()

_REGISTER_S: Final = 5.0
_CACHED_RESPONSES: Final = 10_000  # most cached responses of a tenant
_STORED_RESPONSES: Final = 1_000_000  # most stored responses of a tenant


class GatewayQuotas:
    """The limiter and the idempotency records on one Redis, with their helpers."""

    def __init__(self, environment: Environment, identity: KeyDirectory) -> None:
        settings, clock = environment.settings, environment.clock
        self._supervisor = environment.supervisor
        access = redis_access(environment)
        self._redis = redis = open_redis(environment)
        self._memory = memory = _open_memory(environment)
        self._record_store = RedisIdempotency(
            settings.redis_url,
            clock,
            _record_limits(settings),
            access=access,
            memory=memory,
            retention_of=identity.retention_s,
        )
        environment.closing.push_async_callback(self._record_store.close)
        self.rings = rings = environment.informer(TENANT_KEYS, TenantKeyring)
        secrets = read_secrets(settings.record_keys_file)
        self.cipher = cipher = RecordCipher(_open_keys(environment, rings), token_bytes, secrets)
        self.erase = self._record_store.erase
        self.records = EncryptedRecords(self._record_store, cipher)
        opened = partial(_open_records, environment, cipher, memory, identity.retention_s)
        self.stored_responses = opened(_stored_limits(settings))
        self.responses: EncryptedRecords | None = None
        if settings.response_cache_ttl_s:
            self.responses = opened(_response_limits(settings))
        spool = SettlementSpool(settings.state_dir / "settlements")
        environment.closing.push_async_callback(spool.close)
        self.gateways = gateways = environment.informer(GATEWAYS, Gateway)
        telemetry = LimiterTelemetry(environment.metrics)
        self.limiter = limiter = GatewayLimiter(
            redis,
            clock,
            gateways=lambda: len(gateways.view),
            spool=spool,
            closed=_closed_kinds(settings),
            telemetry=telemetry,
        )
        telemetry.export(
            breaker_open=lambda: redis.breaker_open, unsettled=lambda: limiter.unsettled, spool=spool
        )
        address = settings.advertised
        self._registration = Registration(
            environment.store,
            GATEWAYS + address,
            dump(Gateway(address)),
            clock,
            ttl_s=settings.lease_ttl_s,
            rng=environment.rng,
        )

    def checks(self) -> tuple[Check, ...]:
        """Return whether requests can be admitted, and whether Redis bounds them."""
        return (
            Check("quotas", self.limiter.problem),
            Check("redis", lambda: self._redis.problem, withdraws=False),
        )

    async def start(self) -> None:
        """Return once Redis has the scripts, or is found unavailable. Raises FailedPrecondition."""
        await self.limiter.recover()
        self._supervisor.spawn("settle", self.limiter.settle_forever())
        self._supervisor.spawn("redis memory", self._memory.run())
        try:
            await self._redis.connect()
            await self._record_store.connect()
            await self.limiter.renew([])  # settles what an earlier process could not
        except StoreUnavailable as error:
            log.warning("gateway.started_without_redis", error=error.message)

    async def register(self) -> None:
        """Return once the other gateways count this one, or the store rejects the registration."""
        self._supervisor.spawn("registration", self._registration.run())
        try:
            await self._registration.wait_registered(_REGISTER_S)
        except StoreUnavailable as error:
            log.warning("gateway.not_registered", error=error.message)


def _open_keys(environment: Environment, rings: RecordView[TenantKeyring]) -> TenantKeys:
    """Return the keys of tenants, which are renewed from now on."""
    settings = environment.settings
    keys = TenantKeys(
        environment.store,
        rings,
        _key_wrapper(settings),
        environment.clock,
        random_bytes=token_bytes,
        # Twice as long as the files: a batch ends after its input was sealed.
        times=KeyTimes(settings.key_cache_s, keep_s=2 * settings.longest_retention_s),
    )
    environment.supervisor.spawn("tenant keys", keys.run())
    environment.health.add([Check("tenant_keys", keys.problem, withdraws=False)])
    environment.metrics.level(
        "fairway_gateway_tenant_keys_cached",
        "Unwrapped keys of tenants in memory",
        lambda: float(keys.cached),
    )
    environment.metrics.counted(
        "fairway_gateway_tenant_key_failures_total",
        "Keys of tenants that could not be unwrapped",
        lambda: [((), float(keys.failures))],
    )
    return keys


def _key_wrapper(settings: Settings) -> KeyWrapper:
    """Raises ConfigError for a token that cannot be used."""
    if settings.key_module is None:
        return KeyFile(settings.record_keys_file, token_bytes)
    return Pkcs11Keys(
        settings.key_module, settings.key_token, settings.key_labels, settings.key_pin_file, token_bytes
    )


def _open_memory(environment: Environment) -> RedisMemory:
    """Return what bounds the records of tenants by Redis's memory."""
    settings = environment.settings
    mend = "wait until records expire, or raise Redis's maxmemory"
    reserve = Reserve("Redis", mend, environment.clock)
    environment.reserves.append(reserve)
    memory = RedisMemory(settings.redis_url, environment.clock, reserve, access=redis_access(environment))
    environment.closing.push_async_callback(memory.close)
    return memory


def _open_records(
    environment: Environment,
    cipher: RecordCipher,
    memory: RedisMemory,
    retention_of: Callable[[str], float],
    limits: RecordLimits,
) -> EncryptedRecords:
    """Return a store of records with limits of its own."""
    settings = environment.settings
    records = RedisIdempotency(
        settings.redis_url,
        environment.clock,
        limits,
        access=redis_access(environment),
        memory=memory,
        retention_of=retention_of,
    )
    environment.closing.push_async_callback(records.close)
    return EncryptedRecords(records, cipher)


def _closed_kinds(settings: Settings) -> list[LimitKind]:
    """Return the kinds of limits that fail closed without Redis, besides budgets."""
    policies = {
        LimitKind.REQUESTS: settings.outage_requests,
        LimitKind.CONCURRENCY: settings.outage_concurrency,
        **dict.fromkeys(TOKEN_RATES, settings.outage_tokens),
    }
    return [kind for kind, policy in policies.items() if policy == "closed"]


def _record_limits(settings: Settings) -> RecordLimits:
    return RecordLimits(
        lease_s=settings.idempotency_lease_s,
        body_s=settings.idempotency_body_s,
        tombstone_s=settings.idempotency_tombstone_s,
        max_tenant_bytes=settings.idempotency_tenant_bytes,
        max_tenant_keys=settings.idempotency_tenant_keys,
    )


def _stored_limits(settings: Settings) -> RecordLimits:
    return RecordLimits(
        lease_s=settings.idempotency_lease_s,
        body_s=settings.responses_retention_s,
        tombstone_s=settings.responses_retention_s,
        max_tenant_bytes=settings.responses_tenant_bytes,
        max_tenant_keys=_STORED_RESPONSES,
        # An open one is a response in the background: it can go on as long as its key is remembered.
        open_s=settings.idempotency_tombstone_s,
    )


def _response_limits(settings: Settings) -> RecordLimits:
    return RecordLimits(
        body_s=settings.response_cache_ttl_s,
        tombstone_s=settings.response_cache_ttl_s,
        max_tenant_bytes=settings.response_cache_tenant_bytes,
        max_tenant_keys=_CACHED_RESPONSES,
    )
