"""A small real tokenizer, a model folder around it, and a clock that the test owns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from fairway.formats.limits import POLICY_NAME
from fairway.formats.probe import PROBE
from services.core.manifest import Manifest, ManifestFile, sha256_of
from services.core.records import (
    DEPLOYMENTS,
    TENANTS,
    WORKERS,
    Deployment,
    LoadedVersion,
    Meta,
    Priority,
    Tenant,
    VersionState,
    Worker,
)
from services.gateway.catalog import ModelCatalog
from services.gateway.splits import Splits
from services.gateway.text.encoder import TextEncoder, load_encoder
from services.runtime.fleet_state.informer import Versioned
from services.runtime.identity import KeyDirectory
from simulator.fleet.nodes.gateway_node import LocalTexts

DIGEST = "sha256:" + "ab" * 32
SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('the role must be system, user or assistant') }}{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] | trim) + eos_token }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
CORPUS = ("def add(a, b):\n    return a + b\n", "the quick brown fox jumps over it. <b>Hi</b> x < y") * 20


@dataclass
class FakeClock:
    now_s: float = 1_000.0
    wall_s: float = 1_800_000_000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.wall_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


@dataclass
class View:
    """An informer's view that a test writes."""

    records: dict[str, Versioned[Any]] = field(default_factory=dict)
    aged_s: float = 0.0

    @property
    def view(self) -> Mapping[str, Versioned[Any]]:
        return self.records

    def age_s(self) -> float:
        return self.aged_s

    def put(self, key: str, record: Any, revision: int = 1) -> None:
        # A new mapping, as the informer makes one: readers keep indexes by its identity.
        self.records = {**self.records, key: Versioned(record, 1, revision)}


@dataclass
class LocalFiles:
    """Model files that are there already."""

    folder: Path
    fetched: list[tuple[str, str]] = field(default_factory=list)
    pins: int = 0
    of_version: dict[str, Path] = field(default_factory=dict)

    async def fetch(self, model: str, digest: str, *, only: Callable[[str], bool] | None = None) -> Path:
        self.fetched.append((model, digest))
        return self.of_version.get(digest, self.folder)

    async def readable(self, model: str, digest: str) -> Manifest:
        folder = self.of_version.get(digest, self.folder)
        files = [folder / name for name in (POLICY_NAME, PROBE) if (folder / name).exists()]
        return Manifest(
            tuple(ManifestFile(one.name, one.stat().st_size, sha256_of(one.read_bytes())) for one in files)
        )

    def pin(self, folder: Path) -> None:
        self.pins += 1

    def unpin(self, folder: Path) -> None:
        self.pins -= 1


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, *, context: int = 128, template: str = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": context, "eos_token_id": 1}
    generation = {"eos_token_id": [1], "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.25}
    settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "chat_template": template}
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", settings),
    ):
        (folder / name).write_text(json.dumps(value))
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train()


@pytest.fixture(scope="session")
def model_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def encoder(model_folder: Path, clock: FakeClock) -> TextEncoder:
    return load_encoder(model_folder, DIGEST, clock)


@pytest.fixture
def make_folder(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Path]:
    """A model folder of its own, with another context or template."""

    def make(**changes: Any) -> Path:
        return write_folder(tmp_path / "model", tokenizer, **changes)

    return make


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@dataclass
class Fleet:
    """One tenant, one deployment ``chat-small`` of model ``tiny``, one ready worker."""

    keys: View
    tenants: View
    deployments: View
    workers: View
    files: LocalFiles
    routes: View
    scaled: View
    sized: View
    catalog: ModelCatalog
    identity: KeyDirectory
    clock: FakeClock
    splits: Splits

    def ready(
        self,
        worker_id: str = "w0",
        *,
        max_model_len: int = 96,
        draining: bool = False,
        capabilities: tuple[str, ...] = (),
    ) -> None:
        version = LoadedVersion(
            "chat-small",
            "tiny",
            DIGEST,
            VersionState.READY,
            max_model_len=max_model_len,
            capabilities=capabilities,
        )
        worker = Worker(worker_id, f"{worker_id}:1", draining=draining, versions=(version,))
        self.workers.put(WORKERS + worker_id, worker)


@pytest.fixture
def fleet(model_folder: Path, clock: FakeClock, executor: ThreadPoolExecutor) -> Fleet:
    keys, tenants, deployments, workers, routes = View(), View(), View(), View(), View()
    scaled, sized = View(), View()
    files = LocalFiles(model_folder)
    splits = Splits(routes)
    found = Fleet(
        keys,
        tenants,
        deployments,
        workers,
        files,
        routes,
        scaled,
        sized,
        ModelCatalog(
            deployments,
            workers,
            files,
            clock,
            texts=LocalTexts(executor, clock),
            splits=splits,
            scaled=scaled,
            sized=sized,
            aliases={"org/Chat-Small": "chat-small", "org/Gone": "gone"},
        ),
        KeyDirectory(keys, tenants, clock),
        clock,
        splits,
    )
    tenants.put(TENANTS + "acme", Tenant(Meta("acme"), max_priority=Priority.STANDARD))
    deployments.put(DEPLOYMENTS + "chat-small", Deployment(Meta("chat-small"), "tiny", "v1", DIGEST, 1), 42)
    found.ready()
    return found
