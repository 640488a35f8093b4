"""A function whose first number is wrong is named, and the library as it is passes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.engine.native.check import wrong
from services.worker.engine.native.library import Library

Load = Callable[[torch.dtype], Library]
DTYPES = (torch.float32, torch.bfloat16)

# Where each function writes, of its arguments.
WRITES: dict[str, Callable[..., int]] = {
    "pack": lambda source, out, *sizes: out,
    "linear": lambda call: call._obj.out,
    "norm": lambda x, weight, out, *sizes: out,
    "rotate": lambda call: call._obj.x,
    "attend": lambda call: call._obj.out,
    "rule_out": lambda call: call._obj.logits,
}


def spoil(library: Library, name: str) -> None:
    """Four bytes of what the function writes become those of 3, in either type."""
    function, target = getattr(library, name), WRITES[name]

    def spoiled(*arguments: Any) -> Any:
        returned = function(*arguments)
        ctypes.memset(target(*arguments), 0x40, 4)
        return returned

    setattr(library, name, spoiled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_passes(library: Load, dtype: torch.dtype) -> None:
    assert wrong(library(dtype), dtype) == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRITES)
def test_a_function_that_errs_is_named(library: Load, dtype: torch.dtype, name: str) -> None:
    spoiled = library(dtype)
    spoil(spoiled, name)
    assert wrong(spoiled, dtype) == (("linear",) if name == "pack" else (name,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_check_of_weights_that_errs_is_named(library: Load, dtype: torch.dtype) -> None:
    spoiled = library(dtype)
    spoiled.pack = lambda *_arguments: 0
    assert wrong(spoiled, dtype) == ("linear",)
