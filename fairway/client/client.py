"""The client of the data plane.

    async with Client(["10.0.0.1:50051", "10.0.0.2:50051"], api_key=key) as client:
        print((await client.complete("tiny", "Once upon a time")).text)

A client belongs to one event loop and to its thread; other threads use ``asyncio.run_coroutine_threadsafe``.
Within the loop any number of tasks may use it at once. A process uses gRPC's asyncio on one loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random, SystemRandom
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

import grpc

from fairway.client import convert, rows
from fairway.client.attempts import Attempts, Core, unary
from fairway.client.endpoints import Credentials, Endpoint, Metadata
from fairway.client.errors import connection_lost, from_rpc
from fairway.client.generation import DeliveryPositions, GenerationStream
from fairway.client.guard import Guard
from fairway.client.rows import (
    Classification,
    ClassifyInput,
    Embeddings,
    EmbedInput,
    Inference,
    Ranking,
    RowOptions,
)
from fairway.client.session import Session
from fairway.client.values import (
    ClientOptions,
    Completion,
    Event,
    Input,
    Message,
    Moderated,
    Options,
    ServedModel,
    SessionOptions,
    TokenCount,
    checked_timeout_s,
)
from fairway.login import Bearer
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc


class DirectCarrier:
    """Opens a Generate RPC per attempt."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def open(
        self, generation: pb.Generation, attempts: Attempts, positions: DeliveryPositions
    ) -> DirectAttempt:
        endpoint = await attempts.begin()
        return DirectAttempt(self._core, endpoint, attempts.deadline_s, generation, attempts.metadata)


class DirectAttempt:
    """Holds its endpoint from construction until ``aclose``."""

    def __init__(
        self,
        core: Core,
        endpoint: Endpoint,
        deadline_s: float,
        generation: pb.Generation,
        metadata: Metadata,
    ) -> None:
        self.endpoint = endpoint
        self._core = core
        self._deadline_s = deadline_s
        self._open = True
        self._call = endpoint.stub.Generate(
            pb.GenerateRequest(generation=generation),
            timeout=max(0.0, deadline_s - core.now()),
            metadata=metadata,
        )

    async def receive(self) -> Event:
        while True:
            message = await self._read()
            kind = message.WhichOneof("event")
            if kind == "chunk":
                return convert.tokens(message.chunk)
            if kind == "accepted":
                return convert.accepted(message.accepted)
            if kind == "finished":
                return convert.finished(message.finished)

    def consumed(self, choice: int, tokens: int) -> None:
        """Do nothing: HTTP/2 flow control stops the stream of a reader that does not read."""

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._call.cancel()
            self._core.pool.release(self.endpoint)

    async def _read(self) -> pb.GenerateResponse:
        silence_s = self._core.options.silence_timeout_s
        try:
            async with asyncio.timeout(min(silence_s, self._deadline_s - self._core.now())):
                message = await self._call.read()
        except TimeoutError:
            if self._core.now() >= self._deadline_s:
                raise
            raise connection_lost(f"the gateway was silent for {silence_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        if not isinstance(message, pb.GenerateResponse):
            raise connection_lost("the stream ended without its terminal event")
        return message


_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class Client:
    """Sends each call to the gateway with the fewest running calls of this client.

    A gateway that breaks or drains is avoided for a while. Every method raises FairwayError and its
    subclasses.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        api_key: str = "",
        options: ClientOptions | None = None,
        credentials: Credentials = None,
        rng: Random | None = None,
    ) -> None:
        """``endpoints``: host:port of each gateway. ``credentials``: for TLS, or the folder of
        its files, which are read again after they were replaced; without, the key is plain text.

        Without ``api_key``, calls carry the token of `fairway login`. Opens no connection yet. Raises
        ValueError without both.
        """
        Bearer(api_key, "api_key")
        self._addresses = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        self._api_key = api_key
        self._options = options or ClientOptions()
        self._credentials = credentials
        self._rng = rng or SystemRandom()
        self._guard = Guard()
        self._streams: WeakSet[GenerationStream] = WeakSet()
        self._sessions: WeakSet[Session] = WeakSet()
        self._entered: tuple[Core, asyncio.AbstractEventLoop] | None = None

    async def __aenter__(self) -> Self:
        """Open the channels. Raises RuntimeError the second time: a client is used once."""
        if self._entered is not None:
            raise RuntimeError("this client was opened before: create a new one")
        loop = asyncio.get_running_loop()
        core = Core.opened(
            self._addresses, self._api_key, self._options, credentials=self._credentials, rng=self._rng
        )
        self._entered = core, loop
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every call, stream and session, and return once the channels are closed. Idempotent."""
        self._guard.close("the client was closed")
        for stream in list(self._streams):
            await stream.interrupt("the client was closed")
        for session in list(self._sessions):
            await session.aclose("the client was closed")
        await self._guard.idle()
        if self._entered is not None:
            await self._entered[0].pool.close()

    def generate(
        self,
        model: str,
        source: Input,
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> GenerationStream:
        """Return the stream of a generation; the first read sends it and starts its deadline.

        ``source``: a text to continue, the messages of a chat, or token ids. ``idempotency_key``: "" for
        none, even if the options generate keys. Raises ValueError or TypeError for impossible input.
        """
        core = self._core()
        message = convert.generation(model, source, options or Options(), core.key(idempotency_key))
        stream = GenerationStream(
            core,
            DirectCarrier(core),
            message,
            self._generation_timeout_s(timeout_s),
            own_key=idempotency_key is None,
        )
        self._streams.add(stream)
        return stream

    async def complete(
        self,
        model: str,
        source: Input,
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Completion:
        """Return a complete answer. Cancelling the call cancels the generation."""
        key = self._core().key(idempotency_key)
        request = pb.CompleteRequest(generation=convert.generation(model, source, options or Options(), key))
        answer = await self._call(
            lambda stub: stub.Complete,
            request,
            self._generation_timeout_s(timeout_s),
            own_key=request.generation if idempotency_key is None else None,
        )
        return convert.completion(answer)

    async def chat(
        self,
        model: str,
        messages: Sequence[Message],
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Completion:
        """Return the model's answer to a conversation. To stream it, pass the messages to ``generate``."""
        return await self.complete(
            model, messages, options, timeout_s=timeout_s, idempotency_key=idempotency_key
        )

    async def count_tokens(
        self, model: str, source: str | Sequence[Message], *, timeout_s: float | None = None
    ) -> TokenCount:
        """Return the number of prompt tokens of the input."""
        request = convert.count_request(model, source)
        answer = await self._call(lambda stub: stub.CountTokens, request, self._timeout_s(timeout_s))
        return convert.token_count(answer)

    async def moderate(
        self,
        inputs: Sequence[str],
        *,
        pack: str = "",
        outputs: bool = False,
        timeout_s: float | None = None,
    ) -> Moderated:
        """Return the verdicts of a safety pack on texts, by default those of the tenant's on inputs.

        ``pack`` names a deployment; ``outputs``: by the pack's rules of outputs.
        """
        request = pb.ModerateRequest(inputs=inputs, pack=pack, outputs=outputs)
        answer = await self._call(lambda stub: stub.Moderate, request, self._timeout_s(timeout_s))
        return convert.moderated(answer)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[ServedModel, ...]:
        """Return the models that the key may use."""
        request = pb.ListModelsRequest()
        answer = await self._call(lambda stub: stub.ListModels, request, self._timeout_s(timeout_s))
        return tuple(convert.served_model(one) for one in answer.models)

    async def embed(
        self,
        model: str,
        inputs: EmbedInput,
        options: RowOptions | None = None,
        *,
        dimensions: int | None = None,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Return the vector of each text, or of each list of token ids."""
        request = rows.embed_request(model, inputs, dimensions, options or RowOptions())
        answer = await self._call(lambda stub: stub.Embed, request, self._timeout_s(timeout_s))
        return rows.embeddings(answer)

    async def rerank(
        self,
        model: str,
        query: str,
        documents: Sequence[str],
        options: RowOptions | None = None,
        *,
        top_n: int = 0,
        timeout_s: float | None = None,
    ) -> Ranking:
        """Return the documents by how well they match the query. ``top_n``: only the best; 0: all."""
        request = rows.rerank_request(model, query, documents, top_n, options or RowOptions())
        answer = await self._call(lambda stub: stub.Rerank, request, self._timeout_s(timeout_s))
        return rows.ranking(answer)

    async def classify(
        self,
        model: str,
        inputs: ClassifyInput,
        options: RowOptions | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Classification:
        """Return the label and all probabilities of each text, or of each picture: a PNG or JPEG file."""
        request = rows.classify_request(model, inputs, options or RowOptions())
        answer = await self._call(lambda stub: stub.Infer, request, self._timeout_s(timeout_s))
        return rows.classification(answer)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        options: RowOptions | None = None,
        *,
        outputs: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Inference:
        """Return the outputs of a batch, by default all. ``inputs``: tensors or arrays, by name."""
        request = rows.infer_request(model, inputs, outputs, options or RowOptions())
        answer = await self._call(lambda stub: stub.Infer, request, self._timeout_s(timeout_s))
        return rows.inference(answer)

    def session(self, options: SessionOptions | None = None) -> Session:
        """Return a session: many generations on one stream. Close it, best with ``async with``."""
        session = Session(self._core(), options or SessionOptions())
        self._sessions.add(session)
        return session

    def _core(self) -> Core:
        """Raise RuntimeError outside of ``async with`` and from another event loop, Closed afterwards."""
        self._guard.check()
        if self._entered is None:
            raise RuntimeError("the client is not open: use `async with Client(...) as client`")
        core, loop = self._entered
        if asyncio.get_running_loop() is not loop:
            raise RuntimeError("a client can only be used in the event loop in which it was opened")
        return core

    def _timeout_s(self, requested_s: float | None) -> float:
        return self._options.timeout_s if requested_s is None else checked_timeout_s(requested_s)

    def _generation_timeout_s(self, requested_s: float | None) -> float:
        return self._options.generation_timeout_s if requested_s is None else checked_timeout_s(requested_s)

    async def _call(
        self,
        method: Callable[
            [inference_pb2_grpc.InferenceServiceAsyncStub],
            grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer],
        ],
        request: _Request,
        timeout_s: float,
        *,
        own_key: pb.Generation | None = None,
    ) -> _Answer:
        def attempt(endpoint: Endpoint, attempt_s: float, metadata: Metadata) -> Awaitable[_Answer]:
            return method(endpoint.stub)(request, timeout=attempt_s, metadata=metadata)

        return await self._guard.run(unary(self._core(), attempt, timeout_s, own_key=own_key))
