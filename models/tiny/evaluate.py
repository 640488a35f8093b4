"""Prints the figures of the model card: held-out loss, baselines, samples, agreement with transformers.

Usage: python models/tiny/evaluate.py --checkpoint models/tiny/checkpoint
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from baseline import fit_baselines
from bpe import BOS, EOS, EOS_ID
from corpus import Document, load_corpus
from dataset import Encoded, load_streams
from modeling import Shape, TinyLlama
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

TEMPERATURE, TOP_P, SAMPLE_TOKENS = 0.7, 0.95, 160
PROMPTS = (
    f'{BOS}def read_lines(path):\n    """Return the lines of the file at path."""\n',
    f"{BOS}class Stack:\n    def __init__(self):\n",
    f"{BOS}<|user|>Explain `assert`.{EOS}<|assistant|>",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(options.checkpoint)
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    corpus = load_corpus()
    train, held_out = load_streams(corpus, tokenizer, seed=options.seed)
    report = {
        "data": {"train": describe(corpus.train, train), "held_out": describe(corpus.held_out, held_out)},
        "excluded": corpus.excluded,
        "loss": losses(model, train, held_out),
        "transformers_max_logit_difference": logit_difference(model, options.checkpoint, held_out[0]),
    }
    print(json.dumps(report, indent=2))
    for prompt in PROMPTS:
        print(f"--- {prompt!r}\n{complete(model, tokenizer, prompt, seed=options.seed)}")


def load_model(checkpoint: Path) -> TinyLlama:
    """The model of `checkpoint`, its bfloat16 weights widened to float32."""
    model = TinyLlama(Shape())
    weights = load_file(checkpoint / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.eval()


def describe(documents: Sequence[Document], encoded: Sequence[Encoded]) -> dict[str, dict[str, int]]:
    """Documents, bytes and tokens of each kind."""
    counts, sizes, tokens = Counter(e.kind for e in encoded), Counter[str](), Counter[str]()
    for item in encoded:
        sizes[item.kind] += item.size_bytes
        tokens[item.kind] += len(item.ids)
    return {
        kind: {"documents": counts[kind], "bytes": sizes[kind], "tokens": tokens[kind]}
        for kind in sorted(counts)
    }


def losses(
    model: TinyLlama, train: Sequence[Encoded], held_out: Sequence[Encoded]
) -> dict[str, dict[str, float]]:
    """Per kind and for all kinds but chat: nats per token and bits per byte of each model."""
    baselines = fit_baselines((e.ids for e in train), vocab=model.shape.vocab)
    spent: dict[str, Counter[str]] = {}
    for item in held_out:
        unigram, bigram = baselines.nats(item.ids)
        paid = {"model": model_nats(model, item), "unigram": unigram, "bigram": bigram}
        paid |= {"tokens": len(item.ids) - 1, "bytes": item.size_bytes}
        for kind in {item.kind, item.kind if item.kind == "chat" else "all but chat"}:
            spent.setdefault(kind, Counter()).update(paid)
    return {kind: _rates(total) for kind, total in sorted(spent.items())}


def _rates(total: Counter[str]) -> dict[str, float]:
    rates: dict[str, float] = {"tokens": total["tokens"], "bytes": total["bytes"]}
    for name in ("unigram", "bigram", "model"):
        rates[f"{name}_nats_per_token"] = round(total[name] / total["tokens"], 4)
        rates[f"{name}_bits_per_byte"] = round(total[name] / math.log(2) / total["bytes"], 4)
    return rates


@torch.no_grad()
def model_nats(model: TinyLlama, item: Encoded) -> float:
    """What the model pays for the document after its first token, read in windows that do not overlap."""
    ids = torch.from_numpy(item.ids.astype(np.int64))[None]
    nats = 0.0
    for start in range(0, ids.shape[1] - 1, model.shape.positions):
        window = ids[:, start : start + model.shape.positions + 1]
        nats += model.loss(window[:, :-1], window[:, 1:]).item() * (window.shape[1] - 1)
    return nats


@torch.no_grad()
def logit_difference(model: TinyLlama, checkpoint: Path, item: Encoded) -> float:
    """The largest difference between our logits and those of `LlamaForCausalLM`, both in float32."""
    ids = torch.from_numpy(item.ids[:512].astype(np.int64))[None]
    reference = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return float((reference(ids).logits - model(ids)).abs().max())


@torch.no_grad()
def complete(model: TinyLlama, tokenizer: Tokenizer, prompt: str, *, seed: int) -> str:
    """The text that follows `prompt`, sampled until EOS or SAMPLE_TOKENS."""
    rng = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    length = len(ids)
    for _ in range(SAMPLE_TOKENS):
        picked = sample(model(torch.tensor([ids]))[0, -1], rng)
        if picked == EOS_ID:
            break
        ids.append(picked)
    return tokenizer.decode(ids[length:], skip_special_tokens=False)


def sample(logits: Tensor, rng: torch.Generator) -> int:
    """One token among the likeliest that together hold TOP_P, at TEMPERATURE."""
    ranked, order = (logits / TEMPERATURE).softmax(-1).sort(descending=True)
    ranked[ranked.cumsum(0) - ranked > TOP_P] = 0.0
    return int(order[torch.multinomial(ranked, 1, generator=rng)])


if __name__ == "__main__":
    main()
