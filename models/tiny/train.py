"""Trains the model on this interpreter's standard library and writes a checkpoint every few minutes.

    python models/tiny/train.py --out DIR --minutes 85     # until the time is spent
    python models/tiny/train.py --out DIR --steps 4000     # a fixed number of steps
    python models/tiny/train.py --out DIR --minutes 85 --resume

DIR/state.safetensors is what `--resume` reads; DIR/checkpoint is what an engine loads.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from bpe import train_tokenizer
from corpus import load_corpus
from dataset import Windows, join, load_streams
from export import export_checkpoint
from modeling import Shape, TinyLlama
from optim import build_optimizers, lr_share, set_lr_share
from state import Progress, load_state, save_state
from tokenizers import Tokenizer
from torch import Tensor

BATCH_TOKENS = 4096
SHORT, LONG = 512, 1024
LONG_FROM = 0.85
PROBE_STEPS = 4
LOG_EVERY_STEPS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """How far to train and on what; exactly one of `minutes` and `steps` is set."""

    out: Path
    minutes: float | None
    steps: int | None
    threads: int
    seed: int
    save_minutes: float
    resume: bool
    compile: bool

    def share_done(self, progress: Progress) -> float:
        """0 at the start, 1 when the budget is spent."""
        if self.steps is not None:
            return progress.step / self.steps
        assert self.minutes is not None
        return progress.elapsed_s / (60 * self.minutes)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus()
    tokenizer = load_tokenizer(options, [d.text for d in corpus.train])
    train, held_out = load_streams(corpus, tokenizer, seed=options.seed)
    probe = Windows(join(e for e in held_out if e.kind != "chat"), seed=options.seed)
    run(options, Trainer(options, Windows(join(train), seed=options.seed), probe, tokenizer))


def run(options: Options, trainer: "Trainer") -> None:
    """Steps until the budget is spent; saves on the way and at the end."""
    if options.resume:
        trainer.load()
    saved_s = trainer.progress.elapsed_s
    while (share := options.share_done(trainer.progress)) < 1:
        trainer.step(share)
        if trainer.progress.elapsed_s - saved_s > 60 * options.save_minutes:
            trainer.save()
            saved_s = trainer.progress.elapsed_s
    trainer.save()


class Trainer:
    """Owns the model, its optimizers and how far they are."""

    def __init__(self, options: Options, windows: Windows, probe: Windows, tokenizer: Tokenizer) -> None:
        self._options = options
        self._windows = windows
        self._probe = probe
        self._tokenizer = tokenizer
        self._model = TinyLlama(Shape())
        self._optimizers = build_optimizers(self._model)
        self._loss: Callable[[Tensor, Tensor], Tensor] = self._model.loss
        if options.compile:
            self._loss = torch.compile(self._model.loss, dynamic=False)
        self.progress = Progress()

    def step(self, share: float) -> None:
        """One update at `share` of the budget; `progress` counts it and the time it took."""
        began_s = time.monotonic()
        length = LONG if share >= LONG_FROM else SHORT
        inputs, targets = self._windows.batch(self.progress.step, rows=BATCH_TOKENS // length, length=length)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._loss(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        set_lr_share(self._optimizers, lr_share(share))
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress = self.progress.after_step(BATCH_TOKENS, time.monotonic() - began_s)
        if self.progress.step % LOG_EVERY_STEPS == 0:
            self._log("train.step_done", share=round(share, 4), loss=round(loss.item(), 4), length=length)

    def save(self) -> None:
        """State and checkpoint on disk are those of now; a held-out loss is logged."""
        save_state(self._options.out / "state.safetensors", self._model, self._optimizers, self.progress)
        export_checkpoint(self._model, self._tokenizer, self._options.out / "checkpoint")
        self._log("train.checkpoint_saved", held_out_loss=round(self._probe_loss(), 4))

    def load(self) -> None:
        """Model, optimizers and progress are those of the last `save`."""
        self.progress = load_state(self._options.out / "state.safetensors", self._model, self._optimizers)
        self._log("train.resumed")

    @torch.no_grad()
    def _probe_loss(self) -> float:
        losses: list[float] = []
        for index in range(PROBE_STEPS):
            inputs, targets = self._probe.batch(index, rows=BATCH_TOKENS // SHORT, length=SHORT)
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(self._model.loss(inputs, targets).item())
        return sum(losses) / len(losses)

    def _log(self, event: str, **values: float) -> None:
        elapsed_s = round(self.progress.elapsed_s, 1)
        line = {
            "event": event,
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "elapsed_s": elapsed_s,
        }
        print(json.dumps(line | values), flush=True)


def load_tokenizer(options: Options, texts: list[str]) -> Tokenizer:
    """The tokenizer of an earlier run when resuming, a new one fitted on `texts` otherwise."""
    path = options.out / "tokenizer.json"
    if options.resume:
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(texts)
    tokenizer.save(str(path))
    return tokenizer


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description="Train the tiny model on the standard library.")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="train for this long, saves not counted")
    budget.add_argument("--steps", type=int, help="train for this many updates")
    parser.add_argument("--out", type=Path, required=True, help="directory for the state and the checkpoint")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--resume", action="store_true", help="continue from the state in --out")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="do without a C++ compiler"
    )
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
