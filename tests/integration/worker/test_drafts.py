"""A worker that is told to speculate with drafts, and versions with a good one, a bad one and none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.core.records import AssignedVersion, VersionState
from services.worker.slots.engine_process import EngineTimeouts
from services.worker.slots.engine_settings import EngineSettings
from tests.integration.worker.harness import VOCAB, Harness, Sink, Starter, eventually
from tests.support.model_folder import write_sparse

DRAFTS = EngineSettings(
    speculation="draft",
    max_proposals=4,
    operators="torch",
    kv_memory_bytes=16 * 2**20,
    failed_backoff_first_s=0.5,
    timeouts=EngineTimeouts(silence_s=20.0, shutdown_s=5.0),
)


def save(folder: Path, *, vocab_size: int = VOCAB, layers: int = 1) -> int:
    """Write a random checkpoint; return how many values its tensors have."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    torch.manual_seed(1)
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


async def assign(worker: Harness, executor: str = "torch") -> None:
    await worker.assign(AssignedVersion("d", "m", worker.digest, executor=executor))


async def test_the_ledger_books_the_weights_of_both(start_worker: Starter, model_dir: Path) -> None:
    values = save(model_dir, layers=2)
    drafted = values + save(model_dir / "draft")
    for speculation, counted in (("draft", drafted), ("prompt_lookup", values)):
        worker = await start_worker(replace(DRAFTS, speculation=speculation), assign=False)  # type: ignore[arg-type]
        await assign(worker)
        await worker.ready(60.0)
        (version,) = worker.agent.status().versions
        assert version.record.weight_bytes == 4 * counted
        assert version.record.kv_bytes <= 16 * 2**20
        worker.agent.check_integrity()


async def test_a_draft_that_does_not_fit_beside_its_model_starts_no_engine(
    start_worker: Starter, model_dir: Path
) -> None:
    values = save(model_dir)
    (model_dir / "draft").mkdir()
    (model_dir / "draft" / "config.json").write_text("{}")
    write_sparse(model_dir / "draft" / "model.safetensors", {"w": (1024, 1048576)})
    worker = await start_worker(DRAFTS, assign=False)
    await assign(worker)
    await eventually(lambda: worker.state() is VersionState.FAILED)
    (version,) = worker.agent.status().versions
    assert version.record.reason == "DOES_NOT_FIT"
    assert version.record.needed_bytes >= 4 * (values + 2**30)
    assert version.engine_pid == 0


async def test_a_draft_with_other_tokens_is_refused_and_says_so(
    start_worker: Starter, model_dir: Path
) -> None:
    save(model_dir, layers=2)
    save(model_dir / "draft", vocab_size=VOCAB - 1)
    worker = await start_worker(DRAFTS, assign=False)
    await assign(worker)
    await eventually(lambda: worker.state() is VersionState.FAILED, 60.0)
    (version,) = worker.agent.status().versions
    assert version.record.message == "the draft model's vocabulary of 511 is not the model's 512"
    assert (version.record.reason, version.record.retry_unix_s) == ("BAD_ENGINE_CONFIG", 0.0)


@pytest.mark.parametrize("executor", ["torch", "null"])
async def test_a_version_that_has_no_draft_is_served(
    start_worker: Starter, model_dir: Path, executor: str
) -> None:
    """A null engine has none, whatever is in the folder: its draft's weights were not fetched."""
    save(model_dir)
    if executor == "null":
        (model_dir / "draft").mkdir()
        (model_dir / "draft" / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    worker = await start_worker(DRAFTS, assign=False)
    await assign(worker, executor)
    await worker.ready(60.0)
    sink = Sink()
    worker.client.start(worker.spec(max_tokens=20), sink)
    await sink.wait()
    assert len(sink.ids) == 20
