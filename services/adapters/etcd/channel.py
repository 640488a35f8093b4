"""A connection to an etcd cluster: its addresses, stubs and error mapping."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
from aetcd import rpc

from services.core.errors import InvalidInput, StorageFull, StoreUnavailable
from services.ports.store import Compacted, LeaseLost
from services.rpc.channel import channel_credentials
from services.runtime.certificates import Certificates, renewed

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_TRANSPORT: Final = re.compile("^https?://")
NEEDS_LEADER: Final = (("hasleader", "true"),)  # a member cut off from its cluster ends the stream
_OPTIONS: Final = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # also the time limit of one connection attempt
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def targets(endpoints: Sequence[str]) -> tuple[str, ...]:
    """Return the gRPC targets for endpoints: one for all literal addresses, else one per name or socket.

    An endpoint is ``host:port`` or ``unix:/PATH``, a path without commas. With TLS (``https://``) each is a
    target, since the name or address of each is verified.

    Raises InvalidInput for an endpoint that is not one.
    """
    if not endpoints:
        raise InvalidInput("no etcd endpoint is configured", field="endpoints")
    addresses = [_TRANSPORT.sub("", endpoint).rstrip("/") for endpoint in endpoints]
    kinds = {_kind(address) for address in addresses}
    if is_secured(endpoints):
        return tuple(f"dns:///{address}" for address in addresses)
    if kinds == {"ipv4"} or kinds == {"ipv6"}:
        return (f"{kinds.pop()}:{','.join(addresses)}",)
    return tuple(a if _kind(a) == "unix" else f"dns:///{a}" for a in addresses)


def is_secured(endpoints: Sequence[str]) -> bool:
    """Whether etcd is reached over TLS. Raises InvalidInput if some members are and others are not."""
    secured = {endpoint.startswith("https://") for endpoint in endpoints}
    if len(secured) > 1:
        raise InvalidInput("etcd's endpoints are all https:// or none of them is", field="endpoints")
    return secured == {True}


def _kind(address: str) -> str:
    if address.startswith("unix:/"):
        return "unix"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in host:
        raise InvalidInput(f"not an etcd endpoint of the form host:port: {address}", field="endpoints")
    try:
        return f"ipv{ipaddress.ip_address(host.strip('[]')).version}"
    except ValueError:
        return "name"


@dataclass(frozen=True, slots=True)
class Stubs:
    """A channel with its stubs. They are untyped: they are generated without type stubs."""

    channel: grpc.aio.Channel
    kv: Any
    lease: Any
    watch: Any
    maintenance: Any


class EtcdChannel:
    """One gRPC channel over all literal addresses, or one per host name; a failure selects the next name.

    With ``certificates``, which https:// needs, channels are replaced after the certificate was. Watches on
    the earlier ones go on until they end.
    """

    def __init__(self, endpoints: Sequence[str], certificates: Certificates | None = None) -> None:
        self._targets = targets(endpoints)
        self._certificates = certificates if is_secured(endpoints) else None
        if is_secured(endpoints) and certificates is None:
            raise InvalidInput("etcd's https:// endpoints need FAIRWAY_TLS_DIR", field="endpoints")
        self._current = 0
        self.members = len(endpoints)
        self._names = renewed(self._certificates, self._open)

    def _open(self) -> list[Stubs]:
        if self._certificates is None:
            return [_stubs(grpc.aio.insecure_channel(t, options=_OPTIONS)) for t in self._targets]
        credentials = channel_credentials(self._certificates.current())
        return [_stubs(grpc.aio.secure_channel(t, credentials, options=_OPTIONS)) for t in self._targets]

    @contextmanager
    def stubs(self) -> Iterator[Stubs]:
        """Yield the stubs to use. A gRPC error inside the block becomes an error of the store port."""
        used = self._current
        try:
            yield self._names()[used]
        except grpc.aio.AioRpcError as error:
            mapped = domain_error(error)
            if isinstance(mapped, StoreUnavailable):
                self._leave(used)
            raise mapped from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC reports this when the channel is closed during a call. The caller was not cancelled.
            raise StoreUnavailable("the connection to etcd was closed") from None
        except grpc.aio.UsageError as error:
            raise StoreUnavailable("the connection to etcd was closed") from error
        except StoreUnavailable:
            self._leave(used)
            raise

    async def unary(self, method: Callable[[Stubs], Any], request: Any, timeout_s: float) -> Any:
        """Return the response to one call. Raises within ``timeout_s``."""
        with self.stubs() as stubs:
            answer: Awaitable[Any] = method(stubs)(request, timeout=max(timeout_s, 0.001))
            return await answer

    async def close(self) -> None:
        for stubs in self._names():
            await stubs.channel.close()

    def _leave(self, used: int) -> None:
        """Select the next name, once for all calls that failed on the same one."""
        if self._current == used:
            self._current = (used + 1) % len(self._targets)


def domain_error(error: grpc.aio.AioRpcError) -> Exception:
    """Return the domain error for an etcd status.

    Texts differ between versions: only that of a full store is read.
    """
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND:
        return LeaseLost(details)
    if code is grpc.StatusCode.OUT_OF_RANGE:
        return Compacted(details)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidInput(f"etcd refused the request: {details}", field="operations")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "space" in details:
        return StorageFull("etcd has reached its quota and takes no writes", retry_after_s=10.0)
    return StoreUnavailable(f"etcd did not answer: {code.name}", retry_after_s=1.0, code=code.name)


def _stubs(channel: grpc.aio.Channel) -> Stubs:
    return Stubs(
        channel=channel,
        kv=rpc.KVStub(channel),
        lease=rpc.LeaseStub(channel),
        watch=rpc.WatchStub(channel),
        maintenance=rpc.MaintenanceStub(channel),
    )
