"""Scores of a version's probe: those of its formula, the same bits in any company, and none unless asked."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file
from tokenizers import Tokenizer

from models.safety.made_texts import make_texts, source_lines
from services.worker.engine.execute.probe import CERTAIN, SafetyProbe, scores_of
from services.worker.engine.sample.sampler import TORCH
from services.worker.engine.unsupported import BadCheckpoint
from services.worker.engine_protocol import Submit

MODELS = Path(__file__).parents[4] / "models"
RNG = random.Random(7)
HIDDEN = 48
PROMPTS = [[RNG.randrange(3, 101) for _ in range(length)] for length in (1, 31, 16, 17, 40, 7)]
REPEATED = [5, 6, 7, 8] * 8


def add_probe(folder: Path, *, seed: int = 1, categories: int = 3, **changes: Any) -> dict[str, torch.Tensor]:
    """Write a random probe into a version's folder; return its tensors. ``changes``: tensors, or metadata."""
    drawn = torch.Generator().manual_seed(seed)
    tensors = {
        "weight": torch.randn(categories, HIDDEN, generator=drawn),
        "bias": torch.randn(categories, generator=drawn),
    }
    metadata = changes.pop("metadata", {"categories": json.dumps([f"c{n}" for n in range(categories)])})
    tensors |= changes
    save_file(tensors, folder / "safety_probe.safetensors", metadata)
    return tensors


def probed(command: Submit) -> Submit:
    return structs.replace(command, probe=True)


def run(engine: Any, commands: list[Submit]) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    """Return tokens and scores by handle; the scores of those that asked, one per token."""
    tokens: dict[int, list[int]] = {command.handle: [] for command in commands}
    scores: dict[int, list[float]] = {command.handle: [] for command in commands if command.probe}
    for command in commands:
        engine.apply(command)
    while engine.has_work:
        event = engine.step()
        assert len(event.probe_scores) in (0, len(event.tokens))
        for row, (handle, token) in enumerate(zip(event.handles, event.tokens, strict=True)):
            tokens[handle].append(token)
            if handle in scores:
                scores[handle].append(event.probe_scores[row])
    return tokens, scores


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_score_is_the_greatest_sigmoid_for_the_text_before_its_token(
    family: str, save_model: Any, load_engine: Any, submit: Any
) -> None:
    model, folder = save_model(family, seed=3, **({"head_dim": 12} if family == "Qwen3" else {}))
    tensors = add_probe(folder)
    engine = load_engine(folder, token_budget=9, max_sequences=4)
    commands = [probed(submit(index, ids, 8, ignore_eos=True)) for index, ids in enumerate(PROMPTS)]
    tokens, scores = run(engine, commands)
    for index, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            states = model.model(torch.tensor([[*prompt, *tokens[index]]])).last_hidden_state[0]
        expected = (states @ tensors["weight"].T + tensors["bias"]).sigmoid().amax(1)
        # The state before the first token is that of the prompt's last.
        wanted = expected[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.tensor(scores[index]), wanted, atol=1e-5, rtol=0)


def test_scores_have_the_same_bits_alone_in_company_resumed_and_verified(
    save_model: Any, load_engine: Any, submit: Any
) -> None:
    _, folder = save_model("Llama", seed=4)
    add_probe(folder)
    prompts = [*PROMPTS, REPEATED]
    commands = [probed(submit(index, ids, 12, ignore_eos=True)) for index, ids in enumerate(prompts)]
    fresh = {"token_budget": 64, "max_sequences": 8}
    alone: dict[int, list[float]] = {}
    tokens: dict[int, list[int]] = {}
    for command in commands:
        found = run(load_engine(folder, **fresh), [command])
        tokens |= found[0]
        alone |= found[1]
    assert run(load_engine(folder, **fresh), commands) == (tokens, alone)
    cut = load_engine(folder, token_budget=5, max_sequences=3, kv_blocks=64)
    assert run(cut, commands) == (tokens, alone), "chunks and other numbers of rows"
    resumed = [
        structs.replace(command, produced_ids=tokens[command.handle][: 3 + command.handle])
        for command in commands
    ]
    _, rest = run(load_engine(folder, **fresh), resumed)
    assert rest == {handle: scores[3 + handle :] for handle, scores in alone.items()}
    _, draft = save_model("Llama", seed=5)
    guessing = load_engine(folder, speculation="draft", draft_model_dir=str(draft), **fresh)
    assert run(guessing, commands) == (tokens, alone), "rows of proposals that are rejected"


def test_who_asks_for_no_scores_has_the_same_tokens(save_model: Any, load_engine: Any, submit: Any) -> None:
    _, folder = save_model("Llama", seed=4)
    plain = [submit(index, ids, 6, ignore_eos=True, logprobs=2) for index, ids in enumerate(PROMPTS[:3])]
    without, _ = run(load_engine(folder), plain)
    add_probe(folder)
    engine = load_engine(folder)
    assert run(engine, plain)[0] == without
    asks = probed(submit(9, PROMPTS[3], 6, ignore_eos=True))
    beside, scores = run(engine, [*plain, asks])
    assert {handle: beside[handle] for handle in without} == without
    assert len(scores[9]) == 6


def test_scores_do_not_depend_on_the_number_of_rows() -> None:
    """Also beyond a slice, and where torch's own product of matrices gives other bits."""
    drawn = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(5, 257, generator=drawn), torch.randn(5, generator=drawn)
    states = torch.randn(150, 257, generator=drawn)
    probe = SafetyProbe(weight, bias, TORCH)
    together = scores_of(probe.launch(states).tolist())
    alone = [scores_of(probe.launch(states[row : row + 1]).tolist())[0] for row in range(len(states))]
    assert together == alone
    for rows in range(1, 40):
        assert scores_of(probe.launch(states[:rows]).tolist()) == alone[:rows]


def test_what_exceeds_float32_does_not_pass_for_safe() -> None:
    huge = torch.full((1, 2), 3e38)
    found = SafetyProbe(torch.tensor([[3e38, -3e38]]), torch.zeros(1), TORCH).launch(huge)
    assert scores_of(found.tolist()) == [CERTAIN]
    assert scores_of([-2000.0, 2000.0, 0.0]) == [0.0, 1.0, 0.5]


def test_an_engine_promises_the_probe_that_it_has(save_model: Any, load_engine: Any, submit: Any) -> None:
    _, folder = save_model("Llama", seed=4)
    engine = load_engine(folder)
    assert not engine.has_probe
    engine.apply(probed(submit(0, [5], 2)))
    event = engine.step()
    assert (event.finished, event.errors) == ({0: "error"}, {0: "this engine has no probe"})
    add_probe(folder)
    assert load_engine(folder).has_probe


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": torch.zeros(3, HIDDEN + 1)}, "weight has shape (3, 49), the configuration says (3, 48)"),
        ({"bias": torch.zeros(2)}, "bias has shape (2,)"),
        ({"weight": torch.zeros(3, HIDDEN, dtype=torch.int32)}, "weight has dtype I32"),
        ({"weight": torch.full((3, HIDDEN), torch.nan)}, "weight holds values that are not finite"),
        ({"extra": torch.zeros(1)}, "unexpected tensors: extra"),
        ({"metadata": {}}, "its metadata has no categories"),
        ({"metadata": {"categories": '["a", "a", "b"]'}}, "different names"),
        ({"metadata": {"categories": '["a", "b", "C!"]'}}, "'C!' is no name of a category"),
    ],
)
def test_a_probe_that_does_not_fit_is_refused(
    save_model: Any, load_engine: Any, changes: dict[str, Any], words: str
) -> None:
    _, folder = save_model("Llama", seed=4)
    add_probe(folder, **changes)
    with pytest.raises(BadCheckpoint) as refused:
        load_engine(folder)
    assert words in str(refused.value)


def test_the_bundled_probe_finds_most_secrets(load_engine: Any, submit: Any, tmp_path: Path) -> None:
    """As its card says, by the engine: each of the last tokens is judged by a prompt that ends with it."""
    for file in [*(MODELS / "tiny/checkpoint").iterdir(), *(MODELS / "safety/probe").iterdir()]:
        (tmp_path / file.name).symlink_to(file)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    engine = load_engine(tmp_path, kv_blocks=2048, block_size=16)
    texts = make_texts(80, seed=77, held_out=False, sources=source_lines()[1::2])
    found: dict[str, list[bool]] = {"secret": [], "safe": []}
    for made in texts:
        if made.label in found:
            ids = tokenizer.encode(made.text[: made.end or None]).ids
            prompts = [ids[: len(ids) - cut] for cut in range(min(8, len(ids) - 1))]
            _, scores = run(engine, [probed(submit(place, ids, 1)) for place, ids in enumerate(prompts)])
            found[made.label].append(any(score[0] >= 0.5 for score in scores.values()))
    ratios = {label: sum(cases) / len(cases) for label, cases in found.items()}
    assert ratios["secret"] >= 0.8
    assert ratios["safe"] <= 0.1
