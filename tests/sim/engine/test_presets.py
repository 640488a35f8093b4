"""Presets against published rates, each within a stated band.

Published, for a 7B decoder of Llama 2's shape in 16 bits on one A100 80GB: TensorRT-LLM v0.6.1, its
performance.md (first token after 128 and 2,048 tokens; output rate of three mixes at their batch sizes) and
LMDeploy v0.2.0, its a100_fp16.md (one request alone).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.estimates.cost_model import (
    DEVICES,
    LLAMA_3_70B,
    PRESETS,
    CostModel,
    ModelShape,
    derive,
    encode,
    span_tokens,
)
from simulator.engine.cost_model import cost_model

# From the model's own config.json.
LLAMA_2_7B = ModelShape(6.61e9, 0.131e9, layers=32, heads=32, kv_heads=32, head_dim=128)
A100_7B = derive("a100-7b", DEVICES["a100"], LLAMA_2_7B)


def output_rate(model: CostModel, *, batch: int, prompt: int, output: int) -> float:
    """Return output tokens per second of a batch that is prefilled, then decoded, as in the tables."""
    prefill_s = batch * (model.prefill_s(prompt) - model.base_s)
    decode_s = sum(model.step_s(0, batch, batch * (prompt + step)) for step in range(output))
    return batch * output / (prefill_s + decode_s)


@pytest.mark.parametrize(
    ("published", "modelled", "band"),
    [
        (0.133, A100_7B.prefill_s(2048), 0.25),
        (0.016, A100_7B.prefill_s(128), 0.35),  # a time of which launches are much
        (100.0, 1.0 / A100_7B.step_s(0, 1, 64), 0.15),
        (5586.0, output_rate(A100_7B, batch=384, prompt=128, output=128), 0.2),
        (1928.0, output_rate(A100_7B, batch=60, prompt=128, output=2048), 0.2),
        (591.0, output_rate(A100_7B, batch=52, prompt=2048, output=128), 0.25),
    ],
)
def test_the_a100_is_near_what_was_published(published: float, modelled: float, band: float) -> None:
    assert modelled == pytest.approx(published, rel=band)


def test_faster_devices_are_faster() -> None:
    for earlier, later in (("a10", "a100"), ("a100", "h100"), ("h100", "h200")):
        slow, fast = PRESETS[earlier], PRESETS[later]
        assert fast.step_s(0, 64, 64_000) < slow.step_s(0, 64, 64_000)
        assert fast.prefill_s(2048) <= slow.prefill_s(2048)
        assert fast.kv_blocks(16) >= slow.kv_blocks(16)


def test_a_long_prompt_costs_more_per_token() -> None:
    model = PRESETS["h100"]
    assert model.prefill_s(100_000) > 1.5 * 50 * model.prefill_s(2_000)


def test_prefill_beside_few_decodes_is_nearly_free_until_it_computes() -> None:
    model = PRESETS["h100"]
    alone_s = model.step_s(0, 8, 8_000)
    assert model.step_s(100, 8, 8_000) == alone_s
    assert model.step_s(2048, 8, 8_000) > 5 * alone_s


def test_what_is_computed_one_by_one_is_the_span() -> None:
    assert span_tokens(10, 15) == 10 + 11 + 12 + 13 + 14
    assert span_tokens(0, 1) == 0
    assert span_tokens(5, 5) == 0


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="sizes"):
        derive("a10-70b", DEVICES["a10"], LLAMA_3_70B)


@pytest.mark.parametrize("change", [{"base_s": float("nan")}, {"prefill_token_s": -1.0}, {"base_s": 0.0}])
def test_a_model_without_sense_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="times"):
        CostModel(**({"name": "x", "base_s": 0.1, "prefill_token_s": 0.1, "decode_sequence_s": 0.1} | change))  # type: ignore[arg-type]


def test_a_preset_is_a_name_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(encode(PRESETS["a10"]))
    assert cost_model(str(file)) == cost_model("a10")
    with pytest.raises(ValueError, match="neither a preset"):
        cost_model("a11")
    file.write_text("{")
    with pytest.raises(ValueError, match="no cost model"):
        cost_model(str(file))
