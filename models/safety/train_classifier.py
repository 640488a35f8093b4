"""Trains the demonstration classifier: a small BERT with one label per text; prints the card's figures.

python -m models.safety.train_classifier --out models/safety/classifier
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification

from models.safety.made_texts import LABELS, MadeText, make_texts, source_lines

SPECIAL: Final = ("[PAD]", "[CLS]", "[SEP]")
VOCABULARY: Final = 2048
TOKENS: Final = 128  # most tokens of a text in training
BATCH: Final = 32
RATE: Final = 2e-3
LOG_EVERY: Final = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_100)
    parser.add_argument("--texts", type=int, default=30_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    began_s = time.monotonic()
    sources = source_lines()
    train = make_texts(options.texts, seed=options.seed, held_out=False, sources=sources[::2], varied=True)
    tokenizer = trained_tokenizer([made.text for made in train])
    model = BertForSequenceClassification(shape())
    fit(model, tokenizer, train, steps=options.steps)
    write(options.out, model, tokenizer)
    report: dict[str, Any] = {"seconds": round(time.monotonic() - began_s, 1)}
    for name, held_out in (("same wordings, new words", False), ("other wordings", True)):
        texts = make_texts(2_000, seed=options.seed + 1, held_out=held_out, sources=sources[1::2])
        report[name] = figures(texts, judged(model, tokenizer, texts))
    library = [MadeText(piece, "safe") for piece in sources[1::2]][:2_000]
    for least in (0.5, 0.9, 0.99):
        found = judged(model, tokenizer, library, least=least)
        report[f"false_alarm_ratio of the library at {least}"] = round(
            1 - found.count("safe") / len(found), 4
        )
    print(json.dumps(report, indent=2))


def trained_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Return byte pairs of the lower-case text, after NFKC, between [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def shape() -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        hidden_dropout_prob=0.2,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        id2label=dict(enumerate(LABELS)),
        label2id={label: place for place, label in enumerate(LABELS)},
        problem_type="single_label_classification",
    )


def fit(
    model: BertForSequenceClassification, tokenizer: Tokenizer, texts: Sequence[MadeText], *, steps: int
) -> None:
    """Train with a rate that rises for a twentieth of the steps and falls to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / steps)
    )
    counts = torch.tensor([float(Counter(made.label for made in texts)[label]) for label in LABELS])
    weights = (counts.sum() / counts / len(LABELS)).sqrt()
    batches = batches_of(tokenizer, texts)
    model.train()
    for step in range(steps):
        ids, mask, labels = next(batches)
        loss = F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, labels, weights)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % LOG_EVERY == 0:
            print(json.dumps({"step": step, "loss": round(loss.item(), 4)}), flush=True)
    model.train(False)


def batches_of(
    tokenizer: Tokenizer, texts: Sequence[MadeText]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield ids, mask [batch, tokens] and labels [batch] without end, texts of about one length together."""
    encoded = [encoding.ids[:TOKENS] for encoding in tokenizer.encode_batch([made.text for made in texts])]
    order = sorted(range(len(texts)), key=lambda place: len(encoded[place]))
    groups = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
    while True:
        for place in torch.randperm(len(groups)).tolist():
            group = groups[place]
            ids, mask = padded([encoded[index] for index in group])
            yield ids, mask, torch.tensor([LABELS.index(texts[index].label) for index in group])


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask [rows, longest]."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


@torch.inference_mode()
def judged(
    model: BertForSequenceClassification,
    tokenizer: Tokenizer,
    texts: Sequence[MadeText],
    *,
    least: float = 0.0,
) -> list[str]:
    """Return the likeliest label of each text; safe where its probability is below ``least``."""
    found: list[str] = []
    for first in range(0, len(texts), BATCH):
        encoded = tokenizer.encode_batch([made.text for made in texts[first : first + BATCH]])
        ids, mask = padded([encoding.ids[:512] for encoding in encoded])
        values, places = model(input_ids=ids, attention_mask=mask).logits.softmax(1).max(1)
        pairs = zip(values.tolist(), places.tolist(), strict=True)
        found += [LABELS[place] if value >= least else LABELS[0] for value, place in pairs]
    return found


def figures(texts: Sequence[MadeText], found: Sequence[str]) -> dict[str, Any]:
    """Return the accuracy, the share of each label that is found, and that of safe texts that are not."""
    pairs = Counter((made.label, label) for made, label in zip(texts, found, strict=True))
    totals = Counter(made.label for made in texts)
    return {
        "texts": len(texts),
        "accuracy": round(sum(pairs[label, label] for label in LABELS) / len(texts), 4),
        "recall": {label: round(pairs[label, label] / totals[label], 4) for label in LABELS},
        "false_alarm_ratio": round(1 - pairs["safe", "safe"] / totals["safe"], 4),
    }


def write(folder: Path, model: BertForSequenceClassification, tokenizer: Tokenizer) -> None:
    """``folder`` is a version: float32 weights, configuration, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: part.detach().contiguous() for name, part in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = model.config.to_dict() | {"architectures": ["BertForSequenceClassification"]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "model_max_length": 512,
    }
    for name, value in (("config.json", config), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
