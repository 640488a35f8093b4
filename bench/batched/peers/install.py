"""Install the peers of the batching benchmark: ``make bench-batching-peers``, minutes each.

Each gets a virtual environment of its own. pytriton carries Triton, whose Python backend runs under the
interpreter that Debian 12 calls /usr/bin/python3, with NumPy 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bench.engines.peers.catalog import has_stamp
from bench.engines.peers.install import install, install_cpu_torch, install_each
from scripts.setup_env import pip

MODEL_CODE: Final = ("msgspec", "safetensors", "structlog")  # what our model code imports
FOLDER: Final = Path(".fairway", "bench", "peers-batching")


@dataclass(frozen=True, slots=True)
class Environment:
    """``packages``: what pip is asked for; the first is what the benchmark compares with."""

    python: str
    packages: tuple[str, ...]

    @property
    def stamp(self) -> str:
        return " ".join(self.packages)


ENVIRONMENTS: Final[Mapping[str, Environment]] = {
    "triton": Environment("/usr/bin/python3", ("nvidia-pytriton==0.7.0", "numpy<2", *MODEL_CODE)),
    "litserve": Environment(sys.executable, ("litserve==0.2.19", *MODEL_CODE)),
    "ray_serve": Environment(sys.executable, ("ray[serve]==2.60.0", *MODEL_CODE)),
}


def is_installed(folder: Path, name: str) -> bool:
    """Whether the environment holds the version that is compared with."""
    return has_stamp(folder / name, ENVIRONMENTS[name].stamp)


def install_peer(environment: Environment, there: Path) -> None:
    def fill(python: str, _: Path) -> None:
        install_cpu_torch(python)
        pip(python, ["install", *environment.packages])

    install(there, environment.stamp, fill, interpreter=environment.python)


def main() -> None:
    installers = {name: partial(install_peer, each) for name, each in ENVIRONMENTS.items()}
    install_each(__doc__.partition("\n")[0], FOLDER, installers)


if __name__ == "__main__":
    main()
