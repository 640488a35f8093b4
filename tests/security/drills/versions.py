"""Attacks by what is published: tokenizers, chat templates, weights that claim too much."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc

from fairway.cli.fleet.options import bundled_checkpoint
from fairway.client import FairwayError
from fairway.client.publish.publish import PublishRefused
from fairway.formats.version_files import weights_digest
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import registry_pb2 as rg
from fairway.v1 import registry_pb2_grpc
from services.runtime.clock import SystemClock
from tests.security.drills.http import post, status_of
from tests.security.drills.installation import admin_client
from tests.security.drills.judge import Found
from tests.security.drills.target import Attack, Target
from tests.security.drills.tenants import CHAT, COMPLETIONS
from tests.support.stack import metadata

READY_S: Final = 45.0
ANSWER_S: Final = 40.0
MAX_CREATE_S: Final = 5.0
CHUNK_BYTES: Final = 4 * 1024**2
REPEATS: Final = 1000
TENSORS: Final = 550_000
_PIECE_BYTES: Final = 1024**2
now_s = SystemClock().monotonic_s

# Each costs seconds to hours, unless what it does is charged before it is done.
TEMPLATE_BOMBS: Final = {
    "sum": "{{ range(99999)|map('string')|map('list')|sum(start=[])|length }}",
    "sort": "{% for i in range(3000) %}{% set x = range(99999)|sort(reverse=true) %}{% endfor %}",
    "max": "{% for i in range(3000) %}{% set x = range(99999)|max %}{% endfor %}",
    "map": "{% for i in range(3000) %}{% set x = range(99999)|map('string')|list %}{% endfor %}",
    "equal": "{% set a = range(99999)|list %}{% set b = range(99999)|list %}"
    "{% for i in range(9000) %}{% set x = a == b %}{% endfor %}",
    "count": "{% set a = range(99999)|list %}{% for i in range(9000) %}{% set x = a.count(7) %}{% endfor %}",
    "round": "{{ 1|round(30000000, 'floor') }}",
}


@contextlib.contextmanager
def checkpoint(edit: Callable[[Path], object]) -> Iterator[Path]:
    """A copy of the bundled checkpoint, edited."""
    with tempfile.TemporaryDirectory(prefix="fairway-drill-") as folder:
        copy = Path(folder) / "checkpoint"
        shutil.copytree(bundled_checkpoint(), copy)
        edit(copy)
        yield copy


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@contextlib.asynccontextmanager
async def deployed(target: Target, name: str, edit: Callable[[Path], object]) -> AsyncIterator[str]:
    """Publish and deploy an edited checkpoint; yield why it is not served, "" when it is."""
    async with admin_client(target) as admin:
        why = ""
        try:
            with checkpoint(edit) as folder:
                published = await admin.models.publish(folder, name, "latest", for_another_engine=True)
            wanted = cp.Deployment(
                metadata=cp.Metadata(name=name), model=name, version=published.digest, replicas=1
            )
            await admin.deployments.create(wanted)
            await admin.deployments.wait_ready(name, timeout_s=READY_S)
            await asyncio.sleep(1.0)  # gateways receive the route a moment later
        except (FairwayError, PublishRefused) as error:
            why = f"{error}"[:150]
        try:
            yield why
        finally:
            with contextlib.suppress(FairwayError):
                await admin.deployments.delete(name)


async def ask(target: Target, path: str, count: int, **body: object) -> list[int]:
    """Send the same request so often at once, to the gateways in turn; return the statuses. 0: no answer."""
    request = post(path, json.dumps({"max_tokens": 4, **body}).encode(), target.keys["drills"])
    works = [
        status_of(target.gateways[number % 2].http, request, timeout_s=ANSWER_S) for number in range(count)
    ]
    return [status for status, _ in await asyncio.gather(*works)]


async def long_prompts(target: Target) -> Found:
    found = Found()

    def edit(folder: Path) -> None:
        change_json(folder / "config.json", lambda it: it.update(max_position_embeddings=131_072))

    async with deployed(target, "drill-long", edit) as why:
        if why:
            return Found(wrong=[f"a model of a long context is not served: {why}"])
        text = "def push(self, item):\n    total_1 = 2\n"
        for count in (1, 6):
            prompt = text * (2_600_000 // len(text))
            statuses = await ask(target, COMPLETIONS, count, model="drill-long", prompt=prompt)
            found.did.append(f"{count} at once: {sorted(set(statuses))}")
            if set(statuses) - {400, 413, 422, 429, 503}:
                found.wrong.append(f"a prompt above the context was answered {statuses}")
    return found


async def _tokenizer(
    target: Target, name: str, prompt: str, change: Callable[[dict[str, Any]], object]
) -> Found:
    found = Found()
    async with deployed(target, name, lambda folder: change_json(folder / "tokenizer.json", change)) as why:
        if why:
            return Found(did=[f"not served: {why}"])
        for path, body in (
            (COMPLETIONS, {"prompt": prompt}),
            (CHAT, {"messages": [{"role": "user", "content": prompt}]}),
        ):
            statuses = await ask(target, path, 4, model=name, **body)
            found.did.append(f"4 at once: {statuses}")
            if 0 in statuses:
                found.wrong.append(f"no answer within {ANSWER_S:g} s: {statuses}")
    return found


async def tokenizer_regex(target: Target) -> Found:
    def change(tokenizer: dict[str, Any]) -> None:
        first = tokenizer["pre_tokenizer"]["pretokenizers"][0]
        first["pattern"] = {"Regex": "(a+)+$"}

    return await _tokenizer(target, "drill-regex", "a" * 4000 + "b", change)


async def tokenizer_normaliser(target: Target) -> Found:
    def change(tokenizer: dict[str, Any]) -> None:
        double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [double] * 24}

    return await _tokenizer(target, "drill-normaliser", "aaaaa", change)


async def templates(target: Target) -> Found:
    found = Found()
    cases = "".join(
        f"{{% if messages[0].content == '{name}' %}}{bomb}{{% endif %}}"
        for name, bomb in TEMPLATE_BOMBS.items()
    )

    def edit(folder: Path) -> None:
        template = "<|user|>{{ messages[0].content }}" + cases
        change_json(folder / "tokenizer_config.json", lambda it: it.update(chat_template=template))

    async with deployed(target, "drill-template", edit) as why:
        if why:
            return Found(did=[f"not served: {why}"])
        for name in (*TEMPLATE_BOMBS, "plain"):
            began_s = now_s()
            messages = [{"role": "user", "content": name}]
            statuses = await ask(target, CHAT, 2, model="drill-template", messages=messages)
            found.did.append(f"{name}: {statuses} in {now_s() - began_s:.1f} s")
            if 0 in statuses or (name == "plain" and statuses != [200, 200]):
                found.wrong.append(f"the template's case {name} was answered {statuses}")
    return found


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _claiming_chunk() -> bytes:
    """Return the first chunk of a file that is nothing but this chunk, over and over."""
    total = CHUNK_BYTES * REPEATS
    room = total - 8 - 4096
    tensor = {"weight": {"dtype": "U8", "shape": [room], "data_offsets": [0, room]}}
    header = json.dumps(tensor).encode().ljust(4096)
    return ((4096).to_bytes(8, "little") + header).ljust(CHUNK_BYTES, b"\x01")


async def _create(
    target: Target, model: str, chunks: list[bytes], whole: str, repeats: int
) -> tuple[str, float]:
    """Make a version whose weights repeat these chunks; return outcome and seconds."""
    names, admin = [_digest(chunk) for chunk in chunks], metadata(target.admin_key)
    file = rg.ManifestFile(
        path="model.safetensors",
        size_bytes=sum(map(len, chunks)) * repeats,
        digest=whole,
        chunks=names * repeats,
    )
    async with grpc.aio.insecure_channel(target.registry) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        served = await stub.GetVersion(
            rg.GetVersionRequest(model=target.model, version="latest"), metadata=admin, timeout=15
        )
        manifest = served.version.manifest  # of a version that is good but for its weights
        kept = [each for each in manifest.files if each.path != file.path]
        del manifest.files[:]
        manifest.files.extend(sorted([*kept, file], key=lambda each: each.path))
        manifest.weights_digest = weights_digest([(file.path, file.digest)])
        for name, chunk in zip(names, chunks, strict=True):
            header = rg.ChunkHeader(digest=name, size_bytes=len(chunk))
            pieces = [chunk[at : at + _PIECE_BYTES] for at in range(0, len(chunk), _PIECE_BYTES)]
            parts = [
                rg.UploadChunkRequest(header=header),
                *(rg.UploadChunkRequest(data=each) for each in pieces),
            ]
            await stub.UploadChunk(iter(parts), metadata=admin, timeout=30)
        began_s, outcome = now_s(), "accepted"
        try:
            request = rg.CreateVersionRequest(model=model, manifest=manifest)
            await stub.CreateVersion(request, metadata=admin, timeout=60)
        except grpc.aio.AioRpcError as error:
            outcome = f"{error.code().name} {error.details()}"[:200]
    return outcome, now_s() - began_s


async def repeated_chunks(target: Target) -> Found:
    """Store 4 MiB and claim a file of 3.9 GiB by naming them 1,000 times."""
    chunk, whole = _claiming_chunk(), hashlib.sha256()
    for _ in range(REPEATS):
        await asyncio.to_thread(whole.update, chunk)
    outcome, took_s = await _create(target, "drill-claims", [chunk], f"sha256:{whole.hexdigest()}", REPEATS)
    found = Found(did=[f"{outcome} after {took_s:.1f} s"])
    if not outcome.startswith(("INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED")):
        found.wrong.append("4 MiB that claim 3.9 GiB were not refused")
    if took_s > MAX_CREATE_S:
        found.wrong.append(f"4 MiB that claim 3.9 GiB kept the registry for {took_s:.1f} s")
    return found


async def many_tensors(target: Target) -> Found:
    tensor = '"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(tensor % number for number in range(TENSORS)) + "}").encode()
    data = len(header).to_bytes(8, "little") + header
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    outcome, took_s = await _create(target, "drill-tensors", chunks, _digest(data), 1)
    found = Found(did=[f"a header of {len(header) / 1e6:.0f} MB: {outcome} after {took_s:.1f} s"])
    if took_s > MAX_CREATE_S:
        found.wrong.append(f"a header of {TENSORS} tensors kept the registry for {took_s:.1f} s")
    return found


VERSIONS: Final = (
    Attack(
        "long-prompts", "2.6 MB to a long context, one and six at once", "canaries go on", long_prompts, 150
    ),
    Attack("tokenizer-regex", "a version with `(a+)+$`", "only the request ends", tokenizer_regex, 150),
    Attack(
        "tokenizer-normaliser",
        "one that doubles 24 times",
        "only the request ends",
        tokenizer_normaliser,
        150,
    ),
    Attack("template-bombs", "templates that compute for hours", "only the request ends", templates, 300),
    Attack("registry-chunks", "4 MiB stored that claim 3.9 GiB", "refused within 5 s", repeated_chunks, 120),
    Attack("registry-header", "a header of 550,000 tensors", "answered within 5 s", many_tensors, 120),
)
