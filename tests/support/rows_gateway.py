"""A gateway of fixed-cost models over real parts, with its gRPC and HTTP servers on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import grpc

from fairway.formats.limits import POLICY_NAME
from fairway.inference import v2_pb2, v2_pb2_grpc
from fairway.v1 import inference_pb2, inference_pb2_grpc
from services.adapters.quarantine import MemoryQuarantine
from services.core.generation import Principal
from services.core.limits import Price
from services.core.manifest import Manifest, ManifestFile, sha256_of
from services.core.records import (
    DEPLOYMENTS,
    GATEWAY_EXECUTOR,
    KEYS,
    SCALED,
    TENANTS,
    WORKERS,
    ApiKey,
    Deployment,
    KeyRole,
    LoadedVersion,
    Meta,
    Tenant,
    VersionState,
    Worker,
)
from services.core.scaling import Scaled, Scaling
from services.core.usage import RequestUsage
from services.gateway.catalog import ModelCatalog
from services.gateway.events import Received
from services.gateway.faces.grpc.servicer import InferenceServicer
from services.gateway.faces.openai.exchange import HttpLimits
from services.gateway.faces.openai.routes import build_app
from services.gateway.faces.openai.server import HttpServer
from services.gateway.faces.predict.routes import PredictServicer
from services.gateway.idempotency.service import IdempotentService
from services.gateway.idempotency.telemetry import KeyedTelemetry
from services.gateway.idempotency.types import KeyedLimits, KeyedPorts
from services.gateway.poison import PoisonGate
from services.gateway.requests.egress import EgressGate
from services.gateway.requests.quotas import RequestQuotas
from services.gateway.requests.validate import Validator
from services.gateway.rows.service import RowsService
from services.gateway.rows.work import RowsParts
from services.gateway.safety.packs import SafetyPacks
from services.gateway.safety.verdicts import Judges, RowClassifiers
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.splits import Splits
from services.gateway.telemetry import GatewayTelemetry
from services.ports.idempotency import IdempotencyStore
from services.ports.poison.quarantine import Quarantine
from services.rpc.server import RpcServer, RpcService
from services.rpc.status import by_reason
from services.runtime import secrets
from services.runtime.clock import SystemClock
from services.runtime.identity import KeyDirectory
from services.runtime.ids import Ids
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics
from simulator.fleet.nodes.gateway_node import LocalTexts
from simulator.stores.idempotency import MemoryIdempotency
from simulator.stores.limiter import MemoryLimiter
from tests.support.memory_batches import memory_batches
from tests.support.row_versions import LocalRows
from tests.support.safety import desk_of
from tests.support.stored_responses import memory_responses
from tests.unit.gateway.conftest import View

CLOCK = SystemClock()
API_KEY, KEY_HASH = secrets.new_key("alpha", b"\x01" * 32)
AUTH = (("authorization", f"Bearer {API_KEY}"),)
SECRET = b"of the quarantine"
PRICE = Price(input_micros=2_000_000)


def digest_of(name: str) -> str:
    return "sha256:" + name.encode().hex().ljust(64, "0")[:64]


@dataclass
class VersionFolders:
    """Model files that are there already, by version."""

    folders: dict[str, Path]

    async def fetch(self, model: str, digest: str, *, only: Callable[[str], bool] | None = None) -> Path:
        return self.folders[digest]

    async def readable(self, model: str, digest: str) -> Manifest:
        policy = self.folders[digest] / POLICY_NAME
        if not policy.exists():
            return Manifest(())
        return Manifest((ManifestFile(POLICY_NAME, policy.stat().st_size, sha256_of(policy.read_bytes())),))

    def pin(self, folder: Path) -> None: ...

    def unpin(self, folder: Path) -> None: ...


class RowsGateway:
    """Tenant ``acme``; each folder is served as the deployment of its name."""

    def __init__(
        self,
        folders: dict[str, Path],
        threads: ThreadPoolExecutor,
        *,
        records: IdempotencyStore | None = None,
        limiter: Any = None,
        owner: str = "g0",
        runner: Any = None,
        quarantine: Quarantine | None = None,
        aliases: dict[str, str] | None = None,
        placement: Any = None,
        workers: Any = None,
    ) -> None:
        """Without ``records``, keys are kept in memory; without a ``runner``, rows are computed here.

        ``placement`` and ``workers`` run generations.
        """
        self.placement, self.of_generations = placement, workers
        self.keys, self.tenants, self.deployments = View(), View(), View()
        self.workers, self.routes, self.scaled = View(), View(), View()
        if runner is None:
            runner = LocalRows()
            runner.gate.set()
            for name, folder in folders.items():
                runner.load(digest_of(name), folder)
        self.runner, self.limiter = runner, limiter or MemoryLimiter(CLOCK)
        self.quarantine: Quarantine = quarantine or MemoryQuarantine(CLOCK)
        self.reported: list[RequestUsage] = []
        self.supervisor, self.metrics = Supervisor(CLOCK), Metrics()
        self.identity = KeyDirectory(self.keys, self.tenants, CLOCK)
        self.by_digest = {digest_of(name): folder for name, folder in folders.items()}
        self.catalog = ModelCatalog(
            self.deployments,
            self.workers,
            files := VersionFolders(self.by_digest),
            CLOCK,
            texts=LocalTexts(threads, CLOCK),
            splits=Splits(self.routes),
            scaled=self.scaled,
            sized=View(),
            aliases=aliases,
        )
        self.put_tenant(Tenant(Meta("acme")))
        for name in folders:
            self.deploy(name)
        validator = Validator(self.catalog, self.identity, Random(0))
        self.ports = self._judged(self._ports(), SafetyPacks(self.catalog, files, CLOCK), validator)
        self.service = IdempotentService(
            self._keyed(records, owner),
            validator=validator,
            identity=self.identity,
            catalog=self.catalog,
            ports=self.ports,
            limits=GatewayLimits(),
        )
        quotas = RequestQuotas(self.identity, self.ports)
        work = RowsParts(validator, self.catalog, quotas, self.ports, self.runner, prefills=self.runner)
        self.rows = RowsService(self.service, self.identity, work)
        self._numbers = count()

    def _judged(self, ports: Ports, packs: SafetyPacks, validator: Validator) -> Ports:
        judges = Judges(self.catalog, validator, ports, GatewayLimits())
        classifiers = RowClassifiers(self.catalog, self.runner, ports, judges)
        desk = desk_of(classifiers, supervisor=self.supervisor, metrics=self.metrics)
        return replace(ports, packs=packs, safety=desk)

    def _ports(self) -> Ports:
        telemetry = GatewayTelemetry(self.metrics, clock=CLOCK)
        return Ports(
            limiter=self.limiter,
            placement=self.placement,
            workers=self.of_generations,
            clock=CLOCK,
            supervisor=self.supervisor,
            rng=Random(0),
            sign_ticket=lambda ticket: b"t",
            new_incident=lambda: "inc_1",
            error_of=by_reason,
            telemetry=telemetry,
            waking=self.catalog.waking,
            report_usage=self.reported.append,
            gate=EgressGate(self.identity.record, lambda: 1, CLOCK, self.metrics),
            poisons=PoisonGate(
                self.quarantine, secret=SECRET, clock=CLOCK, supervisor=self.supervisor, telemetry=telemetry
            ),
        )

    def _keyed(self, records: IdempotencyStore | None, owner: str) -> KeyedPorts:
        return KeyedPorts(
            store=records or MemoryIdempotency(CLOCK, self.limiter),
            limiter=self.limiter,
            clock=CLOCK,
            telemetry=KeyedTelemetry(self.metrics),
            new_incident=lambda: "inc_1",
            names_secret=b"of the names",
            owner=owner,
            window_tokens=256,
            limits=KeyedLimits(),
            report_usage=self.reported.append,
        )

    @property
    def principal(self) -> Principal:
        return self.identity.authenticate(f"Bearer {API_KEY}")

    def put_tenant(self, tenant: Tenant) -> None:
        self.tenants.put(TENANTS + "acme", tenant)
        self.keys.put(KEYS + "alpha", ApiKey(Meta("alpha"), KeyRole.TENANT, KEY_HASH, tenant="acme"))

    def deploy(self, name: str, version: str = "") -> None:
        """Serve a version, by default the one of the same name, on a ready worker."""
        digest = digest_of(version or name)
        deployment = replace(Deployment(Meta(name), name, "v1", digest, 1), price=PRICE)
        self.deployments.put(DEPLOYMENTS + name, deployment, 42)
        loaded = LoadedVersion(name, name, digest, VersionState.READY)
        self.workers.put(WORKERS + f"w-{digest}", Worker(f"w-{digest}", "w:1", versions=(loaded,)))

    def sleep(self, name: str, **decided: Any) -> None:
        """Have a deployment without replicas, which its load may start."""
        held = self.deployments.view[DEPLOYMENTS + name].record
        self.deployments.put(DEPLOYMENTS + name, replace(held, scaling=Scaling(0, 1)), 42)
        self.scaled.put(SCALED + name, Scaled(name, 0, **decided))
        self.workers.put(WORKERS + f"w-{digest_of(name)}", Worker(f"w-{digest_of(name)}", "w:1"))

    def deploy_pack(self, name: str, folder: Path) -> None:
        """Serve the safety pack in a folder."""
        self.by_digest[digest_of(name)] = folder
        pack = Deployment(Meta(name), name, "v1", digest_of(name), 0, executor=GATEWAY_EXECUTOR)
        self.deployments.put(DEPLOYMENTS + name, pack, 43)

    def received(self) -> Received:
        return Received(CLOCK.monotonic_s(), 1, f"req_{next(self._numbers)}")

    async def close(self) -> None:
        assert self.supervisor.healthy, self.supervisor.failures
        assert not self.service.running
        await self.supervisor.close()


@asynccontextmanager
async def rows_gateway(folders: dict[str, Path], **options: Any) -> AsyncIterator[RowsGateway]:
    """Yield a gateway with the models of these folders loaded. Nothing is held afterwards."""
    with ThreadPoolExecutor(2) as threads:
        gateway = RowsGateway(folders, threads, **options)
        yield gateway
        await gateway.close()


@dataclass
class Sockets:
    grpc_port: int
    http_port: int
    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    predict: v2_pb2_grpc.GRPCInferenceServiceAsyncStub


@asynccontextmanager
async def served(gateway: RowsGateway) -> AsyncIterator[Sockets]:
    """Yield the sockets of a gateway, with all its interfaces."""
    server = RpcServer(
        [
            RpcService(
                inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
                inference_pb2_grpc.add_InferenceServiceServicer_to_server,
                InferenceServicer(gateway.service, gateway.rows, gateway.received, heartbeat_s=5.0),
            ),
            RpcService(
                v2_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
                v2_pb2_grpc.add_GRPCInferenceServiceServicer_to_server,
                PredictServicer(gateway.rows, gateway.received, lambda: ""),
            ),
        ],
        listen="127.0.0.1:0",
        internal_token="i" * 32,
        new_incident=lambda: "inc_2",
        authenticate=gateway.identity.authenticate,
    )
    async with memory_responses(CLOCK) as responses:
        app = build_app(
            gateway.service,
            gateway.rows,
            memory_batches(),
            gateway.identity,
            CLOCK,
            Ids(),
            responses,
            event_secret=b"e" * 32,
            limits=HttpLimits(8 * 1024 * 1024),
        )
        http = HttpServer(app, "127.0.0.1", 0)
        await server.start()
        await http.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                yield Sockets(
                    server.port,
                    http.port,
                    inference_pb2_grpc.InferenceServiceStub(channel),
                    v2_pb2_grpc.GRPCInferenceServiceStub(channel),
                )
        finally:
            await http.stop(0.5)
            await server.stop(0)
