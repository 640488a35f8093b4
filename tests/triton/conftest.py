"""Runs the kernels without a GPU: Triton's interpreter has to be chosen before the kernels are imported."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter's own: NumPy 2.4 makes an error of it, which is why it needs an older one.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
