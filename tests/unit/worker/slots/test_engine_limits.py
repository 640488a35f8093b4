from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fairway.formats.limits import EngineLimits
from services.core.errors import FailedPrecondition
from services.worker.engine_protocol import EngineConfig
from services.worker.slots.version_files import limited, read_limits

CONFIG = EngineConfig("", "", token_budget=512, max_sequences=64)


def test_a_version_without_limits_has_its_workers(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == EngineLimits()
    assert limited(CONFIG, EngineLimits()) == CONFIG


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (EngineLimits(max_context_tokens=128), (512, 64, 128)),
        (EngineLimits(max_sequences=8), (512, 8, 0)),
        (EngineLimits(max_sequences=1000, token_budget=10_000), (512, 64, 0)),
        (EngineLimits(token_budget=32), (32, 32, 0)),
    ],
)
def test_the_smaller_of_both_counts(limits: EngineLimits, expected: tuple[int, int, int]) -> None:
    config = limited(CONFIG, limits)
    assert (config.token_budget, config.max_sequences, config.max_model_len) == expected


@pytest.mark.parametrize(("own", "file", "manifest", "expected"), [(0, 9, 5, 5), (3, 9, 5, 3), (0, 0, 7, 7)])
def test_the_smallest_context_counts(own: int, file: int, manifest: int, expected: int) -> None:
    config = EngineConfig("", "", max_model_len=own)
    limits = EngineLimits(max_context_tokens=file)
    assert limited(config, limits, max_context_tokens=manifest).max_model_len == expected


def test_a_version_has_settings_of_its_own() -> None:
    config = msgspec.structs.replace(CONFIG, speculation="draft", draft_model_dir="draft")
    assert limited(config, EngineLimits()) == config
    found = limited(config, EngineLimits(speculation="off", prefix_cache=False))
    assert (found.speculation, found.draft_model_dir, found.prefix_cache) == ("off", "", False)
    found = limited(CONFIG, EngineLimits(speculation="prompt_lookup", prefix_cache=True))
    assert (found.speculation, found.prefix_cache) == ("prompt_lookup", True)


@pytest.mark.parametrize(
    "body", [b'{"speculation": "draft"}', b"{", b'{"max_sequences": -1}', b'{"unknown": 1}']
)
def test_limits_that_cannot_be_read_stop_the_load(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "engine_limits.json").write_bytes(body)
    with pytest.raises(FailedPrecondition, match=r"engine_limits\.json"):
        read_limits(tmp_path)
