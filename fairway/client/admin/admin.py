"""The client for operators' scripts: the functions of the command line, in Python.

    async with AdminClient(["10.0.0.1:9090", "10.0.0.2:9090"], admin_key=key) as admin:
        await admin.deployments.scale("chat", 4)
        await admin.deployments.wait_ready("chat")

Arguments and results are the messages of ``fairway.v1``, unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random, SystemRandom
from types import ModuleType, TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import grpc

from fairway.client.admin.calls import Service, duration_of
from fairway.client.admin.resources import (
    Aliases,
    Budgets,
    Deployments,
    Keys,
    Nodes,
    Objectives,
    Rollouts,
    Tenants,
)
from fairway.client.admin.watch import Missed, OnLost, WatchUpdate, watch_events, watch_resources
from fairway.client.attempts import Attempts, Core
from fairway.client.endpoints import Credentials, check_addresses
from fairway.client.errors import from_rpc
from fairway.client.guard import Guard
from fairway.client.publish.publish import Base, Kind, Published, PublishProgress, publish
from fairway.client.values import ClientOptions
from fairway.formats.signatures import sign
from fairway.login import Bearer
from fairway.v1 import common_pb2, controlplane_pb2_grpc, registry_pb2_grpc, slis_pb2
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import registry_pb2 as rg
from fairway.v1 import scheduler_pb2 as sched

T = TypeVar("T")
Version = cp.ModelVersion | cp.ModelTag
GARBAGE_S: Final = 600.0
MAX_MANIFEST_BYTES: Final = 64 * 1024 * 1024


class Models:
    """``watch`` calls the control plane, every other method the registry."""

    def __init__(self, registry: Service | None, control: Service | None) -> None:
        self._optional_registry, self._control = registry, control

    async def list(
        self, *, limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[rg.RegisteredModel]:
        """Return the models with their tags, or the first ``limit``."""
        return await self._registry.pages("ListRegisteredModels", "models", limit=limit, timeout_s=timeout_s)

    async def versions(
        self, model: str, *, limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[rg.Version]:
        """Return the versions of a model, without their manifests' files, or the first ``limit``."""
        return await self._registry.pages(
            "ListVersions", "versions", limit=limit, timeout_s=timeout_s, model=model
        )

    async def get(self, model: str, version: str, *, timeout_s: float | None = None) -> rg.Version:
        """Return a version by its tag or digest, with its manifest. Raises NotFound."""
        answer: rg.GetVersionResponse = await self._registry.call(
            "GetVersion", model=model, version=version, timeout_s=timeout_s
        )
        return answer.version

    async def manifest_json(self, digest: str, *, timeout_s: float | None = None) -> bytes:
        """Return the bytes whose sha256 names a version. Raises NotFound, ConnectionLost."""
        registry = self._registry
        limit_s = registry.timeout_s(timeout_s)
        request = rg.DownloadChunkRequest(digest=digest)
        stream = await registry.open("DownloadChunk", request, Attempts(registry.core, limit_s))
        body, sha256 = bytearray(), hashlib.sha256()
        try:
            while sha256.hexdigest() != digest.removeprefix("sha256:"):
                data = (await stream.read(limit_s)).data
                body += data
                sha256.update(data)
                if len(body) > MAX_MANIFEST_BYTES:
                    raise ValueError(f"the manifest {digest} has more than {MAX_MANIFEST_BYTES} bytes")
        finally:
            stream.close()
        return bytes(body)

    async def sign(self, model: str, digest: str, private_key: Path) -> bool:
        """Sign a version with a key in PEM form, and return whether it did not have this signature.

        Raises BadSignature for an unusable key, NotFound, FailedPrecondition.
        """
        manifest = await self.manifest_json(digest)
        return await self.add_signature(model, digest, await asyncio.to_thread(sign, manifest, private_key))

    async def add_signature(
        self, model: str, digest: str, bundle: str, *, timeout_s: float | None = None
    ) -> bool:
        """Add a bundle of model-signing over a version's ``manifest.json``; return as ``sign`` does."""
        answer: rg.AddSignatureResponse = await self._registry.call(
            "AddSignature", model=model, digest=digest, bundle=bundle, timeout_s=timeout_s
        )
        return answer.added

    async def signer_policy(
        self, model: str, *, timeout_s: float | None = None
    ) -> rg.GetSignerPolicyResponse:
        """Return who may sign the versions of a model. Raises NotFound where anybody or nobody may."""
        answer: rg.GetSignerPolicyResponse = await self._registry.call(
            "GetSignerPolicy", model=model, timeout_s=timeout_s
        )
        return answer

    async def update_signer_policy(
        self, policy: rg.SignerPolicy, *, etag: str = "", timeout_s: float | None = None
    ) -> str:
        """Replace the signer policy of a model and return its etag. Versions that run go on."""
        answer: rg.UpdateSignerPolicyResponse = await self._registry.change(
            "UpdateSignerPolicy", policy=policy, etag=etag, timeout_s=timeout_s
        )
        return answer.etag

    async def tag(
        self, model: str, tag: str, digest: str, *, etag: str = "", timeout_s: float | None = None
    ) -> None:
        """Point a tag at a version. Deployments keep their version until they are updated.

        ``etag``: only if the tag points at this digest now; raises Conflict.
        """
        await self._registry.change(
            "SetTag", model=model, tag=tag, digest=digest, etag=etag, timeout_s=timeout_s
        )

    async def untag(self, model: str, tag: str, *, etag: str = "", timeout_s: float | None = None) -> None:
        """Remove a tag; its version stays. ``etag`` as for ``tag``. Raises NotFound."""
        await self._registry.change("DeleteTag", model=model, tag=tag, etag=etag, timeout_s=timeout_s)

    async def delete(self, model: str, digest: str, *, timeout_s: float | None = None) -> None:
        """Delete a version that no tag and no deployment uses. Raises NotFound and FailedPrecondition."""
        await self._registry.change("DeleteVersion", model=model, digest=digest, timeout_s=timeout_s)

    async def collect_garbage(
        self, *, dry_run: bool = False, min_age_s: float | None = None, timeout_s: float = GARBAGE_S
    ) -> rg.CollectGarbageResponse:
        """Delete unreferenced blobs older than ``min_age_s``; ``dry_run`` only counts them.

        The counts are those of the last attempt; an attempt whose response was lost is not included.
        """
        min_age = None if min_age_s is None else duration_of(min_age_s)
        answer: rg.CollectGarbageResponse = await self._registry.call(
            "CollectGarbage", quick=False, dry_run=dry_run, min_age=min_age, timeout_s=timeout_s
        )
        return answer

    async def publish(
        self,
        folder: Path,
        model: str,
        tag: str = "",
        *,
        base: Base | None = None,
        kind: Kind | None = None,
        max_context_tokens: int = 0,
        for_another_engine: bool = False,
        progress: Callable[[PublishProgress], None] | None = None,
    ) -> Published:
        """Return once the folder is a verified version and ``tag``, unless empty, points at it.

        ``base`` is that of an adapter.
        The total time is bounded by its parts: each call has a deadline, and a registry that is unreachable
        for a minute ends it. A repeated publication continues where it stopped. Raises FairwayError,
        PublishRefused for a folder that cannot be a version or, unless ``for_another_engine``, cannot be
        served, and OSError for one that cannot be read.
        """
        core = self._registry.core
        endpoint = await self._registry.guard.run(Attempts(core, core.options.timeout_s).begin())
        try:
            return await self._registry.guard.run(
                publish(
                    endpoint.channel,
                    folder,
                    model,
                    tag,
                    progress,
                    metadata=core.metadata,
                    base=base,
                    kind=kind,
                    max_context_tokens=max_context_tokens,
                    for_another_engine=for_another_engine,
                )
            )
        except grpc.aio.AioRpcError as exc:
            raise from_rpc(exc) from None
        finally:
            core.pool.release(endpoint)

    def watch(self, *, on_lost: OnLost | None = None) -> AsyncGenerator[WatchUpdate[Version], None]:
        """Yield the versions and tags of all models, then every change, like the watch of a resource.

        Versions are named ``model/digest``, tags ``model:tag``.
        """
        if self._control is None:
            raise ValueError("a watch of models needs the addresses of a control plane")
        return watch_resources(self._control, cp.RESOURCE_KIND_MODEL, _named, on_lost)

    @property
    def _registry(self) -> Service:
        if self._optional_registry is None:
            raise ValueError("this client has no registry address: set registry=")
        return self._optional_registry


def _named(change: cp.ResourceChange) -> tuple[str, Version] | None:
    match change.WhichOneof("resource"):
        case "model_version":
            version = change.model_version
            return f"{version.model}/{version.version_digest}", version
        case "model_tag":
            tag = change.model_tag
            return f"{tag.model}:{tag.tag}", tag
        case _:
            return None


_SLIS_PAGE: Final = 250


class _OfControlPlane:
    def __init__(self, service: Service) -> None:
        self._service = service


class Quarantine(_OfControlPlane):
    """The inputs that every gateway refuses, because each ended the engines that computed it."""

    async def list(
        self,
        *,
        model: str = "",
        version_digest: str = "",
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Sequence[cp.QuarantinedInput]:
        """Return the inputs of one deployment, of one version, or all, by version and fingerprint."""
        return await self._service.pages(
            "ListQuarantined",
            "inputs",
            limit=limit,
            timeout_s=timeout_s,
            model=model,
            version_digest=version_digest,
        )

    async def lift(self, version_digest: str, fingerprint: str, *, timeout_s: float | None = None) -> None:
        """Return once the input may run again. Gateways follow within moments. Raises NotFound."""
        await self._service.change(
            "DeleteQuarantined", timeout_s=timeout_s, version_digest=version_digest, fingerprint=fingerprint
        )


class Slis(_OfControlPlane):
    """Service level indicators of the last hour, from the leading control plane."""

    async def list(
        self,
        *,
        model: str = "",
        tenant: str = "",
        priority: common_pb2.Priority.ValueType = common_pb2.PRIORITY_UNSPECIFIED,
        zone: str = "",
        window_s: float = 3600.0,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Sequence[cp.SliSummary]:
        """Return what was measured per deployment, version, tenant, class and zone, sorted by them.

        The start of the window is moved back to a multiple of ten minutes. Raises Unavailable without a
        leader.
        """
        return await self._service.pages(
            "ListSlis",
            "slis",
            limit=limit,
            timeout_s=timeout_s,
            page_size=_SLIS_PAGE,
            model=model,
            tenant=tenant,
            priority=priority,
            zone=zone,
            window=duration_of(window_s),
        )

    async def requests(
        self,
        *,
        slow: bool = False,
        failed: bool = False,
        tenant: str = "",
        model: str = "",
        request_id: str = "",
        limit: int = 100,
        timeout_s: float | None = None,
    ) -> Sequence[slis_pb2.FinishedRequest]:
        """Return requests that ended lately: the slowest first, or the last to end first.

        Not all are kept: of each gateway the slowest and some that failed. ``request_id``: as in an answer.
        Raises Unavailable without a leader.
        """
        found: cp.ListFinishedRequestsResponse = await self._service.call(
            "ListFinishedRequests",
            timeout_s=timeout_s,
            slow=slow,
            failed=failed,
            tenant=tenant,
            model=model,
            request_name=request_id,
            limit=limit,
        )
        return found.requests


class Diagnoses(_OfControlPlane):
    """Why latency rose, by the leading control plane."""

    async def diagnose(
        self,
        *,
        model: str = "",
        tenant: str = "",
        metric: str = "",
        quantile: float = 0.0,
        start: datetime | None = None,
        end: datetime | None = None,
        baseline: str = "",
        samples: bool = False,
        timeout_s: float | None = None,
    ) -> cp.DiagnoseLatencyResponse:
        """Return the causes of a rise; without ``start`` of the last one within an hour.

        ``samples``: the answer has the sampled requests too. Raises Unavailable without a leader.
        """
        found: cp.DiagnoseLatencyResponse = await self._service.call(
            "DiagnoseLatency",
            timeout_s=timeout_s,
            quick=False,
            model=model,
            tenant=tenant,
            metric=metric,
            quantile=quantile,
            start_time=start,
            end_time=end,
            baseline=baseline,
            samples=samples,
        )
        return found

    async def save_baseline(
        self,
        name: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        timeout_s: float | None = None,
    ) -> cp.DiagnosedSpan:
        """Keep the sampled requests of a time under a name; return what was kept."""
        found: cp.SaveLatencyBaselineResponse = await self._service.call(
            "SaveLatencyBaseline", timeout_s=timeout_s, name=name, start_time=start, end_time=end
        )
        return found.baseline


class UsageRecords(_OfControlPlane):
    """What was used and what it cost, from the leading control plane."""

    async def list(
        self,
        *,
        tenant: str = "",
        key: str = "",
        user: str = "",
        model: str = "",
        labels: Mapping[str, str] | None = None,
        group_by: Sequence[cp.UsageDimension.ValueType] = (),
        group_by_labels: Sequence[str] = (),
        granularity: cp.UsageGranularity.ValueType = cp.USAGE_GRANULARITY_UNSPECIFIED,
        start_time: datetime | None = None,
        end_time: datetime | None = None,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Sequence[cp.UsageRecord]:
        """Return the records of whole hours from ``start_time``, by default of today (UTC), to ``end_time``.

        Dimensions that are not in ``group_by`` are summed. Raises Unavailable without a leader.
        """
        return await self._service.pages(
            "ListUsage",
            "records",
            quick=False,  # a standby waits for a leader, which reads the ledger
            limit=limit,
            timeout_s=timeout_s,
            tenant=tenant,
            key=key,
            user=user,
            model=model,
            labels=labels or {},
            group_by=group_by,
            group_by_labels=group_by_labels,
            granularity=granularity,
            start_time=start_time,
            end_time=end_time,
        )


class AuditLog(_OfControlPlane):
    """The audit log. Each call is itself an entry of it."""

    async def list(
        self,
        *,
        actor: str = "",
        action: str = "",
        resource: str = "",
        start_time: datetime | None = None,
        end_time: datetime | None = None,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Sequence[cp.AuditEvent]:
        """Return the entries, newest first, or ``limit`` of them. ``action``: a method or a route."""
        return await self._service.pages(
            "ListAuditEvents",
            "events",
            quick=False,  # a page may read many entries for few that match
            limit=limit,
            timeout_s=timeout_s,
            actor=actor,
            action=action,
            resource=resource,
            start_time=start_time,
            end_time=end_time,
        )

    async def export(self) -> AsyncGenerator[cp.ExportAuditLogResponse, None]:
        """Yield the objects of the log in the layout of C2SP tlog-tiles, each with its name.

        Raises ConnectionLost when the connection breaks before the last one.
        """
        limit_s = self._service.timeout_s(None)
        attempts = Attempts(self._service.core, limit_s)
        stream = await self._service.open("ExportAuditLog", cp.ExportAuditLogRequest(), attempts)
        try:
            while not (answer := await stream.read(limit_s)).last:
                yield answer
        finally:
            stream.close()


Kinds = Sequence[cp.ResourceKind.ValueType]
_NEWEST: Final = 20


class Events(_OfControlPlane):
    """The fleet's events, retained for about an hour."""

    async def list(
        self,
        *,
        kinds: Kinds = (),
        resource: str = "",
        limit: int | None = 100,
        timeout_s: float | None = None,
    ) -> Sequence[cp.Event]:
        """Return the newest ``limit`` (None: all), newest first; filtered by kinds and resource, if given."""
        return await self._service.pages(
            "ListEvents", "events", limit=limit, timeout_s=timeout_s, kinds=kinds, resource=resource
        )

    def watch(
        self,
        *,
        kinds: Kinds = (),
        resource: str = "",
        newest: int = _NEWEST,
        on_lost: OnLost | None = None,
    ) -> AsyncGenerator[cp.Event | Missed, None]:
        """Yield the ``newest`` events, oldest first, then every further one, until it is closed.

        It survives lost connections and continues at its position; Missed marks a gap where that was not
        possible. Close it, with ``contextlib.aclosing``.
        """
        return watch_events(self._service, tuple(kinds), resource, newest, on_lost)


class Queues(_OfControlPlane):
    """Queued and running requests by pool, from the leading scheduler."""

    async def list(
        self, *, tenant: str = "", limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[cp.Queue]:
        """Return the pools, with the shares of one tenant or of all. Raises Unavailable without a leader."""
        return await self._service.pages(
            "ListQueues", "queues", limit=limit, timeout_s=timeout_s, tenant=tenant
        )


class ScalingDecisions(_OfControlPlane):
    """Replicas that follow the load: what was decided, why, and from which figures."""

    async def list(
        self, deployment: str = "", *, limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[cp.DeploymentScaling]:
        """Return the deployments with bounds, or one. Raises NotFound where the named one has none."""
        return await self._service.pages(
            "ListScaling", "deployments", limit=limit, timeout_s=timeout_s, deployment=deployment
        )


class Placements(_OfControlPlane):
    """Placement decisions of requests and the state of the workers, from the leading scheduler."""

    async def explain(
        self, request_id: str, *, timeout_s: float | None = None
    ) -> cp.ExplainPlacementResponse:
        """Return the recorded decisions on the request. Raises Unavailable without a leader."""
        answer: cp.ExplainPlacementResponse = await self._service.call(
            "ExplainPlacement", timeout_s=timeout_s, request_id=request_id
        )
        return answer

    async def timeline(self, request_id: str, *, timeout_s: float | None = None) -> cp.GetTimelineResponse:
        """Return a request over time, with the other members of its steps. Raises NotFound, or Unavailable
        without a leading control plane."""
        answer: cp.GetTimelineResponse = await self._service.call(
            "GetTimeline", timeout_s=timeout_s, request_name=request_id
        )
        return answer

    async def workers(
        self, *, limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[sched.Reporter]:
        """Return the workers that reported to the leader. Raises Unavailable without a leader."""
        return await self._service.pages("ListWorkers", "workers", limit=limit, timeout_s=timeout_s)


ADMIN_OPTIONS: Final = ClientOptions(timeout_s=15.0)


@dataclass(frozen=True, slots=True)
class _Opened:
    loop: asyncio.AbstractEventLoop
    control: Service | None
    registry: Service | None


class _Part(Generic[T]):
    """A property of AdminClient: some of the control plane's calls."""

    def __init__(self, kind: Callable[[Service], T]) -> None:
        self._kind = kind

    def __get__(self, admin: AdminClient, _: object) -> T:
        return self._kind(admin._control())


class AdminClient:
    """Sends each call to a responding server; one that fails or does not answer is skipped for a while.

    It belongs to the event loop in which it was entered; any number of that loop's tasks use it at once.
    Every method has a deadline and raises FairwayError and its subclasses. A change is applied once, however
    often it is sent: each such call has its own request id.
    """

    def __init__(
        self,
        control_planes: str | Sequence[str] = (),
        *,
        admin_key: str = "",
        registry: str | Sequence[str] = (),
        options: ClientOptions = ADMIN_OPTIONS,
        credentials: Credentials = None,
        rng: Random | None = None,
    ) -> None:
        """Addresses are host:port. Without ``control_planes`` only ``models`` can be used; without
        ``registry`` only the rest. ``credentials``: for TLS, or the folder of a certificate, whose files are
        read again after they were replaced; without it the key is sent in clear text.

        Without ``admin_key``, calls carry the token of `fairway login`. Opens no connection yet. Raises
        ValueError for no address, a duplicate, or without key and login.
        """
        Bearer(admin_key, "admin_key")
        self._control_planes = _listed(control_planes)
        self._registries = _listed(registry)
        if not self._control_planes and not self._registries:
            raise ValueError(
                "an AdminClient needs the address of a control plane or a registry, as host:port"
            )
        for addresses in (self._control_planes, self._registries):
            if addresses:
                check_addresses(addresses)
        self._admin_key = admin_key
        self._options = options
        self._credentials = credentials
        self._rng = rng or SystemRandom()
        self._guard = Guard()
        self._opened: _Opened | None = None

    async def __aenter__(self) -> Self:
        """Open the channels. Raises RuntimeError the second time: a client is used once."""
        if self._opened is not None:
            raise RuntimeError("this client was opened before: create a new one")
        self._opened = _Opened(
            asyncio.get_running_loop(),
            self._service(
                self._control_planes, "control plane", controlplane_pb2_grpc.ControlPlaneServiceStub, cp
            ),
            self._service(self._registries, "registry", registry_pb2_grpc.RegistryServiceStub, rg),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every call and watch with Closed, and return once the channels are closed. Idempotent."""
        self._guard.close("the client was closed")
        await self._guard.idle()
        if self._opened is not None:
            for service in (self._opened.control, self._opened.registry):
                if service is not None:
                    await service.core.pool.close()

    async def caller(self, *, timeout_s: float | None = None) -> cp.GetCallerResponse:
        """Return who the control plane takes this client for."""
        found: cp.GetCallerResponse = await self._control().call("GetCaller", timeout_s=timeout_s)
        return found

    tenants = _Part(Tenants)
    keys = _Part(Keys)
    budgets = _Part(Budgets)
    aliases = _Part(Aliases)
    diagnoses = _Part(Diagnoses)
    objectives = _Part(Objectives)
    deployments = _Part(Deployments)
    rollouts = _Part(Rollouts)
    nodes = _Part(Nodes)
    events = _Part(Events)
    scaling = _Part(ScalingDecisions)
    queues = _Part(Queues)
    placements = _Part(Placements)
    quarantine = _Part(Quarantine)
    slis = _Part(Slis)
    audit = _Part(AuditLog)
    usage = _Part(UsageRecords)

    @property
    def models(self) -> Models:
        opened = self._open()
        return Models(opened.registry, opened.control)

    def _service(
        self, addresses: Sequence[str], noun: str, stub_of: Any, messages: ModuleType
    ) -> Service | None:
        if not addresses:
            return None
        core = Core.opened(
            addresses, self._admin_key, self._options, credentials=self._credentials, rng=self._rng, noun=noun
        )
        return Service(core, self._guard, stub_of, messages)

    def _open(self) -> _Opened:
        """Raise RuntimeError outside of ``async with`` and from another event loop, Closed afterwards."""
        self._guard.check()
        if self._opened is None:
            raise RuntimeError("the client is not open: use `async with AdminClient(...) as admin`")
        if asyncio.get_running_loop() is not self._opened.loop:
            raise RuntimeError("a client can only be used in the event loop in which it was opened")
        return self._opened

    def _control(self) -> Service:
        control = self._open().control
        if control is None:
            raise ValueError("this client has no control plane address: set control_planes=")
        return control


def _listed(addresses: str | Sequence[str]) -> Sequence[str]:
    return [addresses] if isinstance(addresses, str) else list(addresses)
