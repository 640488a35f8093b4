"""vLLM's CPU build as a runner: ``python -m bench.engines.peers.vllm_runner MODEL compiled|eager``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

from bench.engines.peers.wire import Prompts, claim_output, die_with_parent, serve, timed

SETTINGS: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(model: str, mode: str) -> None:
    die_with_parent()
    out = claim_output()
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    os.environ.update(SETTINGS | {"VLLM_CPU_OMP_THREADS_BIND": cores})
    vllm: Any = importlib.import_module("vllm")  # not installed where types are checked
    engine = vllm.LLM(
        model,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        block_size=32,
        enable_prefix_caching=False,
        enforce_eager=mode == "eager",
    )

    def run(prompts: Prompts, outputs: list[int]) -> Prompts:
        sampling = [
            vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in outputs
        ]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = engine.generate(given, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    serve(out, timed(run))


if __name__ == "__main__":
    main(*sys.argv[1:])
