"""Trains the demonstration probe of the tiny model on its own activations; prints the card's figures.

    python -m models.safety.train_probe --out models/safety/probe

A logistic regression for each label on the state after the final norm, at every token. A state is positive
where most of the unsafe range has been read; around the range nothing is learned. The bias is moved so that
the score 0.5 is exceeded in one of 200 safe texts of the training.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models.safety.made_texts import LABELS, MadeText, make_texts, source_lines

TINY: Final = Path(__file__).parents[1] / "tiny" / "checkpoint"
TOKENS: Final = 128  # most tokens of a text
BATCH: Final = 16
READ_RATIO: Final = 0.6  # share of the unsafe range that is read where a state is positive
AFTER_TOKENS: Final = 8  # tokens behind the range at which nothing is learned, and a verdict is in time
ITERATIONS: Final = 150
DECAY: Final = 1.0
FALSE_RATIO: Final = 0.005  # share of safe texts of the training above the score 0.5
IGNORED: Final = -1.0
UNSAFE: Final = LABELS[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1_200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    began_s = time.monotonic()
    reader, sources = Activations(), source_lines()
    train = make_texts(options.texts, seed=options.seed, held_out=False, sources=sources[::2], varied=True)
    states, wanted, text_of = reader.read(train)
    weight, bias = fit(states, wanted)
    bias = bias - allowed(states @ weight.T + bias, train, text_of)
    report: dict[str, Any] = {"training_states": len(states)}
    for name, held_out in (("same wordings, new words", False), ("other wordings", True)):
        texts = make_texts(400, seed=options.seed + 2, held_out=held_out, sources=sources[1::2])
        report[name] = figures(reader, weight, bias, texts)
    library = [MadeText(piece, "safe") for piece in sources[1::40]]
    report["the library"] = figures(reader, weight, bias, library)
    report["seconds"] = round(time.monotonic() - began_s, 1)
    options.out.mkdir(parents=True, exist_ok=True)
    tensors = {"weight": weight.contiguous(), "bias": bias.contiguous()}
    save_file(tensors, options.out / "safety_probe.safetensors", {"categories": json.dumps(UNSAFE)})
    print(json.dumps(report, indent=2))


class Activations:
    """The tiny model's states after the final norm, which its head reads."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        self._model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)

    @torch.inference_mode()
    def read(self, texts: Sequence[MadeText]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return states [tokens, hidden], what is wanted of each [tokens, labels], and each one's text."""
        states, wanted, places = [], [], []
        for rows in self._batches(texts):
            ids = torch.zeros(len(rows), max(len(found) for _, found, _ in rows), dtype=torch.int64)
            for row, (_, found, _) in enumerate(rows):
                ids[row, : len(found)] = torch.tensor(found)
            hidden = self._model.model(ids).last_hidden_state
            for row, (place, found, ends) in enumerate(rows):
                states.append(hidden[row, : len(found)].clone())
                wanted.append(targets(texts[place], ends))
                places += [place] * len(found)
        return torch.cat(states), torch.cat(wanted), torch.tensor(places)

    def _batches(self, texts: Sequence[MadeText]) -> Iterator[list[tuple[int, list[int], list[int]]]]:
        """Yield each text's place, its ids, and where each token ends in it; texts of one length together."""
        encoded = self._tokenizer.encode_batch([made.text for made in texts])
        rows = [
            (place, found.ids[:TOKENS], [end for _, end in found.offsets[:TOKENS]])
            for place, found in enumerate(encoded)
        ]
        rows.sort(key=lambda row: len(row[1]))
        for first in range(0, len(rows), BATCH):
            yield rows[first : first + BATCH]


def targets(made: MadeText, ends: Sequence[int]) -> torch.Tensor:
    """Return [tokens, labels]: 1 where most of the range is read, IGNORED around that, else 0."""
    wanted = torch.zeros(len(ends), len(UNSAFE))
    if made.label not in UNSAFE:
        return wanted
    column = wanted[:, UNSAFE.index(made.label)]
    read = made.start + READ_RATIO * (made.end - made.start)
    behind = 0
    for token, end in enumerate(ends):
        if end >= made.end:
            behind += 1
        if made.start < end < read or 1 < behind <= AFTER_TOKENS:
            column[token] = IGNORED
        elif read <= end and behind <= 1:
            column[token] = 1.0
    return wanted


def fit(states: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [labels, hidden] and bias [labels] for states as they are."""
    mean, spread = states.mean(0), states.std(0)
    x = (states - mean) / spread
    weight = torch.zeros(wanted.shape[1], states.shape[1], requires_grad=True)
    bias = torch.full((wanted.shape[1],), -3.0, requires_grad=True)
    known, positive = (wanted != IGNORED).float(), wanted.clamp(min=0)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        losses = F.binary_cross_entropy_with_logits(x @ weight.T + bias, positive, reduction="none")
        total = (losses * known).mean() + DECAY * weight.square().sum() / len(x)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    scaled = weight.detach() / spread
    return scaled, bias.detach() - scaled @ mean


def allowed(logits: torch.Tensor, texts: Sequence[MadeText], text_of: torch.Tensor) -> torch.Tensor:
    """Return for each label the logit that FALSE_RATIO of the safe texts exceed somewhere."""
    safe = [place for place, made in enumerate(texts) if made.label == "safe"]
    greatest = torch.stack([logits[text_of == place].amax(0) for place in safe])
    return greatest.quantile(1 - FALSE_RATIO, dim=0)


def figures(
    reader: Activations, weight: torch.Tensor, bias: torch.Tensor, texts: Sequence[MadeText]
) -> dict[str, Any]:
    """Return the share of unsafe ranges that are found in time, by label, and that of safe texts that are."""
    states, wanted, text_of = reader.read(texts)
    scores = (states @ weight.T + bias).sigmoid()
    found: dict[str, list[bool]] = {label: [] for label in LABELS}
    for place, made in enumerate(texts):
        mine = text_of == place
        if made.label == "safe":
            found["safe"].append(bool((scores[mine] >= 0.5).any()))
            continue
        column = UNSAFE.index(made.label)
        if (wanted[mine, column] == 1).any():  # it is not cut off
            near = wanted[mine, column] != 0
            found[made.label].append(bool((scores[mine][near] >= 0.5).any()))
    ratios = {label: round(sum(cases) / len(cases), 4) for label, cases in found.items() if cases}
    return {"false_alarm_ratio": ratios.pop("safe"), "recall": ratios}


if __name__ == "__main__":
    main()
