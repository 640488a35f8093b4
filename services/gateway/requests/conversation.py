"""The conversation of a generation, as its chat template renders it."""

from __future__ import annotations

from fairway.v1 import inference_pb2
from services.gateway.requests.tool_use import tool_use
from services.gateway.text.text_model import ChatMessage, Conversation
from services.rpc.convert.inference import CALL


def conversation_of(generation: inference_pb2.Generation) -> Conversation:
    """Return the turns, the variables and the tools that the template sees."""
    chat = generation.chat
    messages = [
        ChatMessage(
            turn.role,
            turn.content,
            turn.name,
            tuple(map(CALL.from_proto, turn.tool_calls)),
            turn.tool_call_id,
            turn.reasoning_content,
        )
        for turn in chat.messages
    ]
    return Conversation(messages, chat.template_variables, tool_use(generation).tools)
