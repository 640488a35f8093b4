"""The client for operators' scripts: the functions of the command line, in Python.

    async with AdminClient(["10.0.0.1:9090", "10.0.0.2:9090"], admin_key=key) as admin:
        await admin.deployments.scale("chat", 4)
        await admin.deployments.wait_ready("chat")

Arguments and results are the messages of ``fairway.v1``, unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from random import Random, SystemRandom
from types import ModuleType, TracebackType
from typing import Any, Final, Self

import grpc

from fairway.client.admin.calls import Service
from fairway.client.admin.models import Models
from fairway.client.admin.reliability import Quarantine, Slis
from fairway.client.admin.resources import Budgets, Deployments, Keys, Nodes, Objectives, Rollouts, Tenants
from fairway.client.admin.usage import UsageRecords
from fairway.client.admin.watch import Missed, OnLost, watch_events
from fairway.client.attempts import Core
from fairway.client.endpoints import check_addresses
from fairway.client.guard import Guard
from fairway.client.values import ClientOptions
from fairway.v1 import controlplane_pb2, controlplane_pb2_grpc, registry_pb2, registry_pb2_grpc
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import scheduler_pb2 as sched

Kinds = Sequence[cp.ResourceKind.ValueType]
_NEWEST: Final = 20


class Events:
    """The fleet's events, retained for about an hour."""

    def __init__(self, service: Service) -> None:
        self._service = service

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


class Queues:
    """Queued and running requests by pool, from the leading scheduler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(
        self, *, tenant: str = "", limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[cp.Queue]:
        """Return the pools, with the shares of one tenant or of all. Raises Unavailable without a leader."""
        return await self._service.pages(
            "ListQueues", "queues", limit=limit, timeout_s=timeout_s, tenant=tenant
        )


class Placements:
    """Placement decisions of requests and the state of the workers, from the leading scheduler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def explain(
        self, request_id: str, *, timeout_s: float | None = None
    ) -> cp.ExplainPlacementResponse:
        """Return the recorded decisions on the request. Raises Unavailable without a leader."""
        answer: cp.ExplainPlacementResponse = await self._service.call(
            "ExplainPlacement", timeout_s=timeout_s, request_id=request_id
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
        admin_key: str,
        registry: str | Sequence[str] = (),
        options: ClientOptions = ADMIN_OPTIONS,
        credentials: grpc.ChannelCredentials | None = None,
        rng: Random | None = None,
    ) -> None:
        """Addresses are host:port. Without ``control_planes`` only ``models`` can be used; without
        ``registry`` only the rest. ``credentials``: for TLS; without it the key is sent in clear text.

        Opens no connection yet. Raises ValueError for no address, a duplicate, or an empty key.
        """
        if not admin_key:
            raise ValueError("admin_key is empty")
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
                self._control_planes,
                "control plane",
                controlplane_pb2_grpc.ControlPlaneServiceStub,
                controlplane_pb2,
            ),
            self._service(self._registries, "registry", registry_pb2_grpc.RegistryServiceStub, registry_pb2),
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

    @property
    def tenants(self) -> Tenants:
        return Tenants(self._control())

    @property
    def keys(self) -> Keys:
        return Keys(self._control())

    @property
    def budgets(self) -> Budgets:
        return Budgets(self._control())

    @property
    def objectives(self) -> Objectives:
        return Objectives(self._control())

    @property
    def deployments(self) -> Deployments:
        return Deployments(self._control())

    @property
    def rollouts(self) -> Rollouts:
        return Rollouts(self._control())

    @property
    def nodes(self) -> Nodes:
        return Nodes(self._control())

    @property
    def events(self) -> Events:
        return Events(self._control())

    @property
    def queues(self) -> Queues:
        return Queues(self._control())

    @property
    def placements(self) -> Placements:
        return Placements(self._control())

    @property
    def quarantine(self) -> Quarantine:
        return Quarantine(self._control())

    @property
    def slis(self) -> Slis:
        return Slis(self._control())

    @property
    def usage(self) -> UsageRecords:
        return UsageRecords(self._control())

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
            addresses,
            self._admin_key,
            self._options,
            credentials=self._credentials,
            rng=self._rng,
            noun=noun,
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
