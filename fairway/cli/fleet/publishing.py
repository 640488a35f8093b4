"""The client's publisher, with the progress as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc


async def publish_folder(
    channel: grpc.aio.Channel,
    folder: Path,
    model: str,
    tag: str,
    *,
    admin: tuple[tuple[str, str], ...],
    report: Callable[[str], None],
) -> str:
    """Publish a checkpoint folder, point ``tag`` at it and return the version's digest."""
    raise NotImplementedError
