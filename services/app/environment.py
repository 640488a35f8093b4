"""The shared objects of every role: settings, clock, tasks, the store and its views."""

from __future__ import annotations

import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Any, Final, TypeVar

import structlog

from fairway.log_stream import LogStream
from services.adapters.etcd.store import EtcdStore
from services.adapters.oidc import ProviderTokens, read_provider
from services.adapters.threads import in_thread
from services.core.audit import PENDING, AuditEntry
from services.core.errors import StoreUnavailable
from services.core.records import KEYS, TENANTS, ApiKey, Tenant
from services.ports.store import Entry
from services.rpc.interceptors.metrics import RpcMetrics
from services.rpc.peers import REFUSALS
from services.rpc.server import RpcServer, RpcService, RpcTelemetry, ServerTls
from services.runtime.audit import AuditedStore, AuditRecorder
from services.runtime.certificates import Certificates, FolderCertificates, WorkloadCertificates
from services.runtime.clock import SystemClock
from services.runtime.config import ConfigError, Settings, read_secret
from services.runtime.fleet_state.guarded_store import GuardedStore
from services.runtime.fleet_state.informer import Informer
from services.runtime.identity import KeyDirectory
from services.runtime.ids import Ids
from services.runtime.process.free_memory import return_free_memory
from services.runtime.process.health import Check, Health
from services.runtime.reserve import Reserve
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.logging import LineBudget
from services.runtime.telemetry.metrics import Metrics
from services.runtime.telemetry.process_metrics import LoopWatch, ProcessMetrics
from services.runtime.telemetry.server import TelemetryServer
from services.runtime.telemetry.tracing import open_tracing

log = structlog.get_logger()

Record = TypeVar("Record")
# The other roles carry all requests on a few long streams; there a span follows the request.
TRACED_BY_RPC: Final = ("registry", "controlplane")
_MORE_DISK: Final = "delete files, add disk, or lower FAIRWAY_DISK_RESERVE_BYTES"
_MEASURE_S: Final = 1.0
NEEDS_STORE: Final = ("registry", "controlplane")  # these roles answer from the store


class Environment:
    """The shared objects of one process; ``close`` ends them in reverse order of construction."""

    def __init__(self, settings: Settings, role: str, log_stream: LogStream) -> None:
        """Raises ConfigError for a secret that cannot be read."""
        self.settings = settings
        self.role = role
        self.log_stream = log_stream
        self.clock = SystemClock()
        self.ids = Ids()
        self.rng = Random(self.ids.seed())
        self.supervisor = Supervisor(self.clock)
        self.internal_token = read_secret(settings.internal_token_file)
        self.closing = AsyncExitStack()
        self.certificates = self._open_certificates()
        folder = settings.store_tls_dir
        self.store_certificates = (
            self.certificates if folder is None else FolderCertificates(folder, self.clock)
        )
        self._etcd = etcd = EtcdStore(
            settings.etcd_endpoints,
            self.clock,
            quota_bytes=settings.etcd_quota_bytes,
            certificates=self.store_certificates,
        )
        self.closing.push_async_callback(etcd.close)
        self.store = GuardedStore(etcd, self.clock, folder=settings.state_dir)
        self._informers: dict[str, Informer[Any]] = {}
        self.audit = AuditRecorder(self.store, self.clock, source=role, process=self.ids.source_id())
        self.reserves = [etcd.space.reserve]
        self.disk = self.disk_reserve("state_dir", settings.state_dir)
        self._open_telemetry()
        self.metrics.counted(
            "fairway_runtime_log_lines_lost_total",
            "Log lines that could not be written",
            lambda: [((), float(log_stream.lost))],
        )

    def informer(self, prefix: str, kind: type[Record]) -> Informer[Record]:
        """Return a view of the records under a prefix; ``sync`` starts it."""

        def decode(entry: Entry) -> Record:
            return entry.load(kind)

        informer = Informer(self.store, prefix, decode, self.clock, rng=self.rng)
        self._informers[prefix] = informer
        self.exported.informer(informer)
        return informer

    def disk_reserve(self, name: str, folder: Path) -> Reserve:
        """Return the reserve of a folder's disk, measured and reported from now on."""
        found = Reserve(
            name,
            _MORE_DISK,
            self.clock,
            reserve_bytes=self.settings.disk_reserve_bytes,
            measure=lambda: shutil.disk_usage(folder if folder.exists() else folder.parent).free,
        )
        self.reserves.append(found)
        return found

    def identity(self) -> KeyDirectory:
        """Return the authentication of callers: a view of the keys and tenants, and the provider's tokens.

        Raises ConfigError for a provider that is described wrongly.
        """
        keys, tenants = self.informer(KEYS, ApiKey), self.informer(TENANTS, Tenant)
        region = self.settings.region if self.role == "gateway" else None
        if self.settings.oidc_file is None:
            return KeyDirectory(keys, tenants, self.clock, region=region)
        tokens = ProviderTokens(read_provider(self.settings.oidc_file), self.clock)
        self.supervisor.spawn("issuer keys", tokens.run())
        self.health.add([Check("issuer_keys", tokens.problem, withdraws=False)])
        return KeyDirectory(keys, tenants, self.clock, verify_token=tokens.verify, region=region)

    def audited_store(self) -> tuple[AuditedStore, Informer[AuditEntry]]:
        """Return the store for the changes of operators, and the entries that wait for their place."""
        pending = self.informer(PENDING, AuditEntry)
        audited = AuditedStore(self.store, pending, self.clock, source=self.role, new_id=self.ids.request_id)
        return audited, pending

    def server(self, *services: RpcService, identity: KeyDirectory | None = None) -> RpcServer:
        """Return the role's gRPC server, not started. Without ``identity`` it accepts no API key."""
        server = RpcServer(
            services,
            listen=self.settings.listen,
            internal_token=self.internal_token,
            new_incident=self.ids.incident_id,
            authenticate=identity.authenticate if identity is not None else None,
            telemetry=self._rpc_telemetry,
            audit=self.audit,
            tls=self._server_tls(),
        )
        self.supervisor.spawn("connections", server.guard_connections(self.clock))
        return server

    def own_server(self, *services: RpcService, socket: Path, identity: KeyDirectory) -> RpcServer:
        """Return a server for this process's calls with people's credentials, on a private socket.

        It applies the rules of access as the role's own, except for certificates: only this user reaches it.
        The internal token does not open it.
        """
        return RpcServer(
            services,
            listen=f"unix:{socket}",
            internal_token=token_hex(32),
            new_incident=self.ids.incident_id,
            authenticate=identity.authenticate,
            telemetry=self._rpc_telemetry,
            audit=self.audit,
        )

    def client_tls(self, listen: str) -> Certificates | None:
        """Return the certificates of a port for clients; None: it is plain. Raises ConfigError."""
        return self.certificates if self.settings.secures(self.settings.client_tls, listen) else None

    def _open_certificates(self) -> Certificates | None:
        """Raises ConfigError for an unusable source, or one of another role."""
        settings = self.settings
        found: Certificates | None = None
        if settings.spiffe_socket:
            workload = WorkloadCertificates(settings.spiffe_socket)
            self.closing.callback(workload.close)
            found = workload
        elif settings.tls_dir is not None:
            found = FolderCertificates(settings.tls_dir, self.clock)
        if found is not None and found.current().id.role != self.role:
            raise ConfigError(
                f"the certificate is of {found.current().id}, and this is a {self.role}: use one of its role"
            )
        return found

    def _server_tls(self) -> ServerTls | None:
        """Return the TLS of the gRPC server: a gateway's is for clients, all others are for roles."""
        if self.role == "gateway":
            certificates = self.client_tls(self.settings.listen)
            return None if certificates is None else ServerTls(certificates, self.clock, from_roles=False)
        if self.certificates is None:
            self.settings.secures("auto", self.settings.listen)
            return None
        refused = self.metrics.counter(
            "fairway_rpc_certificates_refused_total",
            "Calls refused or ended for the certificate of their connection, after its handshake",
            ("reason",),
        )
        for reason in REFUSALS:
            refused.add(reason, amount=0)  # The first refusal of a reason is an increase, which alerts need.
        return ServerTls(self.certificates, self.clock, refused=refused.add)

    async def sync(self, timeout_s: float = 20.0) -> None:
        """Start the views and return once each is listed. They contain this process's earlier writes.

        Raises StoreUnavailable after ``timeout_s``, or StoreReplaced if another store is the cause.
        """
        self.supervisor.spawn("store look", self.store.run())
        self.supervisor.spawn("audit recorder", self.audit.run())
        for prefix, informer in self._informers.items():
            self.supervisor.spawn(f"informer {prefix}", informer.run())
        for informer in self._informers.values():
            try:
                await informer.wait_synced(timeout_s)
            except StoreUnavailable:
                await self.store.verify()
                raise

    async def watch(self) -> None:
        """Start the telemetry server and the loop watch before the role serves. Raises FailedPrecondition."""
        self.supervisor.spawn("loop watch", self._loop_watch.run())
        self.supervisor.spawn("free memory", return_free_memory(self.clock))
        self.supervisor.spawn("storage", self._watch_storage())
        self.supervisor.spawn("etcd space", self._etcd.watch_space())
        self._loop_watch.start()
        await self._telemetry_server.start()

    def storage_problem(self) -> str:
        """Return which stores take nothing more of tenants; empty while all do."""
        return "; ".join(filter(None, (reserve.problem() for reserve in self.reserves)))

    def _certificate_problem(self) -> str:
        """Return which certificates of this process expire soon; empty if none does."""
        found = dict.fromkeys(filter(None, (self.certificates, self.store_certificates)))
        return "; ".join(filter(None, (each.current().leaf.notice(self.clock.unix_s()) for each in found)))

    def parts(self) -> dict[str, bool]:
        """Return which stores can be used, for the health service."""
        return {"store": not self.store.problem(), "storage": not self.storage_problem()}

    async def _watch_storage(self) -> None:
        """Measure the disks, so that what is reported is current without writes."""
        while True:
            for reserve in tuple(self.reserves):
                try:
                    await in_thread(reserve.look)
                except OSError as error:
                    log.warning("storage.not_measured", store=reserve.store, error=repr(error))
            await self.clock.sleep(_MEASURE_S)

    async def close(self) -> None:
        self._loop_watch.stop()  # first: its task in the loop ends with the others
        await self.supervisor.close()
        await self.closing.aclose()
        await self._telemetry_server.stop()
        if self.tracing.on:
            await in_thread(self.tracing.close)

    def _open_telemetry(self) -> None:
        settings = self.settings
        self.metrics = Metrics()
        self.exported = ProcessMetrics(self.metrics, self.supervisor, self.role)
        self.health = Health(self.metrics)
        self._loop_watch = LoopWatch(self.metrics, self.clock)
        # A replaced store does not withdraw a role that can serve with the last state.
        needs_store = self.role in NEEDS_STORE
        self.health.add(
            [
                Check("event_loop", self._loop_watch.problem),
                Check("store", self.store.problem, withdraws=needs_store),
                # Roles that run serve on while etcd takes no new leases and changes.
                Check("etcd", self._etcd.space.problem, withdraws=self.role == "controlplane"),
                Check("etcd_silent", self.store.silence, withdraws=False),
                Check("storage", self.storage_problem, withdraws=False),
                Check("certificate", self._certificate_problem, withdraws=False),
            ]
        )
        self.metrics.gauge(
            "fairway_runtime_zone",
            "1, with the zone of the process: rules join it to other metrics by job and instance",
            lambda: [((settings.zone,), 1.0)],
            ("zone",),
        )
        self.exported.store(self.store)
        self.exported.storage(self.reserves)
        self.metrics.level(
            "fairway_runtime_audit_waiting",
            "Refused calls that are not written to the audit log yet",
            lambda: float(self.audit.waiting),
        )
        self.request_lines = LineBudget(self.clock.monotonic_s, settings.request_log_per_s)
        self.metrics.counted(
            "fairway_runtime_log_lines_suppressed_total",
            "Log lines dropped by FAIRWAY_REQUEST_LOG_PER_S",
            lambda: [((), float(self.request_lines.suppressed))],
        )
        self.tracing = open_tracing(
            self.clock,
            self.metrics,
            endpoint=settings.otlp_endpoint,
            ratio=settings.trace_ratio,
            role=self.role,
            rng=self.rng,
        )
        spans = self.tracing if self.tracing.on and self.role in TRACED_BY_RPC else None
        self._rpc_telemetry = RpcTelemetry(RpcMetrics(self.metrics), self.clock, spans, self.request_lines)
        self._open_telemetry_server()

    def _open_telemetry_server(self) -> None:
        settings = self.settings
        secured = settings.secures(settings.metrics_tls, settings.metrics_listen)
        if (certificates := self.certificates) is not None:
            self.metrics.gauge(
                "fairway_process_certificate_expiry_seconds",
                "Unix time at which the certificate of this process expires",
                lambda: (((), certificates.current().leaf.expire_s),),
            )
        self._telemetry_server = TelemetryServer(
            self.metrics.registry,
            settings.metrics_listen,
            problems=self.health.problems,
            notices=self.health.notices,
            certificates=self.certificates if secured else None,
        )
