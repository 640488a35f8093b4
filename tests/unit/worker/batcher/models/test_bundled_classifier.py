"""The bundled classifier, as a worker loads it: its labels, its size, and what it finds in made texts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from fairway.formats.fixed_cost.encoder_config import EncoderConfig
from fairway.formats.servable import engine_problems, kind_of
from models.safety.made_texts import LABELS, make_texts, source_lines
from services.core.fixed_cost.signature import Operation
from services.worker.batcher.models.loading import declared_in, load_model
from services.worker.batcher.models.rows import Packed, Row
from services.worker.engine.load.config import read_part

FOLDER: Final = Path(__file__).parents[5] / "models" / "safety" / "classifier"


def test_it_is_a_small_fixed_cost_model_with_its_labels() -> None:
    names = [path.name for path in FOLDER.iterdir()]
    assert kind_of(names, lambda name: read_part(FOLDER, name)) == "fixed-cost"
    assert engine_problems(names, lambda name: read_part(FOLDER, name), "fixed-cost")["torch"] == ""
    config = declared_in(FOLDER)
    assert isinstance(config, EncoderConfig)
    assert config.classes.names == LABELS
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_000_000


def test_it_finds_what_the_made_texts_hold() -> None:
    """Texts of another seed than that of the training and of the card."""
    model = load_model(FOLDER)
    assert model.facts.operation is Operation.CLASSIFY
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    texts = make_texts(200, seed=77, held_out=False, sources=source_lines()[1::2])
    rows: list[Row] = [
        {"input_ids": np.array(found.ids), "token_type_ids": np.zeros(len(found.ids), np.int64)}
        for found in tokenizer.encode_batch([made.text for made in texts])
    ]
    found = [LABELS[int(output["logits"].argmax())] for output in model.run(Packed(rows))]
    wrong = Counter(
        (made.label, label) for made, label in zip(texts, found, strict=True) if made.label != label
    )
    assert sum(wrong.values()) <= 10, wrong
