"""A worker without vLLM's environment names the command, and starts the engine once it is there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fairway.engines.environment import Installed, mark
from services.core.errors import EngineNotInstalled
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker.engine_protocol import EngineConfig
from services.worker.slots.engine_process import EngineEvents, EngineExit, EngineTimeouts, process_launcher
from tests.support.waiting import until


@pytest.mark.parametrize(("executor", "process"), [("vllm", "engine"), ("vllm_rows", "batcher")])
async def test_without_vllm_it_fails_by_name_and_is_tried_again(
    tmp_path: Path, executor: Any, process: str
) -> None:
    clock = SystemClock()
    folder, exits = tmp_path / "vllm", list[EngineExit]()
    launch = process_launcher(clock, Supervisor(clock), EngineTimeouts(), vllm_dir=folder)
    config = EngineConfig(socket_path="", model_dir=str(tmp_path), executor=executor)
    events = EngineEvents(on_ready=lambda _: None, on_exit=exits.append)
    for _ in range(2):
        with pytest.raises(EngineNotInstalled, match="run `fairway engines install vllm`") as refused:
            await launch(config, events).start()
        assert refused.value.reason == "ENGINE_NOT_INSTALLED"
        (folder / "bin").mkdir(parents=True, exist_ok=True)  # half of an environment is none
    recorded = tmp_path / "recorded"
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nenv > {recorded}; echo "$@" >> {recorded}\n')
    python.chmod(0o755)
    mark(folder, Installed("vllm", "0", "cpu", ""))
    await launch(config, events).start()
    await until(lambda: bool(exits))
    lines = recorded.read_text().splitlines()
    assert f"-P -m services.worker.{process}.process --config" in lines[-1]
    found = dict(line.split("=", 1) for line in lines if line.startswith("PYTHON"))
    assert found == {"PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONNOUSERSITE": "1"}
    assert sys.prefix not in found["PYTHONPATH"]
