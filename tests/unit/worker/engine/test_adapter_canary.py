"""The trial of adapters at an engine's start: an executor that errs in silence does not promise them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine.execute.executor import Batch, Executor, Samples
from services.worker.engine.load.canary import FIRST_ADAPTER
from services.worker.engine.load.loading import load
from services.worker.engine.sequence import SequenceState
from services.worker.engine_protocol import AdapterRefused, EngineConfig, LoadAdapter, Ready
from tests.support.adapters import write_adapter

pytest.importorskip("torch")
Wrong = Callable[[list[SequenceState]], dict[int, int]]


class Erring:
    """Computes some sequences of a step with other adapters than they name: by place, those of ``wrong``."""

    runs_ahead = False

    def __init__(self, inner: Executor, wrong: Wrong) -> None:
        self._inner, self._wrong = inner, wrong
        self._right: list[tuple[SequenceState, int]] = []

    def submit(self, batch: Batch) -> None:
        sequences = [*batch.decodes, *(chunk.sequence for chunk in batch.prefills)]
        self._right = [(sequence, sequence.adapter) for sequence in sequences]
        for place, adapter in self._wrong(sequences).items():
            sequences[place].adapter = adapter
        self._inner.submit(batch)

    def collect(self) -> Samples:
        try:
            return self._inner.collect()
        finally:
            for sequence, adapter in self._right:
                sequence.adapter = adapter

    def resize(self, blocks: int) -> None:
        self._inner.resize(blocks)


def right(_: list[SequenceState]) -> dict[int, int]:
    return {}


def the_last_for_the_base(sequences: list[SequenceState]) -> dict[int, int]:
    """What vLLM's own adapters do on CPUs."""
    last = max(sequence.adapter for sequence in sequences)
    return {place: last for place, sequence in enumerate(sequences) if not sequence.adapter}


def one_without_effect(sequences: list[SequenceState]) -> dict[int, int]:
    """As where a layer's product is computed in another way, past the hook."""
    return {place: 0 for place, each in enumerate(sequences) if each.adapter == FIRST_ADAPTER + 2}


def one_by_its_company(sequences: list[SequenceState]) -> dict[int, int]:
    """An adapter that runs as another one unless it is alone."""
    if len(sequences) == 1:
        return {}
    return {
        place: each.adapter - 1 for place, each in enumerate(sequences) if each.adapter == FIRST_ADAPTER + 1
    }


@pytest.mark.parametrize("wrong", [right, the_last_for_the_base, one_without_effect, one_by_its_company])
def test_adapters_are_promised_only_where_they_were_shown(
    save_model: Callable[..., Any], operators_cache: Path, tmp_path: Path, wrong: Wrong
) -> None:
    folder = save_model("Llama", seed=5)[1]
    config = EngineConfig("", str(folder), kv_blocks=64, threads=1, operators_cache=str(operators_cache))

    def around(inner: Executor) -> Executor:
        return Erring(inner, wrong)

    engine, ready = load(config, lambda *_: None, around=around)
    assert isinstance(ready, Ready)
    assert "exact" in ready.capabilities
    assert ("adapters" in ready.capabilities) == (wrong is right)
    sent: list[Any] = []
    link: Any = type("Link", (), {"send": staticmethod(sent.append)})
    engine.connect(link)
    engine.apply(LoadAdapter(1, str(write_adapter(tmp_path / "one", folder, seed=1))))
    assert isinstance(sent[0], AdapterRefused) == (wrong is not right)
