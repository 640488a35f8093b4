"""A token's rotation is its own: to the last bit the same, whatever is computed beside it."""

from __future__ import annotations

import pytest
import torch

from fairway.formats.rope_config import parse_rope
from services.worker.engine.execute.rope import Rope
from tests.support.engine_oracle import CONTEXT, ROPES, rope


@pytest.mark.parametrize("head_dim", [24, 80])
@pytest.mark.parametrize("kind", ROPES)
def test_a_rotation_does_not_depend_on_the_rows_beside_it(kind: str, head_dim: int) -> None:
    fields = rope(kind, head_dim)
    config = parse_rope(fields, head_dim=head_dim, max_positions=fields["max_position_embeddings"])
    table = Rope(config, max_model_len=CONTEXT, dtype=torch.float32, device=torch.device("cpu"))
    for prompt in (5, 71):
        positions = torch.arange(CONTEXT)
        prompts = torch.full_like(positions, prompt)
        together = table.cos_sin(positions, prompts)
        for rows in (1, 7, 16, 33):
            for start in range(0, CONTEXT - rows, 29):
                part = slice(start, start + rows)
                alone = table.cos_sin(positions[part], prompts[part])
                assert all(torch.equal(a, b[part]) for a, b in zip(alone, together, strict=True))
