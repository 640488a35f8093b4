"""How long weights take from the page cache into an engine: ``make bench-load``.

A bare read of the checkpoint's file into fresh memory, our load (checked, in panels for the operators),
``from_pretrained`` of transformers, and vLLM's model loader from the environment in ``--vllm-dir``, each in a
process of its own that has imported what it needs, in turns. A turn counts its fastest of ``LOADS``; vLLM
loads once per process. A ratio is the median over the rounds of ours over the other's.

The last line is ``RESULT {json}``: the ratios, null where there is no peer, and each one's seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.engines.checkpoints import checkpoint
from bench.engines.peers.vllm_runner import SETTINGS
from bench.results import print_result
from fairway.formats.decoder_config import parse_config
from fairway.formats.weights import SINGLE

MODEL: Final = "qwen100m"  # 400 MB
LOADS: Final = 3
LIMIT_S: Final = 600.0
ROOT: Final = Path(__file__).parents[1]


def main(argv: Sequence[str]) -> None:
    options = _options(argv)
    if options.side:
        print(json.dumps(SIDES[options.side](options.model)))
        return
    with tempfile.TemporaryDirectory(prefix="fw-load-") as name:
        model = checkpoint(MODEL, options.folder or Path(name))
        python = {"vllm": options.vllm_dir / "bin" / "python"} if options.vllm_dir else {}
        sides = [side for side in SIDES if side != "vllm" or python]
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                seconds[side].append(_turn(side, model, python.get(side, Path(sys.executable))))
        size = (model / SINGLE).stat().st_size
    for side, found in seconds.items():
        rates = ", ".join(f"{size / each / 1e9:.2f}" for each in found)
        print(f"{side}: {median(found):.3f} s, GB/s in each round: {rates}")

    def over(side: str) -> list[float] | None:
        if side not in seconds:
            return None
        return [a / b for a, b in zip(seconds["own"], seconds[side], strict=True)]

    print_result(
        {
            "load_over_read": over("read"),
            "vs_transformers": over("transformers"),
            "vs_vllm": over("vllm"),
            **{f"{side}_s": found for side, found in seconds.items()},
        }
    )


def _turn(side: str, model: Path, python: Path) -> float:
    command = [str(python), "-m", "bench.load", "--side", side, "--model", str(model)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def _read(model: Path) -> float:
    path = model / SINGLE
    return _fastest(lambda: [path.read_bytes()])


def _own(model: Path) -> float:
    loading: Any = importlib.import_module("services.worker.engine.load.torch_loading")
    protocol: Any = importlib.import_module("services.worker.engine_protocol")
    fields = parse_config(json.loads((model / "config.json").read_text("utf-8")))
    config = protocol.EngineConfig(model_dir=str(model), socket_path="")
    return _fastest(lambda: loading.load_weights_of(fields, model, config, lambda _phase, _ratio: None))


def _transformers(model: Path) -> float:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")

    def load() -> object:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        # A parameter that is mapped is read at its first use.
        return [loaded, sum(float(each.detach().sum()) for each in loaded.parameters())]

    return _fastest(load)


def _vllm(model: Path) -> float:
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    os.environ.update(SETTINGS | {"VLLM_CPU_OMP_THREADS_BIND": cores})
    vllm: Any = importlib.import_module("vllm")
    base: Any = importlib.import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader
    load, seconds = base.load_model, []

    def timed(*given: Any, **named: Any) -> Any:
        began_s = time.perf_counter()
        loaded = load(*given, **named)
        seconds.append(time.perf_counter() - began_s)
        return loaded

    base.load_model = timed
    vllm.LLM(str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=1024, enforce_eager=True)
    return seconds[0]


def _fastest(load: Callable[[], object]) -> float:
    found = []
    for _ in range(LOADS):
        began_s = time.perf_counter()
        loaded = load()
        found.append(time.perf_counter() - began_s)
        del loaded
    return min(found)


SIDES: Final[dict[str, Callable[[Path], float]]] = {
    "read": _read,
    "own": _own,
    "transformers": _transformers,
    "vllm": _vllm,
}


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept")
    parser.add_argument("--vllm-dir", type=Path, help="environment with vLLM")
    parser.add_argument("--side", choices=sorted(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
