"""Models of tokens: embedding, sequence classification, reranking, token classification."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fairway.formats.fixed_cost.encoder_config import EncoderConfig, sequence_head
from services.core.fixed_cost.signature import signature_of
from services.worker.batcher.models.blocks import ACTIVATIONS, TensorSource, linear
from services.worker.batcher.models.encoder import Encoder
from services.worker.batcher.models.model import ModelFacts, Outputs, Pause, no_pause
from services.worker.batcher.models.rows import Batch, Row, TokenRows, row_problem, token_rows

# What a head returns: one vector per row, or one per token.
TextHead = Callable[[torch.Tensor, TokenRows], torch.Tensor]


class TokenModel:
    """Implements ``FixedCostModel``."""

    def __init__(self, config: EncoderConfig, tensor: TensorSource, *, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._encoder = Encoder(config, tensor)
        self._head = head_of(config, tensor)
        self.facts = facts_of(config)

    def problem(self, row: Row) -> str:
        """See ``FixedCostModel``."""
        return token_problem(row, self.facts, self._config)

    @torch.inference_mode()
    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        """See ``FixedCostModel``."""
        config = self._config
        rows = token_rows(
            batch,
            self._device,
            padding_id=config.padding_id,
            after_padding=config.family.positions_after_padding,
        )
        found = self._head(self._encoder(rows, pause), rows).float().cpu().numpy()
        (name,) = (spec.name for spec in self.facts.outputs)
        outputs: list[Outputs] = [{}] * len(rows.order)
        if config.head == "tokens":
            for place, begin, length in zip(rows.order, rows.starts, rows.lengths, strict=True):
                outputs[place] = {name: found[begin : begin + length]}
        else:
            for place, values in zip(rows.order, found, strict=True):
                outputs[place] = {name: values}
        return outputs


def token_problem(row: Row, facts: ModelFacts, config: EncoderConfig) -> str:
    """Return why the row cannot be computed, or an empty text.

    Ids are within the tables: on a device, one beyond ends the process.
    """
    if found := row_problem(row, facts.inputs, max_length=facts.max_tokens):
        return found
    for name, most in (("input_ids", config.vocab_size), ("token_type_ids", config.type_rows)):
        if name in row and not (row[name].min() >= 0 and row[name].max() < most):
            return f"{name} must be 0 to {most - 1}"
    return ""


def facts_of(config: EncoderConfig) -> ModelFacts:
    """Return the facts without the dtype and the bytes of a loaded model."""
    signature = signature_of(config)
    return ModelFacts(
        signature.operation,
        signature.inputs,
        signature.outputs,
        "float32",
        signature.max_tokens,
        accepts_packed=True,
        pauses=True,
    )


def head_of(config: EncoderConfig, tensor: TensorSource) -> TextHead:
    """Return the head that the architecture has."""
    if config.head == "embedding":
        pool = first_tokens if config.pooling == "cls" else token_means
        return (lambda x, rows: F.normalize(pool(x, rows), dim=1)) if config.normalize else pool
    if config.head == "tokens":
        classify = linear(tensor, "classifier")
        return lambda x, rows: classify(x)
    names = sequence_head(config)
    dense, output = linear(tensor, names.dense), linear(tensor, names.output)
    activation = ACTIVATIONS[names.activation]
    return lambda x, rows: output(activation(dense(first_tokens(x, rows))))


def first_tokens(x: torch.Tensor, rows: TokenRows) -> torch.Tensor:
    """Return the vector of each row's first token."""
    return x.index_select(0, torch.tensor(rows.starts, device=x.device))


def token_means(x: torch.Tensor, rows: TokenRows) -> torch.Tensor:
    """Return the mean over the tokens of each row, in float32. Padding is not read, whatever it holds."""
    lengths = torch.tensor(rows.lengths, device=x.device)
    if rows.width:
        padding = torch.arange(rows.width, device=x.device) >= lengths[:, None]
        padded = x.float().view(len(lengths), rows.width, -1)
        sums = padded.masked_fill(padding[:, :, None], 0.0).sum(1)
    else:
        owners = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)
        sums = x.new_zeros((len(lengths), x.shape[1]), dtype=torch.float32).index_add_(0, owners, x.float())
    return sums / lengths[:, None]
