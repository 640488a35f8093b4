"""A window of requests is replayed at the prices that it states; what cannot be read is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.lab.window import main


def window(runs: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    prices = [0.01, 5e-5, 1e-4, 0.0]
    return {"metric": "ttft", "quantile": 0.95, "prices": prices, "slots": 4, "runs": runs, **fields}


def run(name: str, *, prompt: int = 100, workers: tuple[float, ...] = (1.0, 1.0)) -> dict[str, Any]:
    requests = [
        {"at_s": number * 0.2, "tenant": f"t{number % 3}", "prompt": prompt, "output": 8, "prefix": 0}
        for number in range(100)
    ]
    return {"name": name, "workers": list(workers), "requests": requests}


def test_prompts_and_workers_decide_the_quantile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "window.json"
    runs = [run("as it was", prompt=1600), run("short"), run("slow", workers=(3.0, 3.0))]
    path.write_text(json.dumps(window(runs)))
    assert main([str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.01 < found["short"] < 0.05
    assert found["as it was"] > found["short"] + 0.05
    assert found["slow"] > 2 * found["short"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no window"),
        (json.dumps(window([])), "has 0 runs"),
        (json.dumps(window([run("x", workers=())])), "has 0 workers"),
        (json.dumps(window([{**run("x"), "requests": []}])), "has 0 requests"),
    ],
)
def test_what_is_no_window_is_refused(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "window.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert why in capsys.readouterr().err
    assert main([]) == 2
    assert main([str(tmp_path / "missing.json")]) == 2
