"""The compiled library, once per run, and a compiler that compiles nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.engine.native.build import COMPILERS, Toolchain, build
from services.worker.engine.native.library import Library, loaded_openmp
from services.worker.engine.native.operators import NativeOperators

MakeCompiler = Callable[..., Toolchain]

# A compiler that notes each use; what it makes is its source's text.
COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
case "$1" in --version) echo "fake {version}"; exit 0;; esac
{body}
while [ $# -gt 0 ]; do case "$1" in -o) out="$2"; shift;; esac; shift; done
echo compiled > "$out"
"""


@pytest.fixture
def compiler(tmp_path: Path) -> MakeCompiler:
    """Return a toolchain of one scripted compiler; ``log`` beside it has a line per use."""

    def make(
        body: str = ":", *, version: int = 1, name: str = "compiler", timeout_s: float = 20.0
    ) -> Toolchain:
        script = tmp_path / name
        script.write_text(COMPILER.format(log=tmp_path / "log", version=version, body=body))
        script.chmod(0o755)
        return Toolchain((str(script),), timeout_s=timeout_s)

    return make


@pytest.fixture(scope="session")
def library_file(operators_cache: Path) -> Path:
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("no C++ compiler")
    return build(operators_cache, Toolchain(openmp=loaded_openmp()))


@pytest.fixture(scope="session")
def library(library_file: Path) -> Callable[[torch.dtype], Library]:
    return lambda dtype: Library(library_file, dtype)


@pytest.fixture(scope="session")
def operators(library: Callable[[torch.dtype], Library]) -> Callable[..., NativeOperators]:
    def make(dtype: torch.dtype = torch.float32, *, threads: int = 2, kv_heads: int = 2) -> NativeOperators:
        return NativeOperators(library(dtype), kv_heads=kv_heads, eps=1e-5, threads=threads)

    return make
