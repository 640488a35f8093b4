"""Install the peers of the batching benchmark: ``make bench-batching-peers``, minutes each.

Each gets a virtual environment of its own. pytriton carries Triton, whose Python backend runs under the
interpreter that Debian 12 calls /usr/bin/python3, with NumPy 1.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.engines.peers.catalog import INSTALLED
from bench.engines.peers.install import install_cpu_torch
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


def python_of(folder: Path, name: str) -> Path:
    return folder / name / "bin" / "python"


def is_installed(folder: Path, name: str) -> bool:
    """Whether the environment holds the version that is compared with."""
    stamp = folder / name / INSTALLED
    return stamp.exists() and stamp.read_text() == ENVIRONMENTS[name].stamp


def install(name: str, folder: Path) -> None:
    """The environment below ``folder`` is whole; one that is whole already is left alone."""
    environment, there = ENVIRONMENTS[name], folder / name
    if is_installed(folder, name):
        print(f"{name}: {environment.packages[0]} is installed")
        return
    shutil.rmtree(there, ignore_errors=True)
    there.parent.mkdir(parents=True, exist_ok=True)
    print(f"{name}: installing {environment.packages[0]}", flush=True)
    subprocess.run([environment.python, "-m", "venv", str(there)], check=True)
    python = str(python_of(folder, name))
    install_cpu_torch(python)
    pip(python, ["install", *environment.packages])
    (there / INSTALLED).write_text(environment.stamp)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("names", nargs="*", choices=[[], *ENVIRONMENTS], default=[])
    options = parser.parse_args()
    failed = []
    for name in options.names or ENVIRONMENTS:
        try:
            install(name, options.folder.resolve())
        except (subprocess.CalledProcessError, SystemExit, OSError) as error:
            failed.append(name)
            print(f"{name}: not installed: {error}")
    if failed:
        raise SystemExit(f"not installed: {', '.join(failed)}; the benchmark names them as missing")


if __name__ == "__main__":
    main()
