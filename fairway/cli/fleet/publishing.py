"""The client's publisher, with its errors as the command line's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc

from fairway.cli.calls import to_cli_error
from fairway.cli.errors import CliError
from fairway.client.publish import Published, PublishProgress, PublishRefused, publish

VERB: Final = {"hash": "hashing", "upload": "uploading", "create": "registering", "done": "registered"}


async def publish_folder(
    channel: grpc.aio.Channel,
    folder: Path,
    model: str,
    tag: str,
    *,
    admin: tuple[tuple[str, str], ...],
    report: Callable[[PublishProgress], None],
) -> Published:
    """Publish a checkpoint folder, point ``tag`` at it unless that is empty, and return what became of it.

    Raises CliError.
    """
    try:
        return await publish(channel, folder, model, tag, report, metadata=admin)
    except grpc.aio.AioRpcError as exc:
        raise to_cli_error(exc, what=f"cannot publish {folder}") from exc
    except PublishRefused as exc:
        raise CliError("FOLDER_REFUSED", f"cannot publish {folder}: {exc}", next_step=exc.next_step) from exc
    except OSError as exc:
        raise CliError(
            "FOLDER_UNREADABLE",
            f"cannot publish {folder}: {exc}",
            next_step="name a folder whose files you may read",
        ) from exc
