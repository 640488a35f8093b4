"""Checks before an installation starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.fleet.options import UpOptions
from fairway.cli.fleet.roles import check_settings

MIN_FREE_BYTES: Final = 1024**3


def check_disk(folder: Path, *, needed: int = MIN_FREE_BYTES) -> None:
    """Raise CliError when less than ``needed`` bytes are free at ``folder``, which may not exist yet."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CliError(
            "NO_DISK_SPACE",
            f"{free / 1024**2:.0f} MiB are free at {existing}; {needed / 1024**2:.0f} MiB are needed",
            next_step="free some space, or choose another place with --state-dir",
        )


def check_model(options: UpOptions) -> None:
    """Raise CliError when the model folder to deploy is not a checkpoint."""
    folder = options.model_folder
    if not options.deploy or (folder / "config.json").is_file():
        return
    raise CliError(
        "MODEL_MISSING",
        f"{folder} holds no model: there is no config.json",
        next_step="name a checkpoint folder with --model-dir, or start without one with --no-model",
        exit_code=ExitCode.USAGE if options.model_dir else ExitCode.FAILED,
    )


def check(options: UpOptions) -> None:
    """Raise CliError with the first reason that prevents the start."""
    check_disk(Path(options.state_dir))
    check_model(options)
    check_settings(options)
    if options.replicas > options.workers:
        raise CliError(
            "TOO_MANY_REPLICAS",
            f"{options.replicas} replicas need as many workers; there are {options.workers}",
            next_step=f"add --workers {options.replicas}",
            exit_code=ExitCode.USAGE,
        )
