"""Which operators an engine gets, and that both kinds answer alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

from services.worker.engine.load.loading import load
from services.worker.engine.unsupported import BadEngineConfig
from services.worker.engine_protocol import EngineConfig

NEAR = 1e-4


@pytest.fixture(scope="module")
def folder(save_model: Any) -> Path:
    made: Path = save_model("Qwen3", seed=3, head_dim=12)[1]
    return made


@pytest.fixture
def unusable(tmp_path: Path) -> str:
    (tmp_path / "file").touch()
    return str(tmp_path / "file" / "cache")


def test_without_a_cache_torch_takes_over_and_says_why(
    folder: Path, load_engine: Any, submit: Any, drive: Any, unusable: str
) -> None:
    with structlog.testing.capture_logs() as logs:
        engine = load_engine(folder, operators="auto", operators_cache=unusable)
    (line,) = [entry for entry in logs if entry["event"].startswith("operators.")]
    assert line["event"] == "operators.not_built"
    assert "Not a directory" in line["reason"]
    assert drive(engine, [submit(0, [5, 6, 7], 4)]).finished == {0: "length"}


@pytest.mark.usefixtures("homeless")
def test_without_a_home_torch_takes_over_and_says_why(
    folder: Path, load_engine: Any, submit: Any, drive: Any
) -> None:
    with structlog.testing.capture_logs() as logs:
        engine = load_engine(folder, operators="auto", operators_cache="")
    (line,) = [entry for entry in logs if entry["event"].startswith("operators.")]
    assert line["event"] == "operators.not_built"
    assert "home directory" in line["reason"]
    assert drive(engine, [submit(0, [5, 6, 7], 4)]).finished == {0: "length"}
    with pytest.raises(BadEngineConfig, match="home directory"):
        load_engine(folder, operators="native", operators_cache="")


def test_an_agent_is_told_before_and_after_operators_are_made(folder: Path, library_file: Path) -> None:
    config = EngineConfig(
        socket_path="",
        model_dir=str(folder),
        operators_cache=str(library_file.parent),
        kv_blocks=64,
        threads=1,
    )
    told: list[tuple[str, float]] = []
    load(config, lambda phase, ratio: told.append((phase, ratio)))
    assert [ratio for phase, ratio in told if phase == "operators"] == [0.0, 1.0]
    phases = list(dict.fromkeys(phase for phase, _ in told))
    assert phases == ["import", "operators", "weights", "profile", "warm_up", "canary"]


def test_native_means_native(folder: Path, load_engine: Any, unusable: str) -> None:
    with pytest.raises(BadEngineConfig, match="Not a directory"):
        load_engine(folder, operators="native", operators_cache=unusable)


def test_what_cannot_be_exact_says_so(folder: Path, load_engine: Any, unusable: str) -> None:
    with pytest.raises(BadEngineConfig, match="cannot promise mode 'exact'"):
        load_engine(folder, operators="torch", mode="exact")
    with pytest.raises(BadEngineConfig, match="no native operators"):
        load_engine(folder, mode="exact", operators_cache=unusable)


@pytest.mark.parametrize(
    ("dtype", "mode"), [("float32", "exact"), ("bfloat16", "exact"), ("bfloat16", "free")]
)
def test_both_answer_alike(
    folder: Path, load_engine: Any, submit: Any, drive: Any, library_file: Path, dtype: str, mode: str
) -> None:
    answers = []
    for operators, promised in (("native", mode), ("torch", "auto")):
        cache = str(library_file.parent)
        engine = load_engine(
            folder, operators=operators, operators_cache=cache, dtype=dtype, mode=promised, token_budget=8
        )
        answers.append(drive(engine, [submit(i, [9 + i] * (3 + 7 * i), 1, logprobs=3) for i in range(4)]))
    native, torch = answers
    for handle, entries in native.logprobs.items():
        near = NEAR if dtype == "float32" else 0.1
        assert entries[0].top_logprobs == pytest.approx(torch.logprobs[handle][0].top_logprobs, abs=near)
    if dtype == "float32":
        assert native.tokens == torch.tokens


def test_the_number_of_threads_changes_no_bit(
    folder: Path, load_engine: Any, submit: Any, drive: Any, library_file: Path
) -> None:
    """One thread in large chunks and alone, two in small ones and in company."""
    prompt = [3 + i % 90 for i in range(41)]
    others = [submit(i, [7 * i % 101] * (5 * i), 4, logprobs=5) for i in range(1, 4)]
    outcomes = []
    for threads, budget, company in ((1, 64, []), (2, 19, others)):
        engine = load_engine(
            folder,
            operators="native",
            operators_cache=str(library_file.parent),
            threads=threads,
            token_budget=budget,
        )
        outcomes.append(drive(engine, [submit(0, prompt, 5, logprobs=5), *company]))
    alone, crowd = outcomes
    assert alone.tokens[0] == crowd.tokens[0]
    assert alone.logprobs[0] == crowd.logprobs[0]
