"""`fairway calibrate` as it is called: what is missing is said, with what to do next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.engine.calibrate import main


def endpoints(folder: Path, **changes: object) -> Path:
    content = {
        "http": "127.0.0.1:9",  # nobody listens there
        "api_key": "key",
        "model": "tiny",
        "metrics": {"worker-0": "127.0.0.1:9", "gateway-0": "127.0.0.1:9"},
    } | changes
    file = folder / "endpoints.json"
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("changes", "arguments", "word"),
    [
        ({}, [], "does not answer"),
        ({"metrics": {"worker-0": "a:1", "worker-1": "b:1"}}, [], "worker-0, worker-1"),
        ({}, ["--worker", "worker-7"], "--worker: worker-0"),
        ({"metrics": 5}, [], "no endpoints.json"),
        ({}, ["--like", "a11"], "neither a preset"),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    arguments: list[str],
    word: str,
) -> None:
    output = tmp_path / "model.json"
    file = endpoints(tmp_path, **changes)
    assert main(["--endpoints", str(file), "--output", str(output), *arguments]) == 1
    assert word in capsys.readouterr().err
    assert not output.exists()


def test_without_an_installation_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--endpoints", str(tmp_path / "none.json")]) == 1
    assert "fairway up" in capsys.readouterr().err
