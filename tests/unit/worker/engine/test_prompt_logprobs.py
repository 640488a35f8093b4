"""Log-probabilities of prompts, against one forward pass of transformers on the bundled model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from msgspec import structs

from services.core.generation import OutputLimits, Prompt, Sampling
from services.core.prefix import prefix_chain
from services.worker.engine.execute.executor import Batch, PrefillChunk
from services.worker.engine.execute.torch_executor import SLICE_ROWS, launch_scores, scored_rows
from services.worker.engine.sample.sampler import TorchReductions
from services.worker.engine.sequence import ModelLimits, refusal, sequence_of
from services.worker.engine_protocol import SampledLogprobs, Submit
from tests.support.engine_oracle import ROOT, load_engine

FOLDER: Final = Path(__file__).parents[4] / "models" / "tiny" / "checkpoint"
RNG: Final = random.Random(11)
TOP: Final = 5
LENGTHS: Final = (1, 2, 63, 64, 65, 100, 150)
PROMPTS: Final = [[RNG.randrange(5, 4096) for _ in range(length)] for length in LENGTHS]
PLENTY: Final = {"block_size": 16, "kv_blocks": 400, "token_budget": 512, "max_sequences": 8}
# Chunks that end within slices and at the prompt's last tokens, and too few blocks for all at once.
CHUNKED: Final = {**PLENTY, "token_budget": 21, "max_sequences": 8}
SHORT: Final = {**PLENTY, "kv_blocks": 12, "token_budget": 40, "max_sequences": 4}


@dataclass
class Scored:
    """By number of the prompt: entries and tokens; how often a sequence was preempted."""

    entries: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    preemptions: int = 0
    cached: int = 0
    steps: int = 0


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """Return log-probabilities [prompt, vocabulary] of each prompt, of one pass over all of it."""
    import transformers

    torch.set_num_threads(1)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    model.eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].log_softmax(dim=-1) for ids in PROMPTS]


def ask(submit: Any, number: int, max_tokens: int = 0, **more: Any) -> Submit:
    found = submit(number, PROMPTS[number], max_tokens, prompt_logprobs=TOP, ignore_eos=True, **more)
    assert isinstance(found, Submit)
    return found


def run(engine: Any, commands: Sequence[Submit]) -> Scored:
    """Run to the end; what is handed back is resumed with what it has, as a gateway does."""
    found, numbers, firsts = Scored(), {}, {each.handle: each for each in commands}
    for command in commands:
        numbers[command.handle] = command.handle
        engine.apply(command)
    while engine.has_work:
        event = engine.step()
        engine.check_integrity()
        found.steps += 1
        found.preemptions = event.preemptions
        found.cached += sum(event.cached.values())
        for handle, entries in event.prompt_logprobs.items():
            assert numbers[handle] not in found.tokens, "its output came before its prompt"
            found.entries.setdefault(numbers[handle], []).extend(entries)
        for handle, token in zip(event.handles, event.tokens, strict=True):
            found.tokens.setdefault(numbers[handle], []).append(token)
        for handle, reason in event.finished.items():
            number = numbers[handle]
            if reason != "preempted":
                found.ends[number] = reason
                continue
            again = len(numbers) + 1000
            numbers[again] = number
            engine.apply(
                structs.replace(
                    firsts[number],
                    handle=again,
                    produced_ids=found.tokens.get(number, []),
                    scored_tokens=len(found.entries.get(number, ())),
                )
            )
    assert engine.heartbeat().kv_blocks_used == 0
    return found


def check(entries: Sequence[SampledLogprobs], number: int, expected: Sequence[torch.Tensor]) -> None:
    """Assert that the entries are those of the whole prompt, to 1e-4."""
    ids, logprobs = PROMPTS[number], expected[number]
    assert len(entries) == len(ids)
    assert (entries[0].sampled, entries[0].top_ids, entries[0].rank) == (0.0, [], 0)
    for place in range(1, len(ids)):
        entry, row = entries[place], logprobs[place - 1]
        assert math.isclose(entry.sampled, float(row[ids[place]]), abs_tol=1e-4), (number, place)
        values, tokens = row.topk(TOP)
        assert torch.allclose(torch.tensor(entry.top_logprobs), values, atol=1e-4), (number, place)
        near = int(((row - row[ids[place]]).abs() < 1e-4).sum())
        assert abs(entry.rank - 1 - int((row > row[ids[place]]).sum())) < near, (number, place)
        if float((values[:-1] - values[1:]).min()) > 1e-4:
            assert entry.top_ids == tokens.tolist()


@pytest.mark.parametrize("options", [PLENTY, CHUNKED, SHORT], ids=["whole", "chunked", "preempted"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_entries_are_those_of_one_pass(
    options: dict[str, Any], ahead: bool, expected: Any, submit: Any
) -> None:
    engine = load_engine(FOLDER, {**options, "operators": "torch"}, runs_ahead=ahead)
    outputs = [0, 20, 40, 0, 40, 40, 40]
    found = run(engine, [ask(submit, number, outputs[number]) for number in range(len(PROMPTS))])
    for number, count in enumerate(outputs):
        check(found.entries[number], number, expected)
        assert len(found.tokens.get(number, [])) == count
        assert found.ends[number] == "length"
    assert bool(found.preemptions) == (options is SHORT)


def test_native_operators_score_alike(expected: Any, submit: Any) -> None:
    engine = load_engine(FOLDER, {**CHUNKED, "operators": "auto"})
    found = run(engine, [ask(submit, number) for number in range(len(PROMPTS))])
    for number in range(len(PROMPTS)):
        check(found.entries[number], number, expected)
    assert not found.tokens


def test_a_prefill_that_is_preempted_reports_each_entry_once(expected: Any, submit: Any) -> None:
    """Decodes take the blocks of a prompt that is half computed."""
    short = {**PLENTY, "kv_blocks": 16, "token_budget": 8, "max_sequences": 4, "operators": "torch"}
    engine = load_engine(FOLDER, short)
    for number in range(100, 103):
        engine.apply(submit(number, [7 + number] * 15, 40, ignore_eos=True))
    engine.step()
    command = ask(submit, 6, priority=1)
    engine.apply(command)
    entries: list[SampledLogprobs] = []
    preempted_at: list[int] = []
    handle, preemptions = command.handle, 0
    while engine.has_work:
        event = engine.step()
        engine.check_integrity()
        if event.preemptions > preemptions:
            preempted_at.append(len(entries))
            preemptions = event.preemptions
        entries += event.prompt_logprobs.get(handle, [])
        if event.finished.get(handle) == "preempted":
            handle += 1000
            engine.apply(structs.replace(command, handle=handle, scored_tokens=len(entries)))
    assert any(0 < scored < len(PROMPTS[6]) for scored in preempted_at), "no prefill was preempted"
    check(entries, 6, expected)


def test_a_cached_prefix_is_computed_again(expected: Any, submit: Any) -> None:
    """Cached KV has no logits. What the request computes is not entered either: nothing refers to it."""
    engine = load_engine(FOLDER, {**PLENTY, "operators": "torch"})
    names = {"prefix_root": ROOT, "prefix_hashes": prefix_chain(ROOT, PROMPTS[6])}
    plain = run(engine, [submit(50, PROMPTS[6], 4, ignore_eos=True, **names)])
    hit = run(engine, [submit(51, PROMPTS[6], 4, ignore_eos=True, **names)])
    assert (plain.cached, hit.cached > 100) == (0, True), "the prefix is not cached"
    found = run(engine, [ask(submit, 6, 4, **names)])
    check(found.entries[6], 6, expected)
    assert found.cached == 0
    assert found.tokens[6] == hit.tokens[51], "scoring changed the output"


@pytest.mark.parametrize("scored", [0, 1, 2, 20, 21, 22, 149, 150])
def test_a_resume_continues_behind_what_was_reported(scored: int, expected: Any, submit: Any) -> None:
    engine = load_engine(FOLDER, {**CHUNKED, "operators": "torch"})
    command = structs.replace(ask(submit, 6), scored_tokens=scored)
    found = run(engine, [command])
    whole = run(engine, [ask(submit, 6)]).entries[6]
    check(whole, 6, expected)
    assert found.entries.get(6, []) == whole[scored:]
    assert found.ends == {6: "length"}


def test_a_resume_with_output_reports_nothing_again(submit: Any) -> None:
    engine = load_engine(FOLDER, {**CHUNKED, "operators": "torch"})
    whole = run(engine, [ask(submit, 5, 8)])
    command = structs.replace(ask(submit, 5, 8), produced_ids=whole.tokens[5][:3], scored_tokens=100)
    found = run(engine, [command])
    assert found.entries == {}
    assert found.tokens[5] == whole.tokens[5][3:]


def test_neighbours_are_not_changed(submit: Any) -> None:
    others = [submit(number, PROMPTS[number - 100], 20, ignore_eos=True) for number in (102, 105)]
    engine = load_engine(FOLDER, {**CHUNKED, "operators": "torch"})
    alone = run(engine, others).tokens
    beside = run(engine, [*others, ask(submit, 6), ask(submit, 4, 9)]).tokens
    assert {number: beside[number] for number in alone} == alone


def test_no_more_than_a_slice_of_logits_is_there_at_once() -> None:
    prompt = [RNG.randrange(50) for _ in range(5 * SLICE_ROWS + 1)]
    command = Submit(0, Prompt(prompt), Sampling(0, prompt_logprobs=0), OutputLimits(0), 1)
    sequence = sequence_of(command, arrival=0, eos_ids=frozenset())
    batch = Batch([], [PrefillChunk(sequence, 0, len(prompt))])
    spans: Any = SimpleNamespace(first_rows=[0])
    scored = scored_rows(batch, spans)
    assert scored is not None
    sizes: list[int] = []

    def logits_of(states: torch.Tensor) -> torch.Tensor:
        sizes.append(len(states))
        return states

    states = torch.randn(len(scored.rows), 50)
    entries = launch_scores(logits_of, states, scored, TorchReductions()).entries()[0]
    assert max(sizes) == SLICE_ROWS
    assert len(entries) == 5 * SLICE_ROWS
    logprobs = states.log_softmax(dim=-1)
    assert [each.sampled for each in entries] == [
        float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=True)
    ]


def test_a_model_without_numbers_fails_the_sequence_alone(submit: Any) -> None:
    engine = load_engine(FOLDER, {**CHUNKED, "operators": "torch"}, watched=_Broken)
    found = run(engine, [ask(submit, 6), submit(200, PROMPTS[3], 4, ignore_eos=True)])
    assert found.ends == {6: "not_finite", 200: "length"}
    assert len(found.entries[6]) < len(PROMPTS[6])


class _Broken:
    """An executor whose scores from the third chunk on are no numbers."""

    runs_ahead = False

    def __init__(self, executor: Any) -> None:
        self._executor, self._chunks = executor, 0
        self.submit, self.resize = executor.submit, executor.resize

    def collect(self) -> Any:
        samples = self._executor.collect()
        self._chunks += bool(samples.scores)
        if self._chunks >= 3:
            for entries in samples.scores.values():
                entries[-1] = SampledLogprobs(math.nan, [], [])
        return samples


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompt_logprobs": None}, "max_tokens is 0"),
        ({"scored_tokens": 4}, "4 scored tokens of 3"),
        ({"produced_ids": [5]}, "before its prompt was scored"),
        ({"prompt_logprobs": 129}, "prompt_logprobs is out of range"),
    ],
    ids=["without scores", "beyond the prompt", "output first", "too many"],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], why: str, submit: Any) -> None:
    asked = changes.pop("prompt_logprobs", TOP)
    command = submit(0, [5, 6, 7], 2 if "produced_ids" in changes else 0, prompt_logprobs=asked)
    found = refusal(structs.replace(command, **changes), ModelLimits(4096, 1024))
    assert found is not None
    assert why in found
