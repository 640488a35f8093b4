"""Channels between services: keepalive, message limits, credentials."""

from __future__ import annotations

from typing import Final

import grpc

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
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


def open_channel(address: str) -> grpc.aio.Channel:
    """Return a channel to host:port. The caller closes it."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def auth_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the call metadata that carries a key or the internal token."""
    return (("authorization", f"Bearer {token}"),)
