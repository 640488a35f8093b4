"""What a scaling gives past max_position_embeddings is served, with the tokens of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from services.worker.engine.load.loading import load
from services.worker.engine_protocol import EngineConfig
from tests.support.engine_oracle import ORIGINAL, Shape, oracle_of, random_ids, save
from tests.support.submits import make_submit

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
OUTPUT = 40


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("yarn", {"rope_scaling": YARN}),
        ("yarn", {"rope_scaling": YARN | {"truncate": None}}),
        ("dynamic", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ],
)
def test_it_is_served_past_max_position_embeddings(
    family: str, kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    shape = Shape(family, 6, 2, 40, kind)
    save(shape, tmp_path, seed=3)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["rope_parameters"]
    fields |= changes | {"rope_theta": 10000.0, "max_position_embeddings": ORIGINAL}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    oracle = oracle_of(shape, model.eval())
    config = EngineConfig("", str(tmp_path), threads=1, kv_memory_bytes=4 * 1024**2)
    engine, ready = load(config, lambda phase, ratio: None)
    assert ready.max_model_len == 4 * ORIGINAL
    prompt = random_ids(5, 2 * ORIGINAL)
    engine.apply(make_submit(7, prompt, OUTPUT, seed=1, temperature=0.0, max_tokens=OUTPUT, ignore_eos=True))
    output: list[int] = []
    while engine.has_work:
        stepped = engine.step()
        output += [
            token for handle, token in zip(stepped.handles, stepped.tokens, strict=True) if handle == 7
        ]
    assert len(output) == OUTPUT
    oracle.judge(prompt, output)
    oracle.check()
