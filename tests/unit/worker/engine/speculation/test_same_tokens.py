"""Speculation on checkpoints: the tokens of a schedule are those without, at every temperature.

Both engines get the same commands; what differs is how many tokens a step makes. Proposals come from the
text, from the model itself as its own draft, and from a rig that knows the answer and spoils some of it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import Inline
from services.worker.engine.load.loading import _load_torch
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.plan.planner import PlannerLimits
from services.worker.engine.sequence import ModelLimits, SequenceState
from services.worker.engine.speculation.draft_model import DraftModel
from services.worker.engine.speculation.speculator import PromptLookup, Proposer, Speculator
from services.worker.engine.unsupported import REFUSALS, BadEngineConfig
from services.worker.engine_protocol import EngineConfig, Submit
from services.worker.policy.speculation import SpeculationPolicy

BLOCK = 4
VOCAB = 101
MOST = 5
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6, "hidden_size": 40}),
    ("Qwen3", {"head_dim": 12, "num_hidden_layers": 2}),
]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8, "top_k": 20},
    {"temperature": 0.8, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.2, "frequency_penalty": 0.7, "min_tokens": 6, "stop_token_ids": tuple(range(40))},
    {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": tuple(range(0, VOCAB, 3))},
    {"temperature": 0.9, "logit_bias": {7: 4.0, 9: 4.0}, "min_p": 0.05},
]


class Spoiled:
    """Knows what each sequence will say, and says another token with a chance of ``wrong``."""

    def __init__(self, answers: dict[int, list[int]], wrong: float, seed: int) -> None:
        self._answers, self._wrong, self._rng = answers, wrong, random.Random(seed)

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        return [self._after(sequence, most) for sequence, most in wanted]

    def forget(self, handle: int) -> None: ...

    def resize(self, blocks: int) -> None: ...

    def _after(self, sequence: SequenceState, most: int) -> list[int]:
        answer = self._answers.get(sequence.handle, [])[sequence.output_tokens :][:most]
        return [
            token if self._rng.random() >= self._wrong else self._rng.randrange(VOCAB)
            for token in (*answer, *range(most - len(answer)))
        ]


@pytest.fixture(scope="module", params=SHAPES, ids=[name for name, _ in SHAPES])
def folder(request: pytest.FixtureRequest, save_model: Callable[..., Any]) -> Path:
    family, overrides = request.param
    path: Path = save_model(family, seed=3, **overrides)[1]
    return path


@pytest.fixture(scope="module")
def build(folder: Path) -> Callable[..., Engine]:
    """Build an engine over the checkpoint; each has its own KV, all share nothing else."""

    def runner(blocks: int) -> Any:
        config = EngineConfig("", str(folder), block_size=BLOCK, kv_blocks=blocks, threads=1)
        return _load_torch(config, lambda phase, ratio: None)[0]

    def make(proposer: str | Proposer | None, *, blocks: int, budget: int, most: int = MOST) -> Engine:
        if proposer == "prompt_lookup":
            proposer = PromptLookup(max_sequences=8)
        elif proposer == "draft":
            pool = BlockManager(64, BLOCK)
            proposer = DraftModel(runner(64), blocks=pool, max_model_len=128, token_budget=200)
        ticks = count()
        speculator = None
        if proposer is not None and not isinstance(proposer, str):
            speculator = Speculator(proposer, SpeculationPolicy(most_tokens=most), clock=lambda: 0.0)
        return Engine(
            Inline(runner(blocks)),
            blocks=BlockManager(blocks, BLOCK),
            limits=PlannerLimits(budget, 4),
            model=ModelLimits(VOCAB, 120),
            eos_ids=frozenset(),
            clock=lambda: float(next(ticks)),
            speculation=speculator,
        )

    return make


def prompts() -> st.SearchStrategy[list[int]]:
    """Texts that repeat themselves now and then."""
    part = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
    return st.builds(lambda one, two, times: (one * times + two + one)[:24], part, part, st.integers(1, 3))


requests = st.lists(
    st.tuples(prompts(), st.integers(1, 14), st.sampled_from(SAMPLINGS), st.integers(0, 9)),
    min_size=1,
    max_size=5,
)


@settings(
    deadline=None,
    max_examples=12,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=requests,
    proposer=st.sampled_from(["prompt_lookup", "draft", "spoiled", "right"]),
    blocks=st.sampled_from([14, 40]),
    budget=st.sampled_from([9, 40]),
    seed=st.integers(0, 99),
)
def test_the_tokens_are_those_without(
    build: Any, submit: Any, drive: Any, requests: Any, proposer: str, blocks: int, budget: int, seed: int
) -> None:
    """Mixed batches, chunked prefill, preemption and resumes, penalties, stops, log-probabilities."""
    submits: list[Submit] = [
        submit(handle, prompt, tokens, **({"seed": draw} | sampling | {"min_tokens": min(6, tokens)}))
        if "min_tokens" in sampling
        else submit(handle, prompt, tokens, **({"seed": draw} | sampling))
        for handle, (prompt, tokens, sampling, draw) in enumerate(requests)
    ]
    plain = drive(build(None, blocks=blocks, budget=budget), submits)
    if proposer in ("spoiled", "right"):
        wrong = 0.3 if proposer == "spoiled" else 0.0
        found: Any = Spoiled(
            plain.tokens, wrong, seed
        )  # knows nothing of one that is resumed under another handle
    else:
        found = proposer
    outcome = drive(build(found, blocks=blocks, budget=budget), submits)
    assert outcome.tokens == plain.tokens
    assert outcome.finished == plain.finished
    for handle, entries in plain.logprobs.items():
        got = outcome.logprobs[handle]
        assert [entry.sampled for entry in got] == pytest.approx(
            [entry.sampled for entry in entries], abs=1e-4
        )
        assert [entry.top_ids for entry in got] == [entry.top_ids for entry in entries]


@pytest.mark.parametrize("speculation", ["prompt_lookup", "draft"])
def test_it_is_a_setting(folder: Path, load_engine: Any, submit: Any, drive: Any, speculation: str) -> None:
    """As the process loads it; a draft takes its part of the KV memory."""
    drafts = {"draft_model_dir": str(folder)} if speculation == "draft" else {}
    options: dict[str, Any] = {"kv_blocks": 0, "kv_memory_bytes": 1 << 20}
    plain = load_engine(folder, **options)
    engine = load_engine(folder, speculation=speculation, **drafts, **options)
    submits = [submit(handle, [5, 9, 5, 9, handle], 30) for handle in range(2)]
    assert drive(engine, submits).tokens == drive(plain, submits).tokens
    blocks = [each._blocks.blocks_total for each in (plain, engine)]
    assert blocks[1] == (blocks[0] // 2 if drafts else blocks[0])


def test_a_draft_of_another_vocabulary_is_refused(
    folder: Path, load_engine: Any, save_model: Callable[..., Any]
) -> None:
    other = save_model("Llama", vocab_size=50, num_hidden_layers=1)[1]
    with pytest.raises(BadEngineConfig, match="draft model's vocabulary of 50 is not the model's 101"):
        load_engine(folder, speculation="draft", draft_model_dir=str(other))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.json", b"{}", "the draft model's architectures: None is not supported"),
        ("model.safetensors", b"", "the draft model: model.safetensors is no valid"),
    ],
)
def test_what_is_wrong_with_a_draft_is_said_of_the_draft(
    folder: Path, load_engine: Any, tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    draft = Path(shutil.copytree(folder, tmp_path / "draft"))
    (draft / name).write_bytes(content)
    with pytest.raises(REFUSALS, match=problem):
        load_engine(folder, speculation="draft", draft_model_dir=str(draft))


def test_a_model_that_drafts_for_itself_is_always_accepted(build: Any, submit: Any) -> None:
    """At temperature 1 too: the draft draws with the target's keys."""
    engine = build("draft", blocks=60, budget=60)
    for handle, temperature in enumerate((0.0, 1.0, 1.0)):
        engine.apply(submit(handle, [5, 9, handle], 24, temperature=temperature, seed=handle))
    events = []
    while engine.has_work:
        events.append(engine.step())
        engine.check_integrity()
    accepted = sum(event.accepted_tokens for event in events)
    assert accepted >= 0.95 * sum(event.proposed_tokens for event in events) > 0
    assert len(events) < 16
