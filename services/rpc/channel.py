"""Channels between services: keepalive, message limits, credentials."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import grpc

from fairway.tls import SpiffeId, TlsIdentity
from services.runtime.certificates import Certificates, renewed

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
MAX_CHANNELS: Final = 64
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also the time limit of one connection attempt, at least
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy in the environment is for hosts beyond the fleet, and would receive the internal token.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str, role: str = "", certificates: Certificates | None = None) -> grpc.aio.Channel:
    """Return a channel to host:port. The caller closes it.

    With ``certificates``, the server has to present a certificate of ``role``. Its name is verified and not
    the address, which may be that of another process tomorrow.
    """
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    identity = certificates.current()
    expected = SpiffeId(identity.id.trust_domain, role, "")
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", expected.server_name))
    return grpc.aio.secure_channel(address, channel_credentials(identity), options=options)


def channel_credentials(identity: TlsIdentity) -> grpc.ChannelCredentials:
    """Return credentials of a client. They do not change with the files: the channel is replaced."""
    return grpc.ssl_channel_credentials(identity.roots_pem, identity.key_pem, identity.chain_pem)


class RoleChannel:
    """The channel to a role's process, replaced after this process's certificate was. The owner closes it.

    Calls on the earlier channel run until they end, and its connection ends with the last: a channel that
    nothing refers to is destroyed, which gRPC does to no call that runs.
    """

    def __init__(self, address: str, role: str = "", certificates: Certificates | None = None) -> None:
        self.address = address
        self._channel = renewed(certificates, lambda: open_channel(address, role, certificates))

    def __call__(self) -> grpc.aio.Channel:
        """Return the channel for a call that begins now."""
        return self._channel()

    async def close(self) -> None:
        await self._channel().close()


class RoleChannels:
    """A channel to each of the ``MAX_CHANNELS`` processes that were called last. The owner closes them.

    The channel to any other is dropped, and like one that is replaced it ends with the last of its calls.
    """

    def __init__(self, certificates: Callable[[str], Certificates | None]) -> None:
        """``certificates`` returns those for calls of an address."""
        self._certificates = certificates
        self._channels: OrderedDict[tuple[str, str], RoleChannel] = OrderedDict()

    def __len__(self) -> int:
        return len(self._channels)

    def __call__(self, address: str, role: str) -> RoleChannel:
        """Return the channel for calls that begin now."""
        key = address, role
        if key not in self._channels:
            self._channels[key] = RoleChannel(address, role, self._certificates(address))
        self._channels.move_to_end(key)
        while len(self._channels) > MAX_CHANNELS:
            self._channels.popitem(last=False)
        return self._channels[key]

    async def close(self) -> None:
        while self._channels:
            await self._channels.popitem()[1].close()


def auth_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the call metadata that carries a key or the internal token."""
    return (("authorization", f"Bearer {token}"),)
