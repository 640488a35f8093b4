"""The compiled library, once per run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.engine.native.build import COMPILERS, Toolchain, build
from services.worker.engine.native.library import Library, loaded_openmp
from services.worker.engine.native.operators import NativeOperators


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
