"""The engine on a CUDA device, against what the device could do and against transformers.

``make bench-gpu``. Random weights in the shapes of Llama 1B and 8B, bfloat16, made on the device; the
production engine, planner and executor in this process. First the device's own rates: a large copy, read and
written bytes counted, and a large matrix product. Then, of each shape:

- ``decode_roofline_b*``: the least time of a decode step (weights and KV over the copy's rate, or products
  over the matrix rate) over the measured one, with engine and sampling in it, at contexts of 1,024 to 1,088
- ``prefill_matmul_ratio``: the least time to prefill 16 prompts of 1,024 tokens over the measured one
- ``vs_transformers_continuous``: output tokens/s over those of transformers' continuous batching, 64 requests
  at once with the same weights, the median over pairs of turns; null where transformers is not installed
- ``prefill_torch_over_triton``: the time of one layer's prefill attention by torch over that by ours; null
  where this torch takes no block tables on this device. All else is measured with ours.
- ``exact_over_free_decode_b*``, ``exact_over_free_prefill``: the speed of mode "exact" over that of "free",
  in which all else is measured

The last line is ``RESULT {json}``. Without a CUDA device and Triton nothing is measured: exit status 3.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from random import Random
from typing import Any, Final, Literal

import torch

from bench.engines.load import Request, random_ids
from bench.gpus.own import OwnEngine, decode_ratio, own_engine, prefill_ratio, tokens_per_s
from bench.gpus.random_model import SHAPES, transformers_model
from bench.gpus.roofline import Rates, Work, measured_rates
from bench.results import Figure, print_result
from services.worker.engine.cuda.backend import cutting_of, has_kernels
from services.worker.engine.execute.kv_cache import kv_shape
from services.worker.engine_protocol import EngineConfig

NO_DEVICE: Final = 3  # exit status
BATCHES: Final = (1, 32, 256)
PROMPT_TOKENS: Final = 1024
OUTPUT_TOKENS: Final = 64
MAX_MODEL_LEN: Final = 1280
PREFILLS: Final = 16
BLOCK_SIZE: Final = 16
TOKEN_BUDGET: Final = 8192
REQUESTS: Final = 64
REQUEST_PROMPT: Final = (64, 1024)
REQUEST_OUTPUT: Final = (64, 192)
WAIT_S: Final = 60.0  # for a result of transformers
PAGE_TOKENS: Final = 256  # transformers' own page

Figures = dict[str, Figure]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=["1b", "8b"], default=["1b", "8b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device(options.device)
    if (missing := why_not(device)) is not None:
        print(f"bench-gpu: nothing was measured: {missing}", file=sys.stderr)
        return NO_DEVICE
    figures: Figures = {}
    with torch.inference_mode():
        rates = measured_rates(device, torch.bfloat16)
        print(f"{torch.cuda.get_device_name(device)}: {rates.copy_bytes_per_s / 1e12:.2f} TB/s copied,")
        print(
            f"{rates.matmul_flops_per_s / 1e12:.0f} TFLOP/s multiplied, torch {torch.__version__}", flush=True
        )
        for name in options.shapes:
            figures |= measure(name, device, rates, rounds=options.rounds)
            torch.cuda.empty_cache()
    if "8b" in options.shapes:
        figures["vs_transformers_continuous"] = figures["vs_transformers_continuous_8b"]
    print_result(figures)
    return 0


def why_not(device: torch.device) -> str | None:
    """Return what is missing to measure on this device, or None."""
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None if has_kernels(device) else "Triton, or a device that it has kernels for, is missing"


def measure(name: str, device: torch.device, rates: Rates, *, rounds: int) -> Figures:
    """Return the figures of one shape, printed as they come."""
    own = own_engine(SHAPES[name], config_of(device), max_model_len=MAX_MODEL_LEN)
    work = Work(own.model, torch.bfloat16.itemsize)
    prompt = random_ids(Random(1), PROMPT_TOKENS)
    figures: Figures = {}
    for batch in BATCHES:
        figures[f"decode_roofline_b{batch}_{name}"] = decode_ratio(
            own, work, rates, prompt=prompt, batch=batch, output_tokens=OUTPUT_TOKENS
        )
    figures[f"prefill_matmul_ratio_{name}"] = prefill_ratio(
        own, work, rates, prompt=prompt, prompts=PREFILLS, rounds=rounds
    )
    figures[f"prefill_torch_over_triton_{name}"] = prefill_backends(own, device)
    figures |= exact_over_free(name, device, rates, prompt=prompt, free=figures)
    figures[f"vs_transformers_continuous_{name}"] = None
    try:
        figures[f"vs_transformers_continuous_{name}"] = beside_transformers(
            own, SHAPES[name], device, rounds=rounds
        )
    except Exception as error:  # whatever a peer raises, what was measured of ours stands
        print(f"  transformers failed: {type(error).__name__}: {error}")
    for key, value in figures.items():
        print(f"  {key}: {value}", flush=True)
    return figures


def exact_over_free(
    name: str, device: torch.device, rates: Rates, *, prompt: Sequence[int], free: Figures
) -> Figures:
    """Return how many times as fast the same steps are where nothing depends on company."""
    exact = own_engine(SHAPES[name], config_of(device, "exact"), max_model_len=MAX_MODEL_LEN)
    work = Work(exact.model, torch.bfloat16.itemsize)
    figures: Figures = {}
    for batch in (min(BATCHES), max(BATCHES)):
        ratio = decode_ratio(exact, work, rates, prompt=prompt, batch=batch, output_tokens=OUTPUT_TOKENS)
        figures[f"exact_over_free_decode_b{batch}_{name}"] = over(
            ratio, free[f"decode_roofline_b{batch}_{name}"]
        )
    ratio = prefill_ratio(exact, work, rates, prompt=prompt, prompts=PREFILLS, rounds=1)
    figures[f"exact_over_free_prefill_{name}"] = over(ratio, free[f"prefill_matmul_ratio_{name}"])
    return figures


def over(figure: float, other: Figure) -> float | None:
    return figure / other if isinstance(other, float) and other else None


def prefill_backends(own: OwnEngine, device: torch.device) -> float | None:
    """Return torch's time over ours; above 1, ours is faster."""
    from bench.gpus.attention import torch_over_triton, whole_prompts  # importing it imports Triton

    shape = kv_shape(own.model, block_size=BLOCK_SIZE, dtype=torch.bfloat16)
    cutting = cutting_of(shape, device, exact=False)
    spans = whole_prompts(TOKEN_BUDGET // PROMPT_TOKENS, PROMPT_TOKENS, BLOCK_SIZE)
    return torch_over_triton(own.model, device, cutting, spans=spans, block_size=BLOCK_SIZE)


def beside_transformers(
    own: OwnEngine, fields: Mapping[str, Any], device: torch.device, *, rounds: int
) -> list[float] | None:
    """Return how many times as many tokens/s ours makes, by round; None without transformers."""
    if find_spec("transformers") is None:
        print("  transformers is not installed: nothing to compare with")
        return None
    peer = transformers_model(fields, device, torch.bfloat16)
    requests = workload()
    blocks = sum(-(-(len(each.prompt) + each.output_tokens) // PAGE_TOKENS) + 1 for each in requests)
    ratios = []
    for number in range(rounds + 1):
        ours = tokens_per_s(own, requests)
        theirs = transformers_tokens_per_s(peer, requests, blocks=blocks, step_tokens=TOKEN_BUDGET)
        if number:  # the first turns compile
            print(f"  {ours:.0f} tokens/s of ours, {theirs:.0f} of transformers")
            ratios.append(ours / theirs)
    return ratios


def workload() -> tuple[Request, ...]:
    """Return requests that arrive at once; those with seed 0 are the same in every run."""
    rng = Random(0)
    return tuple(
        Request(random_ids(rng, rng.randint(*REQUEST_PROMPT)), rng.randint(*REQUEST_OUTPUT))
        for _ in range(REQUESTS)
    )


def config_of(device: torch.device, mode: Literal["exact", "free"] = "free") -> EngineConfig:
    """Return the engine's configuration; its KV holds the largest batch."""
    blocks = -(-MAX_MODEL_LEN // BLOCK_SIZE)
    return EngineConfig(
        socket_path="",
        model_dir="",
        device=str(device),
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        kv_blocks=max(BATCHES) * (blocks + 1),
        token_budget=TOKEN_BUDGET,
        max_sequences=max(BATCHES),
        mode=mode,
    )


def transformers_tokens_per_s(
    model: Any, requests: Sequence[Request], *, blocks: int, step_tokens: int
) -> float:
    """Return output tokens per second of requests that arrive at once.

    ``blocks`` of its own page size hold the KV, a step has at most ``step_tokens``; all else is as it
    chooses by itself. Starting the manager is not counted.
    """
    transformers: Any = importlib.import_module("transformers")
    settings: Any = importlib.import_module("transformers.generation.configuration_utils")
    generation = transformers.GenerationConfig(
        max_new_tokens=max(request.output_tokens for request in requests),
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    batching = settings.ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=step_tokens)
    produced = finished = 0
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True, timeout=WAIT_S
    ) as manager:
        began_s = time.perf_counter()
        for request in requests:
            manager.add_request(input_ids=request.prompt, max_new_tokens=request.output_tokens)
        while finished < len(requests):
            result = manager.get_result(timeout=WAIT_S)
            if result is None:
                raise RuntimeError(f"{finished} of {len(requests)} requests finished in time")
            if result.is_finished():
                finished += 1
                produced += len(result.generated_tokens)
        wall_s = time.perf_counter() - began_s
    if produced != sum(request.output_tokens for request in requests):
        raise RuntimeError(f"{produced} tokens received, not all that were expected")
    return produced / wall_s


if __name__ == "__main__":
    sys.exit(main())
