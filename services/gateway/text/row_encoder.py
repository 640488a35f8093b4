"""Encodes texts and pairs of texts into the rows of a fixed-cost model, by a version's tokenizer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from tokenizers import Tokenizer

from fairway.formats.config_fields import UnsupportedModel, positive_int
from fairway.formats.fixed_cost.config import CONFIG, is_fixed_cost, parse_fixed_cost
from fairway.formats.fixed_cost.image_config import CHANNELS, PREPROCESSOR, parse_pictures
from fairway.formats.fixed_cost.pooling import MODULES, last_token
from services.core.errors import FailedPrecondition, InvalidInput, UnsupportedFeature
from services.core.fixed_cost.signature import Signature, signature_of, signature_of_decoder
from services.gateway.text.encoder import TextEncoder, load_encoder, read_json, read_tokenizer
from services.gateway.text.text_model import (
    EncodedRows,
    PictureFile,
    Pixels,
    RowTexts,
    SamplingDefaults,
    TextModel,
)
from services.ports.clock import Clock

if TYPE_CHECKING:
    from services.gateway.text.pictures import PictureDecoder

_MAX_SMALL_BYTES: Final = 4 * 1024 * 1024


class RowEncoder:
    """One version's tokenizer, if it has one. One caller at a time, in a process that may crash."""

    def __init__(
        self, model: TextModel, tokenizer: Tokenizer | None, pictures: PictureDecoder | str = ""
    ) -> None:
        """``pictures`` decodes for an image model; a text says why its pictures cannot be decoded."""
        self.model = model
        self._tokenizer = tokenizer
        self._pictures = pictures

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included. Raises UnsupportedFeature."""
        if self._tokenizer is None:
            raise UnsupportedFeature("this model has no tokenizer, so that its tokens have no text")
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode_rows(self, rows: RowTexts) -> EncodedRows:
        """Return the tokens of each row, with the special tokens that the tokenizer adds.

        Raises UnsupportedFeature without a tokenizer, InvalidInput for a token without an embedding.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise UnsupportedFeature("this model takes tensors, not texts", field="inputs")
        texts, seconds = self._cased(rows.texts), self._cased(rows.seconds)
        inputs = list(zip(texts, seconds, strict=True)) if seconds else texts
        if rows.most_tokens:
            tokenizer.enable_truncation(rows.most_tokens)
        try:
            # The fast call computes no offsets, which nothing reads.
            found = tokenizer.encode_batch_fast(inputs, add_special_tokens=True)
        finally:
            tokenizer.no_truncation()
        lengths = [len(encoding.ids) for encoding in found]
        if rows.most_tokens and max(lengths, default=0) > rows.most_tokens:
            raise InvalidInput(
                f"truncate_tokens {rows.most_tokens} leaves no room beside the special tokens",
                field="truncate_tokens",
            )
        ids, types = array("q"), array("q")
        if max(lengths, default=0) <= self.model.max_context_tokens:
            for encoding in found:
                ids.extend(encoding.ids)
                if rows.seconds:
                    types.extend(encoding.type_ids)
        if ids and max(ids) >= self.model.vocab_size:
            raise InvalidInput("the text holds a token that the model has no embedding for", field="inputs")
        return EncodedRows(lengths, ids.tobytes(), types.tobytes())

    def decode_picture(self, picture: PictureFile) -> Pixels:
        """Return the pixels of a picture. Raises InvalidInput, UnsupportedFeature."""
        if isinstance(self._pictures, str):
            raise UnsupportedFeature(self._pictures or "this model takes no pictures", field="images")
        return self._pictures.pixels(picture.data)

    def _cased(self, texts: Sequence[str]) -> list[str]:
        """Return the texts in the case that the tokenizer reads, as sentence-transformers does."""
        signature = self.model.signature
        return [text.lower() for text in texts] if signature and signature.lowercase else list(texts)


def load_version(folder: Path, version_digest: str, clock: Clock) -> TextEncoder | RowEncoder:
    """Return the encoder of a folder of verified files. Blocks on the disk.

    Raises FailedPrecondition that names the unusable file.
    """
    config = read_json(folder / CONFIG, required=True)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if not is_fixed_cost(config):
        return _decoder(folder, names, config, load_encoder(folder, version_digest, clock))
    try:
        signature = signature_of(parse_fixed_cost(names, lambda name: _small_file(folder / name)))
    except UnsupportedModel as error:
        raise FailedPrecondition(f"the version cannot be served: {error}") from error
    has_text = signature.vocab_size > 0 and (folder / "tokenizer.json").is_file()
    tokenizer = read_tokenizer(folder)[0] if has_text else None
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    model = TextModel(
        version_digest,
        vocab_size=signature.vocab_size,
        max_context_tokens=signature.max_tokens,
        longest_token_bytes=max((len(text.encode()) for text in vocabulary), default=1),
        defaults=SamplingDefaults(),
        depends_on_time=False,
        signature=signature,
    )
    return RowEncoder(model, tokenizer, _pictures(folder, signature))


def _pictures(folder: Path, signature: Signature) -> PictureDecoder | str:
    """Return what decodes the pictures of an image model, else why none are taken."""
    spec = signature.inputs[0]
    if spec.name != "pixel_values":
        return ""
    tensors = "send pixel_values as a tensor"
    if spec.shape[0] != CHANNELS:
        return f"this model's images have {spec.shape[0]} channels: {tensors}"
    if not (folder / PREPROCESSOR).is_file():
        return f"the version has no {PREPROCESSOR}, which declares how a picture becomes pixels: {tensors}"
    from services.gateway.text.pictures import (
        PictureDecoder,  # Pillow takes memory that tokenizers do not need
    )

    try:
        return PictureDecoder(parse_pictures(read_json(folder / PREPROCESSOR, required=True)), spec.shape)
    except UnsupportedModel as error:
        return f"{PREPROCESSOR}: {error}: {tensors}"


def _decoder(
    folder: Path, names: Sequence[str], config: Mapping[str, Any], encoder: TextEncoder
) -> TextEncoder:
    """Return the encoder of a decoder, which encodes rows too if the files declare an embedding."""
    if "architectures" not in config or MODULES not in names:
        return encoder
    try:
        hidden_size, model = positive_int(config, "hidden_size"), encoder.model
        embeds = last_token(
            hidden_size,
            model.max_context_tokens,
            names,
            lambda name: msgspec.json.decode(_small_file(folder / name)),
        )
    except (UnsupportedModel, msgspec.DecodeError) as error:
        raise FailedPrecondition(f"the version cannot be served: {error}") from error
    assert embeds is not None, "the modules are there"
    signature = signature_of_decoder(hidden_size, model.vocab_size, embeds)
    encoder.model = replace(model, embedding=signature)
    encoder.rows = RowEncoder(encoder.model.of_rows, encoder.tokenizer)
    return encoder


def rows_of(encoder: TextEncoder | RowEncoder | None) -> RowEncoder:
    """Return what encodes the rows of a version."""
    found = encoder.rows if isinstance(encoder, TextEncoder) else encoder
    assert found is not None, "rows of a version that only generates text"
    return found


def _small_file(path: Path) -> bytes:
    if path.stat().st_size > _MAX_SMALL_BYTES:
        raise FailedPrecondition(f"{path.name} of the version is larger than {_MAX_SMALL_BYTES} bytes")
    return path.read_bytes()
