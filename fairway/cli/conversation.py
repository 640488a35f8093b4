"""The messages of a chat, limited to what fits into the model's context."""

from __future__ import annotations

from dataclasses import dataclass, field

from fairway.cli.calls import client_error
from fairway.client import Client, FairwayError, Message


@dataclass(slots=True)
class Conversation:
    """``turns`` alternate between the user and the model; the system message precedes them."""

    model: str
    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        return [*([Message("system", self.system)] if self.system else []), *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append(Message("user", text))

    def answered(self, text: str) -> None:
        """Append the model's answer, complete or not; without an answer remove the question."""
        if text:
            self.turns.append(Message("assistant", text))
        else:
            self.take_back()

    def take_back(self) -> None:
        """Remove the last question."""
        if self.turns and self.turns[-1].role == "user":
            self.turns.pop()

    def forget_oldest(self) -> bool:
        """Remove the first question and its answer. Return False when only the last question is left."""
        if len(self.turns) < 3:
            return False
        del self.turns[:2]
        return True


async def context_of(client: Client, model: str) -> int:
    """Return the size of the model's context in tokens, 0 if the gateway omits it. Raises CliError."""
    try:
        models = await client.list_models()
    except FairwayError as exc:
        raise client_error(exc, what="cannot list the models") from exc
    return next((found.max_context_tokens for found in models if found.name == model), 0)


async def fit(client: Client, conversation: Conversation, *, context: int, room_tokens: int) -> int:
    """Remove the oldest turns until ``room_tokens`` are left for an answer; return how many were removed.

    The last question always stays: the server rejects it if it alone is too long. Raises CliError.
    """
    dropped = 0
    try:
        while context:
            count = await client.count_tokens(conversation.model, conversation.messages())
            if count.prompt_tokens + room_tokens <= context or not conversation.forget_oldest():
                break
            dropped += 2
    except FairwayError as exc:
        raise client_error(exc, what="cannot count the tokens of the chat") from exc
    return dropped
