"""Versions' text files, honest and hostile, and a watcher of the event loop's gaps."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.text.pool import TextProcesses
from services.gateway.text.text_model import TextModel
from services.gateway.text.tokenise import Tokeniser

TINY = Path(__file__).parents[2] / "models" / "tiny" / "checkpoint"
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def write_version(
    folder: Path,
    *,
    change: Callable[[dict[str, Any]], None] | None = None,
    template: str = CHAT,
    context: int = 1_000_000,
) -> Path:
    """Write the bundled model's text files, its tokenizer.json changed, and return the folder."""
    folder.mkdir(parents=True)
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    settings = json.loads((TINY / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    shutil.copy(TINY / "tokenizer.json", folder)
    if change is not None:
        state = json.loads((folder / "tokenizer.json").read_text())
        change(state)
        (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


def doubling(times: int) -> Callable[[dict[str, Any]], None]:
    """A normaliser that makes ``2 ** times`` characters of each ``a``."""

    def change(state: dict[str, Any]) -> None:
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
        state["normalizer"] = {"type": "Sequence", "normalizers": [step] * times}

    return change


def splitting(pattern: str) -> Callable[[dict[str, Any]], None]:
    """A pre-tokenizer that splits by a regular expression."""

    def change(state: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        state["pre_tokenizer"]["pretokenizers"].insert(0, split)

    return change


@dataclass
class Bench:
    """Text processes, and a tokeniser over them."""

    processes: TextProcesses
    tokeniser: Tokeniser
    folder: Path

    async def version(self, name: str, **how: Any) -> TextModel:
        """Return a loaded version of that name."""
        folder = write_version(self.folder / name, **how)
        return await self.processes.load(f"sha256:{name}", lambda: nullcontext(folder))


@dataclass
class Gaps:
    """``worst_s``: the most processor time of this process, all threads, between two turns of the loop."""

    worst_s: float = 0.0


@asynccontextmanager
async def watched_loop(tick_s: float = 0.005) -> AsyncIterator[Gaps]:
    """Measure how much this process computes while the event loop runs nothing else."""
    gaps = Gaps()

    async def watch() -> None:
        while True:
            before_s = time.process_time()
            await asyncio.sleep(tick_s)
            gaps.worst_s = max(gaps.worst_s, time.process_time() - before_s)

    task = asyncio.ensure_future(watch())
    try:
        yield gaps
    finally:
        task.cancel()
