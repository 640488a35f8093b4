"""Where our engine's time goes: the interpreter's profiler around the production steps, in this process.

A function's own time includes what it calls in C++ or torch by way of ctypes; calls of torch that the
interpreter sees are lines of their own.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.engines.load import Request
from services.core.generation import OutputLimits, Prompt, Sampling
from services.worker.engine.core import Engine
from services.worker.engine.load.loading import load
from services.worker.engine_protocol import EngineConfig, Submit

SHOWN: Final = 16


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds that each function took by itself over one load, the greatest first."""

    own_s: Mapping[str, float]

    def lines(self) -> list[str]:
        whole_s = sum(self.own_s.values())
        return [f"  {own_s / whole_s:6.1%}  {name}" for name, own_s in list(self.own_s.items())[:SHOWN]]


def profile(checkpoint: Path, config: EngineConfig, requests: Sequence[Request]) -> Profile:
    """Return where one run of the load spends its time; a run before it is not counted."""
    engine, _ = load(msgspec.structs.replace(config, model_dir=str(checkpoint)), lambda *_: None)
    _run(engine, requests)
    with cProfile.Profile() as profiler:
        _run(engine, requests)
    counted: Any = pstats.Stats(profiler)
    own_s = {_named(*where): figures[2] for where, figures in counted.stats.items()}
    return Profile(dict(sorted(own_s.items(), key=lambda item: -item[1])))


def _named(file: str, line: int, function: str) -> str:
    return function if file.startswith("~") else f"{Path(file).stem}.{function}:{line}"


def _run(engine: Engine, requests: Sequence[Request]) -> None:
    for handle, request in enumerate(requests):
        count = request.output_tokens
        sampling, limits = Sampling(seed=0, temperature=0.0), OutputLimits(count, ignore_eos=True)
        engine.apply(Submit(handle, Prompt(request.prompt), sampling, limits, count))
    while engine.has_work:
        engine.step()
