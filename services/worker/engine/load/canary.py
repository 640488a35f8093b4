"""What a loaded engine promises, found by trying it.

Sequences run alone, then in company with their prompts cut, then resumed in the middle. Their
log-probabilities, and the scores of a probe, are compared by bits, because equal tokens hide differences that
change one in a million.

Adapters of one product each run beside the base: each has to change its sequence, and no bit of the others.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from safetensors.numpy import save_file

from fairway.formats.adapter import PRODUCTS, adapter_layout, parse_adapter
from fairway.formats.decoder_config import ModelConfig
from fairway.formats.version_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from services.core.generation import OutputLimits, Prompt, Sampling
from services.worker.engine.core import Engine
from services.worker.engine_protocol import DropAdapter, LoadAdapter, SampledLogprobs, Submit

PROMPT_TOKENS: Final = (5, 40, 97, 140)
TOKENS: Final = 6
RESUMED_AT: Final = 3
# The base is first and last, beside adapters of one product each.
ADAPTED_TOKENS: Final = (9, 5, 12, 7, 3, 11)
FIRST_ADAPTER: Final = 1 << 30  # no number that an agent comes to
Output = list[tuple[int, SampledLogprobs, float]]  # tokens, with the score of a probe


def is_exact(fresh: Callable[[], Engine], vocab_size: int) -> bool:
    """Return whether sequences are the same alone, in company and resumed.

    ``fresh`` returns an engine without sequences.
    """
    engine = fresh()
    submits = [
        msgspec.structs.replace(submit, probe=engine.has_probe)
        for submit in _submits(vocab_size, engine.max_model_len, PROMPT_TOKENS)
    ]
    alone = [_run(fresh(), [each])[0] for each in submits]
    if _run(fresh(), submits) != alone:
        return False
    cut = [output[:RESUMED_AT] for output in alone]
    resumed = [
        msgspec.structs.replace(submit, produced_ids=[token for token, *_ in output])
        for submit, output in zip(submits, cut, strict=True)
    ]
    rest = _run(fresh(), resumed)
    return [first + last for first, last in zip(cut, rest, strict=True)] == alone


def serves_adapters(engine: Engine, vocab_size: int, model: ModelConfig, *, exact: bool) -> bool:
    """Return whether adapters change the sequences that name them, and no bit of those of the base.

    The same steps run without and with adapters, so that this holds as well for an engine whose results
    depend on company. On an ``exact`` one each sequence is also the same alone.
    """
    plain = _submits(vocab_size, engine.max_model_len, ADAPTED_TOKENS)
    numbers = [0, *(FIRST_ADAPTER + place for place in range(len(PRODUCTS))), 0]
    count = len(plain)
    adapted = [
        msgspec.structs.replace(submit, handle=count + place, adapter=numbers[place])
        for place, submit in enumerate(plain)
    ]
    before = _run(engine, plain)
    with tempfile.TemporaryDirectory(prefix="fw-canary-") as root:
        for number, product in zip(numbers[1:-1], PRODUCTS, strict=True):
            folder = Path(root) / product
            _write(folder, product, model)
            engine.apply(LoadAdapter(number, str(folder)))
    beside = _run(engine, adapted)
    alone = beside
    if exact:
        again = [msgspec.structs.replace(submit, handle=count + submit.handle) for submit in adapted]
        alone = [_run(engine, [submit])[0] for submit in again]
    for number in numbers[1:-1]:
        engine.apply(DropAdapter(number))
    whole = all(len(output) == TOKENS for output in beside)
    return (
        whole
        and alone == beside
        and [one == other for one, other in zip(before, beside, strict=True)]
        == [not number for number in numbers]
    )


def _write(folder: Path, product: str, model: ModelConfig) -> None:
    """Write a drawn adapter of one product, about as large as what it is added to."""
    targets = [module.rpartition(".")[2] for module in PRODUCTS[product]]
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": targets}
    drawn = np.random.default_rng(0)
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    shapes = adapter_layout(parse_adapter(config), model).shapes
    tensors = {
        name: (drawn.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def _submits(vocab_size: int, longest: int, sizes: Sequence[int]) -> list[Submit]:
    drawn = random.Random(0)
    limits = OutputLimits(TOKENS, ignore_eos=True)
    submits = []
    for handle, wished in enumerate(sizes):
        size = max(1, min(wished, longest - TOKENS))
        prompt = Prompt([drawn.randrange(vocab_size) for _ in range(size)])
        sampling = Sampling(seed=handle, temperature=float(handle % 2), logprobs=0)
        submits.append(Submit(handle, prompt, sampling, limits, credit_limit=TOKENS))
    return submits


def _run(engine: Engine, submits: Sequence[Submit]) -> list[Output]:
    outputs: dict[int, Output] = {submit.handle: [] for submit in submits}
    for submit in submits:
        engine.apply(submit)
    while engine.has_work:
        stepped = engine.step()
        probed = stepped.probe_scores or [0.0] * len(stepped.tokens)
        for handle, token, score in zip(stepped.handles, stepped.tokens, probed, strict=True):
            outputs[handle].append((token, stepped.logprobs[handle].pop(0), score))
    return list(outputs.values())
