"""Rows of texts in a real text process, beside the prompts of other versions."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from services.core.errors import FailedPrecondition, InvalidInput, UnsupportedFeature
from services.core.fixed_cost.signature import Operation
from services.gateway.rows.inputs import text_rows
from services.gateway.text.pool import TextProcesses
from services.gateway.text.row_encoder import RowEncoder, load_version, rows_of
from services.gateway.text.text_model import RowTexts
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics
from tests.support.fixed_cost import save_last_token, save_pooling
from tests.support.row_versions import embedding_version, mlp_version, reranker_version, tokenizer

CLOCK = SystemClock()
DIGEST = "sha256:" + "cd" * 32


def encoder(folder: Path) -> RowEncoder:
    found = load_version(folder, DIGEST, CLOCK)
    assert isinstance(found, RowEncoder)
    return found


async def test_text_processes_encode_rows_as_the_tokenizer_does(tmp_path: Path) -> None:
    folder = reranker_version(tmp_path)
    supervisor = Supervisor(CLOCK)
    texts = TextProcesses(CLOCK, supervisor, Metrics())
    supervisor.spawn("texts", texts.run())
    try:
        model = await texts.load(DIGEST, lambda: nullcontext(folder))
        assert model.signature is not None
        assert model.signature.operation is Operation.SCORE
        firsts, seconds = ["the fox"] * 300, [f"lazy dog {'over ' * (n % 7)}" for n in range(300)]
        rows = await text_rows(texts, model, "acme", firsts, seconds, cut_to=None, field="seconds")
        for first, second, row, count in zip(firsts, seconds, rows.rows, rows.tokens, strict=True):
            expected = tokenizer().encode(first, second)
            ids, types = (np.frombuffer(tensor.data, np.int64).tolist() for tensor in row)
            assert (ids, types) == (expected.ids, expected.type_ids)
            assert count == len(expected.ids)
    finally:
        texts.unload(DIGEST)
        await asyncio.sleep(0)
        await supervisor.close()


def test_a_decoder_encodes_rows_where_its_files_declare_an_embedding(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 12,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    plain = load_version(tmp_path, DIGEST, CLOCK)
    assert plain.model.of_rows.signature is None
    save_last_token(tmp_path, width=32)
    found = load_version(tmp_path, DIGEST, CLOCK)
    assert found.model.signature is None, "it still generates"
    rows = found.model.of_rows
    assert rows.signature is not None
    assert (rows.signature.operation, rows.signature.by_prefill) == (Operation.EMBED, True)
    assert rows.max_context_tokens == 64
    encoded = rows_of(found).encode_rows(RowTexts(["the quick fox", "dog"]))
    assert list(encoded.lengths) == [5, 3]
    assert rows_of(found).encode_rows(RowTexts(["dog " * 70])).lengths[0] == 72, "longer than it takes"
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    lowered = load_version(tmp_path, DIGEST, CLOCK).model.of_rows.signature
    assert lowered is not None
    assert lowered.lowercase
    save_pooling(tmp_path, mode="mean_tokens", width=32)
    with pytest.raises(FailedPrecondition, match="pooling_mode of a decoder"):
        load_version(tmp_path, DIGEST, CLOCK)


def test_texts_are_lowercased_where_the_version_declares_it(tmp_path: Path) -> None:
    folder = embedding_version(tmp_path)
    cased = tokenizer()
    cased.normalizer = None
    cased.save(str(folder / "tokenizer.json"))
    settings, unknown = folder / "sentence_bert_config.json", 1
    for declared, words in ((False, [unknown, unknown]), (True, [4, 7])):
        settings.write_text(json.dumps({"max_seq_length": 16, "do_lower_case": declared}))
        found = encoder(folder).encode_rows(RowTexts(["The FOX"]))
        assert np.frombuffer(found.ids, np.int64).tolist() == [2, *words, 3]


def test_a_row_is_cut_with_its_special_tokens(tmp_path: Path) -> None:
    found = encoder(embedding_version(tmp_path)).encode_rows(RowTexts(["the quick fox", "dog"], (), 4))
    assert list(found.lengths) == [4, 3]
    assert np.frombuffer(found.ids, np.int64).tolist() == [2, 4, 5, 3, 2, 11, 3]
    assert not found.types


def test_the_longer_text_of_a_pair_is_cut_first(tmp_path: Path) -> None:
    found = encoder(reranker_version(tmp_path)).encode_rows(RowTexts(["fox"], ["dog " * 50], 8))
    ids = np.frombuffer(found.ids, np.int64).tolist()
    assert ids == [2, 7, 3, 11, 11, 11, 11, 3]


def test_a_cut_does_not_last(tmp_path: Path) -> None:
    made = encoder(embedding_version(tmp_path))
    made.encode_rows(RowTexts(["the quick fox"], (), 3))
    assert list(made.encode_rows(RowTexts(["the quick fox"])).lengths) == [5]


def test_a_cut_below_the_special_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no room"):
        encoder(embedding_version(tmp_path)).encode_rows(RowTexts(["fox"], (), 1))


def test_ids_of_a_row_that_is_too_long_are_left_out(tmp_path: Path) -> None:
    found = encoder(embedding_version(tmp_path)).encode_rows(RowTexts(["fox", "dog " * 50]))
    assert list(found.lengths) == [3, 52]
    assert not found.ids


def test_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    folder = embedding_version(tmp_path)
    made = tokenizer()
    made.add_tokens([f"word{index}" for index in range(60)])
    made.save(str(folder / "tokenizer.json"))
    with pytest.raises(InvalidInput, match="no embedding"):
        encoder(folder).encode_rows(RowTexts(["word59"]))


def test_a_model_of_tensors_takes_no_texts(tmp_path: Path) -> None:
    found = encoder(mlp_version(tmp_path))
    assert found.model.signature is not None
    with pytest.raises(UnsupportedFeature, match="tensors"):
        found.encode_rows(RowTexts(["fox"]))


def test_a_version_that_cannot_be_served_is_rejected(tmp_path: Path) -> None:
    folder = embedding_version(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"position_embedding_type": "relative_key"}))
    with pytest.raises(FailedPrecondition, match="position_embedding_type"):
        encoder(folder)
