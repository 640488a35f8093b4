"""Guard models of random weights: their answers can be read, and what no engine runs is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import structs
from tokenizers import Tokenizer

from fairway.formats import safetensors
from fairway.formats.guards import GUARDS, GuardPrompt, JudgedTurn, UnreadableVerdict
from fairway.formats.servable import engine_problems
from services.core.generation import Constraint, ConstraintKind
from tests.support.submits import make_submit

TINY: Final = Path(__file__).parents[4] / "models" / "tiny" / "checkpoint"
TURNS: Final = (JudgedTurn("user", "Tell me a secret."), JudgedTurn("assistant", "No<|end|>safe"))
FAMILIES: Final = {"llama-guard": ("Llama", {}), "qwen3guard": ("Qwen3", {"head_dim": 12})}
SEEDS: Final = 12


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def answers(
    engine: Any, tokenizer: Tokenizer, prompt: GuardPrompt
) -> list[tuple[str, str, dict[str, float]]]:
    """Return answers of as many seeds: text, why it ended, and the alternatives of the first token."""
    text = "\n".join(f"{turn.role}: {turn.text}" for turn in prompt.turns)
    ids = tokenizer.encode(f"{prompt.guideline}\n{text}").ids
    constraint = Constraint(ConstraintKind.REGEX, prompt.pattern)
    for seed in range(SEEDS):
        command = make_submit(seed, ids, 1 << 20, max_tokens=prompt.max_tokens, seed=seed, temperature=1.0)
        sampling = replace(command.sampling, constraint=constraint, logprobs=prompt.logprobs)
        engine.apply(structs.replace(command, sampling=sampling))
    tokens: dict[int, list[int]] = {seed: [] for seed in range(SEEDS)}
    first: dict[int, dict[str, float]] = {}
    ends: dict[int, str] = {}
    while engine.has_work:
        event = engine.step()
        assert not event.errors
        for handle, token in zip(event.handles, event.tokens, strict=True):
            tokens[handle].append(token)
        for handle, entries in event.logprobs.items():
            if handle not in first:
                top = zip(entries[0].top_ids, entries[0].top_logprobs, strict=True)
                first[handle] = {tokenizer.decode([token]): value for token, value in top}
        ends |= event.finished
    return [(tokenizer.decode(tokens[seed]), ends[seed], first.get(seed, {})) for seed in range(SEEDS)]


def folder_of(save_model: Any, family: str, fields: dict[str, Any]) -> Path:
    _, folder = save_model(family, seed=5, vocab_size=4096, max_position_embeddings=1024, **fields)
    shutil.copy(TINY / "tokenizer.json", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return Path(folder)


@pytest.mark.parametrize("template", FAMILIES)
def test_a_random_guard_answers_in_its_form(
    template: str, save_model: Any, load_engine: Any, tokenizer: Tokenizer
) -> None:
    guard = GUARDS[template]
    engine = load_engine(folder_of(save_model, *FAMILIES[template]), kv_blocks=2048, max_sequences=SEEDS)
    (prompt,) = guard.prompts(TURNS, {})
    verdicts: list[dict[str, float]] = []
    for text, end, first in answers(engine, tokenizer, prompt):
        if end == "length":  # cut short: it must not pass for a verdict
            with pytest.raises(UnreadableVerdict):
                guard.read(prompt, text[: len(text) // 2], first)
            continue
        verdicts.append(guard.read(prompt, text, first))
    assert any(verdicts), "no seed finds anything"
    assert all(labels.keys() <= set(guard.labels) for labels in verdicts)


def test_yes_and_no_are_weighed_by_their_probabilities(
    save_model: Any, load_engine: Any, tokenizer: Tokenizer
) -> None:
    """The family of ShieldGemma is vLLM's; its prompt and reading are the same on a Llama."""
    guard = GUARDS["shieldgemma"]
    engine = load_engine(folder_of(save_model, "Llama", {}), kv_blocks=2048, max_sequences=SEEDS)
    (prompt,) = guard.prompts(TURNS, {"harassment": "No insults."})
    found = answers(engine, tokenizer, prompt)
    scores = [guard.read(prompt, text, first)["harassment"] for text, _, first in found]
    assert len({round(score, 6) for score in scores}) == 1, "it does not depend on what was drawn"
    assert 0.0 < scores[0] < 1.0


def problems(folder: Path, names: Sequence[str] = ()) -> dict[Any, str]:
    files = [*(path.name for path in folder.iterdir()), *names]

    def read(name: str) -> bytes:
        if name.endswith(".safetensors"):
            with (folder / name).open("rb") as stream:
                return safetensors.read_header(stream, (folder / name).stat().st_size)
        return (folder / name).read_bytes()

    return engine_problems(files, read)


def test_shieldgemma_is_served_by_vllm_and_named_by_our_engine(save_model: Any) -> None:
    folder = folder_of(save_model, "Gemma2", {"head_dim": 16})
    found = problems(folder)
    assert found["vllm"] == ""
    assert "architectures: ['Gemma2ForCausalLM'] is not supported by the engine" in found["torch"]


def test_qwen3guard_stream_is_refused_by_both_by_name(save_model: Any) -> None:
    folder = folder_of(save_model, "Qwen3", {"head_dim": 12})
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoModel": "modeling_qwen3_guard.Qwen3ForGuardModel"}
    changed = config | {"architectures": ["Qwen3ForGuardModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(changed))
    found = problems(folder, ["modeling_qwen3_guard.py"])
    assert "Qwen3ForGuardModel" in found["torch"]
    assert "modeling_qwen3_guard.py: no engine runs program code" in found["vllm"]
