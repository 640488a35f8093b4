"""The inputs of generations under their safety packs: every text that the model reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from fairway.v1 import inference_pb2
from services.core.errors import ContentFiltered
from services.gateway.safety.requests import RequestSafety

# Returns the text of token ids.
Decode = Callable[[Sequence[int]], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of a message, in place. ``index``: of a repeated field; None: of a plain one."""

    holder: Any
    field: str
    index: int | None
    path: str

    def read(self) -> str:
        found = getattr(self.holder, self.field)
        return str(found if self.index is None else found[self.index])

    def write(self, text: str) -> None:
        if self.index is None:
            setattr(self.holder, self.field, text)
        else:
            getattr(self.holder, self.field)[self.index] = text


async def filtered_generation(
    safety: RequestSafety, generation: inference_pb2.Generation, decode: Decode, *, anew: bool
) -> inference_pb2.Generation:
    """Return the generation as the model may read it; itself where nothing is redacted.

    Raises ContentFiltered, also for token ids whose text would be redacted: they have none to replace.
    """
    if generation.WhichOneof("input") == "token_ids":
        text = await decode(generation.token_ids.ids)
        (passed,) = await safety.inputs([text], lambda _: "token_ids", anew=anew)
        if passed != text:
            raise ids_refused("token_ids")
        safety.asks(text)
        return generation
    own = inference_pb2.Generation()
    own.CopyFrom(generation)
    places = [_Text(own, "prompt", None, "prompt")] if own.HasField("prompt") else []
    places += list(_texts(own.chat, "chat.")) if own.HasField("chat") else []
    before = [place.read() for place in places]
    texts = await safety.inputs(before, lambda at: places[at].path, anew=anew)
    for place, text in zip(places, texts, strict=True):
        place.write(text)
    users = (turn.content for turn in reversed(own.chat.messages) if turn.role == "user")
    safety.asks(own.prompt or next(users, ""))
    return generation if texts == before else own


def ids_refused(field: str) -> ContentFiltered:
    """Return the error of token ids whose text would be redacted."""
    return ContentFiltered(f"{field} has what the safety pack redacts; send it as text", field=field)


def _texts(message: Message, path: str) -> Iterator[_Text]:
    """Yield every text of a message and of those within it. A role is one of few words, and is none."""
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        if field.type == field.TYPE_STRING and field.name != "role":
            if field.is_repeated:
                yield from (_Text(message, field.name, at, f"{name}[{at}]") for at in range(len(value)))
            else:
                yield _Text(message, field.name, None, name)
        elif field.type == field.TYPE_MESSAGE:
            parts = enumerate(value) if field.is_repeated else [(None, value)]
            for at, part in parts:
                yield from _texts(part, f"{name}." if at is None else f"{name}[{at}].")
