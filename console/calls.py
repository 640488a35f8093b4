"""Calls of the API with the credential of a person, and the last answers for the time that it is away."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import Message

from console.sign_ins import SignIn
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc, inference_pb2_grpc, options_pb2
from fairway.v1 import inference_pb2 as inference
from services.core.errors import DeadlineExceeded, FairwayError, Unauthenticated, Unavailable
from services.ports.clock import Clock
from services.rpc.channel import RoleChannel, auth_metadata
from services.rpc.interceptors.access import access_table
from services.rpc.status import from_rpc_error

CALL_S: Final = 10.0
DIAGNOSE_S: Final = 60.0
RUN_S: Final = 300.0
MAX_RECENT_BYTES: Final = 32 * 1024**2
MAX_ANSWER_BYTES: Final = 1024**2
_ENTRY_BYTES: Final = 1024  # memory of an entry without its content, rounded up
_SERVICE: Final = cp.DESCRIPTOR.services_by_name["ControlPlaneService"]
_ACCESS: Final = access_table([_SERVICE])


class Api(Protocol):
    """The control plane and the gateways, as a person reaches them. All methods raise FairwayError."""

    async def call(self, credential: str, method: str, request: Message) -> Any:
        """Return the response of a method of the control plane."""
        ...

    async def models(self, credential: str) -> Sequence[str]:
        """Return the names of the models that the credential may use."""
        ...

    def generate(
        self, credential: str, generation: inference.Generation
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        """Yield the events of one generation. Closing it ends the generation."""
        ...


class GrpcApi:
    """Implements ``Api`` by gRPC."""

    def __init__(self, control_plane: grpc.aio.Channel, gateway: Callable[[], RoleChannel]) -> None:
        """``gateway`` returns the channel to a live gateway, and raises Unavailable without any."""
        self._control = controlplane_pb2_grpc.ControlPlaneServiceStub(control_plane)
        self._gateway = gateway

    async def call(self, credential: str, method: str, request: Message) -> Any:
        send = getattr(self._control, method)
        try:
            timeout_s = DIAGNOSE_S if method == "DiagnoseLatency" else CALL_S
            return await send(request, timeout=timeout_s, metadata=auth_metadata(credential))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def models(self, credential: str) -> Sequence[str]:
        stub = inference_pb2_grpc.InferenceServiceStub(self._gateway()())
        metadata = auth_metadata(credential)
        try:
            found = await stub.ListModels(inference.ListModelsRequest(), timeout=CALL_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return sorted({model.name for model in found.models})

    async def generate(
        self, credential: str, generation: inference.Generation
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        stub = inference_pb2_grpc.InferenceServiceStub(self._gateway()())
        request = inference.GenerateRequest(generation=generation)
        call = stub.Generate(request, timeout=RUN_S, metadata=auth_metadata(credential))
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """What a read returned: the message, its age while it is an earlier one, and what went wrong."""

    message: Any = None
    age_s: float = 0.0
    problem: FairwayError | None = None
    is_cut: bool = False  # whether there are more items than the console lists


@dataclass(frozen=True, slots=True)
class _Recent:
    message: Message
    size_bytes: int
    time_s: float


class RecentAnswers:
    """Reads with a fallback to the last answer to the same person, for the time that nothing answers.

    An answer is found only by the sign-in that received it, and never after a refusal: access does not
    outlive the role. The oldest answers are dropped beyond ``MAX_RECENT_BYTES``.
    """

    def __init__(self, api: Api, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._recent: OrderedDict[tuple[str, str, bytes], _Recent] = OrderedDict()
        self._size_bytes = 0

    async def read(self, owner: SignIn, method: str, **fields: Any) -> ReadAnswer:
        """Return the answer, or the last one with its age. Raises Unauthenticated."""
        request = getattr(cp, f"{method}Request")(**fields)
        key = owner.name, method, request.SerializeToString(deterministic=True)
        try:
            message = await self._api.call(owner.credential, method, request)
        except Unauthenticated:
            self.forget(owner.name)
            raise
        except (Unavailable, DeadlineExceeded) as error:
            last = self._recent.get(key)
            if last is None:
                return ReadAnswer(problem=error)
            return ReadAnswer(last.message, self._clock.monotonic_s() - last.time_s, error)
        except FairwayError as error:
            self._drop(key)
            return ReadAnswer(problem=error)
        if owner.is_open:  # It may have ended while the call ran, by another request too.
            self._keep(key, message)
        return ReadAnswer(message)

    def forget(self, owner: str) -> None:
        """Drop the answers to one sign-in."""
        for key in [key for key in self._recent if key[0] == owner]:
            self._drop(key)

    def check_integrity(self) -> None:
        assert self._size_bytes == sum(each.size_bytes for each in self._recent.values()) <= MAX_RECENT_BYTES

    def _keep(self, key: tuple[str, str, bytes], message: Message) -> None:
        self._drop(key)
        size_bytes = message.ByteSize() + len(key[2]) + _ENTRY_BYTES
        if size_bytes > MAX_ANSWER_BYTES:
            return
        self._recent[key] = _Recent(message, size_bytes, self._clock.monotonic_s())
        self._size_bytes += size_bytes
        while self._size_bytes > MAX_RECENT_BYTES:
            self._drop(next(iter(self._recent)))

    def _drop(self, key: tuple[str, str, bytes]) -> None:
        found = self._recent.pop(key, None)
        if found is not None:
            self._size_bytes -= found.size_bytes


def may_call(role: cp.KeyRole.ValueType, method: str) -> bool:
    """Return whether the access rule of a method of the control plane has a role of GetCaller."""
    name = cp.KeyRole.Name(role).removeprefix("KEY_ROLE_")
    return options_pb2.Access.Value(f"ACCESS_{name}") in _ACCESS[f"/{_SERVICE.full_name}/{method}"]
