"""A gateway in front of a real worker that runs a chat model and guard models of random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.core.generation import AnyGrant, Grant, NotAdmittedReason, PlaceSpec, StartSpec
from services.core.records import AssignedVersion, VersionState
from services.ports.worker import RunningSequence, SequenceSink, WorkerClient
from services.worker.slots.engine_settings import EngineSettings
from tests.integration.worker.harness import FolderSource, Harness, eventually, start_harness
from tests.support.rows_gateway import RowsGateway, Sockets, digest_of, rows_gateway, served

TINY: Final = Path(__file__).parents[2] / "models" / "tiny" / "checkpoint"
TEMPLATE: Final = (
    "{{ guideline | default('') }}{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
)
_BLOCK: Final = 16
_LOAD_S: Final = 240.0


def write_guard(
    folder: Path, family: str, *, seed: int = 0, template: str = TEMPLATE, context: int = 512, **fields: Any
) -> Path:
    """Write a random checkpoint of a family, with the tokenizer of the bundled model."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 4096, "num_key_value_heads": 2, "max_position_embeddings": context}
    sizes |= {"head_dim": 16, "eos_token_id": 1} | fields
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(TINY / "tokenizer.json", folder)
    settings = json.loads((TINY / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


class _Folders(FolderSource):
    """The model files of several versions."""

    def __init__(self, folders: dict[str, Path]) -> None:
        super().__init__(TINY)
        self._folders = folders

    async def fetch(self, model: str, digest: str, **options: Any) -> Path:
        await super().fetch(model, digest, **options)
        return self._folders[digest]


class _Placement:
    """Grants every sequence at once on the one worker. Keeps what was asked."""

    def __init__(self, worker: Harness) -> None:
        self._worker = worker
        self.asked: list[PlaceSpec] = []

    async def place(self, spec: PlaceSpec) -> Grant:
        self.asked.append(spec)
        worker, tokens = self._worker, spec.prompt_tokens + spec.max_output_tokens
        blocks = tokens // _BLOCK + 2
        incarnation, number = worker.host.grants.incarnation, len(self.asked)
        return Grant(
            worker.worker_id, worker.address, incarnation, 7, number, blocks, 5.0, spec.version_digest
        )

    def give_back(self, grant: AnyGrant) -> None: ...

    def over(self, grant: AnyGrant, refusal: NotAdmittedReason | None = None) -> None: ...


class _Workers:
    """Keeps what was started on the one worker."""

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self.started: list[StartSpec] = []

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        self.started.append(spec)
        return self._client.start(spec, sink)


@dataclass
class JudgedGateway:
    gateway: RowsGateway
    sockets: Sockets
    placement: _Placement
    workers: _Workers
    worker: Harness
    folder: Path

    def deploy_pack(self, name: str, **fields: Any) -> None:
        """Serve a pack of these fields."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "safety_policy.json").write_text(json.dumps(fields))
        self.gateway.deploy_pack(name, folder)


@asynccontextmanager
async def judged_gateway(
    folder: Path, models: dict[str, Path], *, on_vllm: Collection[str] = (), vllm_dir: Path | None = None
) -> AsyncIterator[JudgedGateway]:
    """Yield a gateway that serves these models, each by an engine of the worker, ``on_vllm`` by vLLM's."""
    versions = [
        AssignedVersion(name, name, digest_of(name), "vllm" if name in on_vllm else "torch")
        for name in models
    ]
    source = _Folders({digest_of(name): path for name, path in models.items()})
    settings = EngineSettings(kv_memory_bytes=32 << 20, block_size=_BLOCK, threads=1, operators="torch")
    worker = await start_harness(TINY, settings, assign=False, source=source, vllm_dir=vllm_dir)
    try:
        await worker.assign(*versions)
        digests = [one.version_digest for one in versions]
        await eventually(lambda: {*map(worker.state, digests)} == {VersionState.READY}, _LOAD_S)
        placement, workers = _Placement(worker), _Workers(worker.client)
        parts = {"placement": placement, "workers": workers, "runner": object()}
        async with rows_gateway(models, **parts) as gateway, served(gateway) as sockets:
            yield JudgedGateway(gateway, sockets, placement, workers, worker, folder)
    finally:
        await worker.close()
