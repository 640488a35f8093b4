"""Publication of a model folder, with errors of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from fairway.cli.calls import admin_error
from fairway.cli.errors import CliError
from fairway.client import AdminClient, FairwayError
from fairway.client.publish.publish import Published, PublishProgress, PublishRefused

VERB: Final = {"hash": "hashing", "upload": "uploading", "create": "registering", "done": "registered"}


async def publish_folder(
    admin: AdminClient,
    folder: Path,
    model: str,
    tag: str,
    *,
    report: Callable[[PublishProgress], None],
    for_another_engine: bool = False,
) -> Published:
    """Publish a checkpoint folder, point ``tag`` at it unless empty, and return the result.

    Raises CliError.
    """
    try:
        return await admin.models.publish(
            folder, model, tag, progress=report, for_another_engine=for_another_engine
        )
    except FairwayError as exc:
        raise admin_error(exc, what=f"cannot publish {folder}") from exc
    except PublishRefused as exc:
        raise CliError("FOLDER_REFUSED", f"cannot publish {folder}: {exc}", next_step=exc.next_step) from exc
    except OSError as exc:
        raise CliError(
            "FOLDER_UNREADABLE",
            f"cannot publish {folder}: {exc}",
            next_step="name a folder whose files you may read",
        ) from exc
