"""A worker tries what gateways read of a version before the version is READY."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.core.errors import FailedPrecondition
from services.core.records import VersionState
from services.gateway.text.child import TextProcessCheck
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from tests.integration.worker.harness import eventually, start_harness, write_model


def edited(folder: Path, name: str, content: object) -> Path:
    write_model(folder)
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("generation_config.json", {"temperature": 1e9}, "temperature"),
        ("tokenizer.json", {}, "tokenizer.json"),
        ("config.json", {"vocab_size": 512}, "max_position_embeddings"),
    ],
)
async def test_what_gateways_cannot_load_is_refused(
    tmp_path: Path, name: str, content: object, fault: str
) -> None:
    clock = SystemClock()
    supervisor = Supervisor(clock)
    try:
        with pytest.raises(FailedPrecondition, match=fault):
            await TextProcessCheck(clock, supervisor).fault(edited(tmp_path / "m", name, content), "sha256:x")
    finally:
        await supervisor.close()


async def test_a_broken_template_is_named_and_the_rest_loads(tmp_path: Path) -> None:
    clock = SystemClock()
    supervisor = Supervisor(clock)
    folder = edited(tmp_path / "m", "tokenizer_config.json", {"chat_template": "{{ messages | absent }}"})
    try:
        assert "absent" in await TextProcessCheck(clock, supervisor).fault(folder, "sha256:x")
    finally:
        await supervisor.close()


@pytest.mark.parametrize(
    ("name", "content", "state", "word"),
    [
        ("generation_config.json", {"temperature": 1e9}, VersionState.FAILED, "temperature"),
        ("tokenizer_config.json", {"chat_template": "{{ 1 | absent }}"}, VersionState.READY, "absent"),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}, VersionState.READY, ""),
    ],
)
async def test_the_state_of_a_version_says_what_gateways_make_of_it(
    tmp_path: Path, name: str, content: object, state: VersionState, word: str
) -> None:
    harness = await start_harness(edited(tmp_path / "m", name, content), assign=False, checks_texts=True)
    try:
        await harness.assign(harness.version)
        await eventually(lambda: harness.state() is state, 30.0)
        message = harness.agent.status().versions[0].record.message
        assert word in message
        assert bool(word) == bool(message)
    finally:
        await harness.close()
