"""transformers as a runner: ``python -m bench.engines.peers.transformers_runner MODEL static|continuous``.

Static: one padded batch of all requests, run for as long as its longest output; what is produced beyond a
request's own length does not count. Continuous: ``generate_batch``'s manager, 512 tokens a step.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any, Final

from bench.engines.peers.wire import Produce, Prompts, Run, claim_output, die_with_parent, serve, timed

STEP_TOKENS: Final = 512
PAGES: Final = 600
PAGE_TOKENS: Final = 32
SEQUENCES: Final = 32
WAIT_S: Final = 5.0


def main(model: str, mode: str) -> None:
    die_with_parent()
    out = claim_output()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    serve(out, timed(static(torch, loaded)) if mode == "static" else continuous(transformers, loaded))


def static(torch: Any, model: Any) -> Produce:
    """Return what pads all prompts on the left to one length."""

    def run(prompts: Prompts, outputs: list[int]) -> Prompts:
        longest, most = max(map(len, prompts)), max(outputs)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=most,
                min_new_tokens=most,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        rows = made[:, longest:].tolist()
        return [row[:count] for row, count in zip(rows, outputs, strict=True)]

    return run


def continuous(transformers: Any, model: Any) -> Run:
    """Return a run of the continuous batching manager. It is started for each load, and stopped after it:
    that is not timed.
    """
    settings: Any = importlib.import_module("transformers.generation.configuration_utils")

    def run(prompts: Prompts, outputs: list[int]) -> tuple[float, Prompts]:
        generation = transformers.GenerationConfig(
            max_new_tokens=max(outputs), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = settings.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=PAGES,
            max_batch_tokens=STEP_TOKENS,
            scheduler_type="fifo",
            use_cuda_graph=False,
            max_requests_per_batch=SEQUENCES,
            allow_block_sharing=False,
        )
        made: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=30
        ) as manager:
            began_s = time.perf_counter()
            names = [
                manager.add_request(input_ids=prompt, max_new_tokens=count)
                for prompt, count in zip(prompts, outputs, strict=True)
            ]
            while len(made) < len(prompts):
                result = manager.get_result(timeout=WAIT_S)
                if result is not None and result.is_finished():
                    made[result.request_id] = list(result.generated_tokens)
            wall_s = time.perf_counter() - began_s
        return wall_s, [made[name] for name in names]

    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
