"""Output parts on a Session: beside their texts, also where a message takes only the first entries."""

from __future__ import annotations

from typing import Any

from fairway.v1 import common_pb2 as common
from fairway.v1 import inference_pb2 as pb
from services.core.generation import FinishReason, Principal, StageClock, Usage
from services.core.outputs.forms import CALL_FORMS, OutputForm
from services.core.records import KeyRole
from services.gateway.events import Accepted, ChoiceResult, Finished, Received, RequestSink
from services.gateway.faces.grpc.session import MAX_MESSAGE_TOKENS, MuxedSession

HERMES = CALL_FORMS["hermes"]
TEXTS = ["Sure. ", HERMES.begin + "f" + HERMES.middle, '{"a":', "1}" + HERMES.close]


class Started:
    """Takes the sink of each request that is submitted."""

    def __init__(self) -> None:
        self.sinks: list[RequestSink] = []

    def submit(self, principal: Principal, generation: pb.Generation, sink: RequestSink, **_: Any) -> Any:
        self.sinks.append(sink)
        return self

    def credit(self, choice: int, tokens: int) -> None: ...


def merged(frame: common.TokenFrame) -> dict[int, str]:
    """Return by entry its parts as text."""
    return {
        found.entry: "".join(part.content + part.call.name + part.call.arguments for part in found.parts)
        for found in frame.parts
    }


async def run(tokens: int) -> tuple[list[pb.SessionResponse], pb.Finished]:
    """Return the messages of one output whose first piece has that many tokens, and its end."""
    service: Any = Started()
    session = MuxedSession(service, Principal("k", KeyRole.TENANT, "t"), lambda: Received(0.0, 0, "r"))
    generation = pb.Generation(model="m", prompt="x", parts=True)
    session.handle(pb.SessionRequest(start=pb.SessionStart(stream_id=1, generation=generation)), None)
    (sink,) = service.sinks
    sink.on_accepted(Accepted("r", "m", "d", 1, 1, 1, form=OutputForm(calls=HERMES, held=True)))
    for number, text in enumerate(TEXTS):
        sink.on_tokens(0, number, [0] * (tokens if not number else 1), text, ())
    result = ChoiceResult(0, FinishReason.STOP, "", 4)
    sink.on_finished(Finished((result,), Usage(1, 4), StageClock(0)))
    found = [await session.next_message(1.0)]
    while not found[-1].finished:
        found.append(await session.next_message(1.0))
    return found, found[-1].finished[0].finished


async def test_parts_stand_beside_their_texts() -> None:
    (message,), finished = await run(1)
    assert list(message.tokens.texts) == TEXTS
    assert merged(message.tokens) == {0: "Sure.", 1: "f", 2: '{"a":', 3: "1}"}
    assert finished.choices[0].finish_reason == common.FINISH_REASON_TOOL_CALLS


async def test_parts_of_entries_that_wait_stay_theirs() -> None:
    messages, _ = await run(MAX_MESSAGE_TOKENS)
    assert [len(message.tokens.handles) for message in messages] == [1, 3]
    assert [merged(message.tokens) for message in messages] == [{0: "Sure."}, {0: "f", 1: '{"a":', 2: "1}"}]
