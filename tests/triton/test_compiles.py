"""The kernels compile for a Hopper, into what its registers and shared memory hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.tidy.sources import ROOT

pytestmark = pytest.mark.timeout(900)

SHARED_BYTES = 227 * 1024  # what a program of compute capability 9.0 may take


def test_kernels_compile_without_spilling() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton.compiled"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 33
    for entry in found:
        assert entry["spilled"] == 0, entry
        assert 0 < entry["registers"] <= 255, entry
        assert entry["shared"] <= SHARED_BYTES, entry
        if entry["dtype"] == "bfloat16" and entry["kernel"] in ("prefill", "decode_pieces", "product"):
            assert entry["tensor_cores"], entry
