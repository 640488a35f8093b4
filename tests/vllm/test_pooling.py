"""Text encoders on vLLM's worker: equal to transformers, alone and in company; what is refused and lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray

from fairway.engines.environment import Installed, engine_variables, mark
from services.core.errors import InvalidInput
from services.core.fixed_cost.rows import RawTensor
from services.worker.batcher.models.rows import Row
from services.worker.engine_protocol import BatchRan, EngineConfig, LoadFailed, Progress, RunBatch
from services.worker.slots.engine_process import ON_VLLM
from services.worker.slots.engine_settings import EngineSettings
from tests.contract.engine.conftest import VLLM_PYTHON, Engine
from tests.integration.worker.harness import eventually
from tests.integration.worker.row_worker import SETTINGS, VERSION, RowWorker, raw
from tests.support.engine_agent import ROOT, Agent
from tests.support.fixed_cost import POSITIONS, VOCABULARY, own_outputs, save, save_pooling, token_row

WIDTH: Final = 96  # vLLM has no attention with smaller heads
TOLERANCE: Final = 1e-5  # largest difference, by the largest value
LOAD_S: Final = 240.0
# Family, kind, fields; the pooling of an embedding; whether rows are exact, as the canary finds.
MODELS: Final[dict[str, tuple[str, str, dict[str, Any], str, bool]]] = {
    "mean": ("Bert", "Model", {}, "mean_tokens", True),
    "cls": ("Bert", "Model", {"hidden_act": "gelu_new"}, "cls_token", True),
    "roberta": ("Roberta", "Model", {"type_vocab_size": 1}, "mean_tokens", True),
    "score": ("XLMRoberta", "ForSequenceClassification", {"num_labels": 1, "type_vocab_size": 1}, "", False),
    "classes": (
        "Bert",
        "ForSequenceClassification",
        {"num_labels": 3, "sbert_ce_default_activation_function": "torch.nn.Sigmoid"},
        "",
        False,
    ),
    "tokens": ("Roberta", "ForTokenClassification", {"num_labels": 4}, "", False),
}


def written(name: str, folder: Path, *, normalize: bool = False, **more: Any) -> Any:
    """Write the model; return that of transformers."""
    family, kind, fields, pooling, _ = MODELS[name]
    model = save(family, kind, folder, hidden_size=WIDTH, **(fields | more))
    if pooling:
        save_pooling(folder, mode=pooling, normalize=normalize, width=WIDTH)
    return model


def expected(name: str, model: Any, rows: Sequence[Row]) -> list[NDArray[Any]]:
    """Return what transformers computes of each row alone."""
    found = []
    for output in own_outputs(model, rows):
        if not (pooling := MODELS[name][3]):
            found.append(output.logits[0].numpy())
            continue
        states = output.last_hidden_state[0]
        found.append((states.mean(0) if pooling == "mean_tokens" else states[0]).numpy())
    return found


def drawn_rows(seed: int, count: int, *, types: bool) -> list[Row]:
    """Return rows of drawn lengths; every other one has token types."""
    drawn = np.random.default_rng(seed)
    sizes = [1, POSITIONS, *drawn.integers(1, POSITIONS + 1, count - 2)]
    return [token_row(drawn, int(size), types=types and place % 2 == 0) for place, size in enumerate(sizes)]


class Process:
    """A process of rows that is ready."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.ready = agent.ready()
        self.numbers = 0

    def batch(self, rows: Sequence[tuple[RawTensor, ...]]) -> BatchRan:
        self.numbers += 1
        self.agent.send(RunBatch(self.numbers, list(rows), POSITIONS))
        while not isinstance(answer := self.agent.receive(), BatchRan):
            pass
        assert answer.number == self.numbers
        return answer

    def values(self, rows: Sequence[Row]) -> list[NDArray[Any]]:
        answer = self.batch([raw(dict(row)) for row in rows])
        assert answer.problems == {}
        return [np.frombuffer(output.data, np.float32).reshape(output.shape) for (output,) in answer.outputs]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def run(folder: Path, **options: Any) -> Agent:
        fields: dict[str, Any] = {"executor": "vllm_rows", "threads": 1} | options
        config = EngineConfig("", str(folder), **fields)
        python = VLLM_PYTHON if config.executor in ON_VLLM else sys.executable
        agents.append(Agent(tmp_path_factory.mktemp("rows"), config, python=python))
        return agents[-1]

    yield run
    for agent in agents:
        agent.close()


@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_transformers_alone_and_in_company(
    start: Callable[..., Agent], tmp_path: Path, name: str
) -> None:
    model = written(name, tmp_path)
    process = Process(start(tmp_path))
    rows = drawn_rows(3, 40, types=getattr(model.config, "type_vocab_size", 0) > 1)
    wanted = expected(name, model, rows)
    scale = max(float(np.abs(values).max()) for values in wanted)
    together, alone = process.values(rows), [process.values([row])[0] for row in rows]
    for found in (together, alone):
        for values, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(values, right, rtol=0, atol=TOLERANCE * max(1.0, scale))
    exact = "exact" in process.ready.capabilities
    assert exact == MODELS[name][4]
    if exact:
        drawn = random.Random(5)
        for _ in range(10):
            company = [drawn.randrange(len(rows)) for _ in range(drawn.randint(1, 250))]
            for place, values in zip(company, process.values([rows[one] for one in company]), strict=True):
                assert np.array_equal(values, alone[place])


def test_a_bad_row_is_named_and_the_others_are_answered(start: Callable[..., Agent], tmp_path: Path) -> None:
    written("roberta", tmp_path)
    process = Process(start(tmp_path))
    drawn = np.random.default_rng(1)
    good = [raw(dict(token_row(drawn, size, types=False))) for size in (3, 40)]
    bad = {
        "input_ids must be 0 to 52": np.array([VOCABULARY]),
        "must be 0 to": np.array([1 << 40]),
        "0 to 52": np.array([-1]),
        "at most 40": np.full(41, 3),
        "has shape [0]": np.zeros(0, np.int64),
        "no position for the padding token 1": np.array([0, 1, 2]),
    }
    rows = [good[0], *(raw({"input_ids": ids}) for ids in bad.values()), good[1], ()]
    answer = process.batch(rows)
    assert [words in answer.problems[place] for place, words in enumerate(bad, 1)] == [True] * len(bad)
    assert "input_ids is missing" in answer.problems[len(rows) - 1]
    assert answer.outputs[0] == process.batch(good).outputs[0]
    assert answer.outputs[-2] == process.batch(good).outputs[1]
    assert process.batch([()]).outputs == [()]


def test_normalised_vectors_are_those_of_the_own_encoder(start: Callable[..., Agent], tmp_path: Path) -> None:
    """In either number format; bfloat16 promises nothing."""
    written("mean", tmp_path, normalize=True)
    rows = drawn_rows(9, 60, types=True)
    own = Process(start(tmp_path, executor="rows")).values(rows)
    np.testing.assert_allclose(Process(start(tmp_path)).values(rows), own, atol=TOLERANCE)
    process = Process(start(tmp_path, dtype="bfloat16"))
    assert process.ready.capabilities == frozenset()
    np.testing.assert_allclose(process.values(rows), own, atol=0.05)


def test_what_vllm_does_not_pool_is_refused_by_name(start: Callable[..., Agent], tmp_path: Path) -> None:
    save("DistilBert", "Model", tmp_path)
    save_pooling(tmp_path)
    agent = start(tmp_path)
    while isinstance(event := agent.receive(), Progress):
        pass
    assert isinstance(event, LoadFailed)
    assert "vLLM has no distilbert" in event.message


@pytest_asyncio.fixture
async def worker(tmp_path: Path) -> AsyncIterator[RowWorker]:
    """A worker that serves an embedding on vLLM."""
    folder, environment = tmp_path / "model", tmp_path / "environment"
    written("mean", folder)
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {VLLM_PYTHON} "$@"\n')
    python.chmod(0o755)
    mark(environment, Installed("vllm", "0", "cpu", ""))
    settings: EngineSettings = replace(SETTINGS, kv_memory_bytes=128 << 20)
    version = replace(VERSION, executor="vllm")
    found = await RowWorker.started(folder, settings, version, vllm_dir=environment, load_s=LOAD_S)
    yield found
    found.batcher.check_integrity()
    await found.close()


async def test_a_worker_batches_charges_and_answers_once_after_a_kill(worker: RowWorker) -> None:
    rows = drawn_rows(4, 60, types=True)
    before = await worker.run([raw(dict(row)) for row in rows])
    assert max(reader.answer.batch_rows for reader in before) > 4
    uses = list(worker.harness.usage.sequences)
    assert sum(use.usage.prompt_tokens for use in uses) == sum(len(row["input_ids"]) for row in rows)
    assert sum(use.device_s for use in uses) > 0
    (record,) = (one.record for one in worker.harness.agent.status().versions)
    assert record.capabilities == ("exact",)
    os.kill(worker.pid, signal.SIGSTOP)
    readers = [worker.start(raw(dict(row))) for row in rows]
    bad = worker.start(raw({"input_ids": np.array([VOCABULARY])}))
    await eventually(lambda: worker.batcher.running > 0)
    os.kill(worker.pid, signal.SIGKILL)
    for reader in (*readers, bad):
        await reader.wait(LOAD_S)
    assert isinstance(bad.answer.error, InvalidInput)
    for reader, first in zip(readers, before, strict=True):
        assert np.array_equal(reader.outputs["embedding"], first.outputs["embedding"])
    assert worker.restarts == 1
    await eventually(lambda: len(worker.batcher) == 0)
    charged = sum(use.usage.prompt_tokens for use in worker.harness.usage.sequences)
    assert charged == 2 * sum(len(row["input_ids"]) for row in rows)


def test_after_an_exception_it_answers_as_before_or_the_process_ends(tmp_path: Path) -> None:
    written("mean", tmp_path)
    ended = subprocess.run(
        [VLLM_PYTHON, "-m", "tests.support.faulty_vllm_rows", str(tmp_path)],
        cwd=ROOT,
        env=engine_variables(threads=1),
        capture_output=True,
        text=True,
        check=True,
        timeout=LOAD_S,
    )
    assert ended.stdout.splitlines()[-3:] == ["raised True", "requests left: 0", "ended by 4"]


def test_a_decoder_that_vllm_alone_serves_embeds_by_its_last_token(
    start: Callable[..., Agent], tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = save(
        "Gemma2",
        "ForCausalLM",
        tmp_path,
        vocab_size=VOCABULARY,
        hidden_size=64,
        max_position_embeddings=128,
        **sizes,
    )
    options: dict[str, Any] = {"block_size": 32, "kv_blocks": 16, "token_budget": 64, "max_sequences": 8}
    engine = Engine(start(tmp_path, executor="vllm", max_model_len=128, **options))
    prompts = [row["input_ids"].tolist() for row in drawn_rows(2, 6, types=False)]
    handles = [engine.submit(prompt, 0, credit=1, embed=True) for prompt in prompts]
    for prompt, output in zip(prompts, engine.run(*handles), strict=True):
        with torch.inference_mode():
            right = model.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        found = np.frombuffer(output.embedding, "<f4")
        np.testing.assert_allclose(found, right, rtol=0, atol=TOLERANCE * float(np.abs(right).max()))
