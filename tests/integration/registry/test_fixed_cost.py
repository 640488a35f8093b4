"""A folder of a fixed-cost model: published, refused by what is wrong with it, fetched and loaded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fairway.client.publish.publish import PublishRefused, publish
from services.core.errors import InvalidInput
from services.gateway.text.child import TextProcessCheck
from services.registry.service import RegistryService
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.rows import Packed
from tests.integration.registry.harness import Registry, files
from tests.support.fixed_cost import VOCABULARY, save, save_pooling
from tests.support.registry import ADMIN


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    """A random encoder with all files of an embedding model."""
    folder = tmp_path / "embedder"
    save("Bert", "Model", folder)
    save_pooling(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w1")).save(str(folder / "tokenizer.json"))
    return folder


@pytest_asyncio.fixture
async def checked(registry: Registry) -> AsyncIterator[RegistryService]:
    """The registry with the check of what gateways read."""
    clock = SystemClock()
    supervisor = Supervisor(clock)
    yield RegistryService(registry.store, registry.blobs, clock, texts=TextProcessCheck(clock, supervisor))
    await supervisor.close()


async def test_it_is_published_as_its_kind_fetched_and_loaded(
    registry: Registry, checked: RegistryService, embedder: Path, tmp_path: Path
) -> None:
    done = await publish(registry.channel, embedder, "minilm", metadata=ADMIN)
    _, manifest = await registry.client.get_version("minilm", done.digest)
    assert manifest.kind == "fixed-cost"
    stored, created = await checked.create_version("minilm", manifest)  # the same, with all checks
    assert not created
    assert (stored.kind, stored.computation) == ("fixed-cost", ""), "only decoders share an engine"
    folder = await files(registry.client, tmp_path / "cache").fetch("minilm", done.digest)
    row = {"input_ids": np.arange(5)}
    own, copy = (load_model(each).run(Packed([row]))[0]["embedding"] for each in (embedder, folder))
    assert np.array_equal(own, copy)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "mean_tokens and max_tokens"),
        ("config.json", {"hidden_act": "silu"}, "config.json: hidden_act: silu is not supported"),
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, "is not supported"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_publisher_and_registry(
    registry: Registry,
    checked: RegistryService,
    embedder: Path,
    name: str,
    fields: dict[str, object],
    words: str,
) -> None:
    path = embedder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(PublishRefused, match=words):
        await publish(registry.channel, embedder, "m", metadata=ADMIN, kind="fixed-cost")
    done = await publish(
        registry.channel, embedder, "m", metadata=ADMIN, kind="fixed-cost", for_another_engine=True
    )
    _, manifest = await registry.client.get_version("m", done.digest)
    with pytest.raises(InvalidInput, match=words):
        await checked.create_version("m2", manifest)


async def test_an_encoder_is_no_decoder(registry: Registry, embedder: Path) -> None:
    with pytest.raises(PublishRefused, match="BertModel is a fixed-cost model"):
        await publish(registry.channel, embedder, "m", metadata=ADMIN, kind="causal-lm")


async def test_a_tokenizer_that_gateways_cannot_load_is_refused(
    registry: Registry, checked: RegistryService, embedder: Path
) -> None:
    (embedder / "tokenizer.json").write_text("{}")
    done = await publish(registry.channel, embedder, "m", metadata=ADMIN)
    _, manifest = await registry.client.get_version("m", done.digest)
    with pytest.raises(InvalidInput, match=r"tokenizer\.json"):
        await checked.create_version("m2", manifest)
