"""The TypeScript client by Node against a whole installation: ``make typescript-test``, which builds it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.stack import ROOT, Stack

CLIENT = ROOT / "clients" / "typescript"


def test_the_typescript_client(tmp_path: Path, installations: None) -> None:
    if not (CLIENT / "dist" / "test").is_dir():
        pytest.fail("the TypeScript client is not built: run `make typescript-test`")
    with Stack.started(tmp_path / "state", workers=1, replicas=1) as stack:
        settings = {
            "FAIRWAY_TEST_HTTP": stack.http,
            "FAIRWAY_TEST_GRPC": f"http://{stack.endpoints['grpc']}",
            "FAIRWAY_TEST_KEY": stack.api_key,
            "FAIRWAY_TEST_MODEL": stack.model,
        }
        environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **settings}
        done = subprocess.run(
            ["npm", "test"],
            cwd=CLIENT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
