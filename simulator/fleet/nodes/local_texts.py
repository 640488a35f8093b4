"""Texts encoded in this process, for the simulator and unit tests, whose versions are trusted."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from services.core.errors import Unavailable
from services.core.generation import Constraint
from services.gateway.text.encoder import TextEncoder
from services.gateway.text.row_encoder import RowEncoder, load_version, rows_of
from services.gateway.text.text_model import (
    Conversation,
    EncodedRows,
    EncodedText,
    OpenFolder,
    PictureFile,
    Pixels,
    RowTexts,
    TextModel,
    TokenRun,
)
from services.ports.clock import Clock


class LocalTexts:
    """Implements ``Texts`` in the executor's threads, without bounds."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor = executor
        self._clock = clock
        self._encoders: dict[str, TextEncoder | RowEncoder] = {}

    async def load(self, version_digest: str, folder: OpenFolder) -> TextModel:
        loop = asyncio.get_running_loop()
        async with folder() as path:
            encoder = await loop.run_in_executor(
                self._executor, load_version, path, version_digest, self._clock
            )
        self._encoders[version_digest] = encoder
        return encoder.model

    def unload(self, version_digest: str) -> None:
        self._encoders.pop(version_digest, None)

    async def read(
        self, model: TextModel, tenant_id: str, text: str | Conversation, *, size_bytes: int
    ) -> EncodedText:
        encoder = self._encoder(model)
        assert isinstance(encoder, TextEncoder), "a prompt of a fixed-cost model"
        loop = asyncio.get_running_loop()
        if isinstance(text, str):
            ids = await loop.run_in_executor(self._executor, encoder.encode_prompt, text)
        else:
            ids = await loop.run_in_executor(
                self._executor, encoder.encode_chat, text.messages, text.variables, text.tools
            )
        return EncodedText(len(ids), ids if len(ids) <= model.max_context_tokens else ())

    async def decode(self, model: TextModel, tenant_id: str, run: TokenRun) -> str:
        encoder = self._encoder(model)
        assert isinstance(encoder, TextEncoder), "tokens of a fixed-cost model"
        return await asyncio.get_running_loop().run_in_executor(self._executor, encoder.decode, run.ids)

    async def read_rows(
        self, model: TextModel, tenant_id: str, rows: RowTexts, *, size_bytes: int
    ) -> EncodedRows:
        encoder = self._encoder(model)
        encode = rows_of(encoder).encode_rows
        return await asyncio.get_running_loop().run_in_executor(self._executor, encode, rows)

    async def read_picture(self, model: TextModel, tenant_id: str, picture: PictureFile) -> Pixels:
        decode = rows_of(self._encoder(model)).decode_picture
        return await asyncio.get_running_loop().run_in_executor(self._executor, decode, picture)

    async def check(self, model: TextModel, tenant_id: str, constraint: Constraint) -> Constraint:
        encoder = self._encoder(model)
        assert isinstance(encoder, TextEncoder), "a constraint of a fixed-cost model"
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, encoder.open_grammars)
        return await loop.run_in_executor(self._executor, encoder.check, constraint)

    def _encoder(self, model: TextModel) -> TextEncoder | RowEncoder:
        encoder = self._encoders.get(model.version_digest)
        if encoder is None:
            raise Unavailable("the version was given up", retry_after_s=0.0)
        return encoder
