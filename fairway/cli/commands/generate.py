"""`fairway complete` and `fairway chat`: stream from the gateway."""

from __future__ import annotations

import asyncio
from typing import Annotated

import grpc
import typer

from fairway.cli import targets
from fairway.cli.calls import bearer, open_channel, to_cli_error
from fairway.cli.errors import CliError
from fairway.cli.output import err, out, plain
from fairway.cli.targets import DEFAULT_STATE_DIR, ApiKeyOption, GrpcOption, StateDirOption, Target
from fairway.v1 import common_pb2, inference_pb2, inference_pb2_grpc

ModelOption = Annotated[str, typer.Option("--model", help="Else the installation's own.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, max=1048576)]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", min=0, max=2)]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0)]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one answer.")]


def complete(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    model: ModelOption = "",
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    timeout: TimeoutOption = 120.0,
    grpc_address: GrpcOption = "",
    api_key: ApiKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Continue a text and print it as it comes."""
    target = targets.gateway(grpc_address, api_key, state_dir)
    generation = inference_pb2.Generation(
        model=targets.default_model(model, state_dir),
        prompt=prompt,
        sampling=_sampling(temperature, seed),
        max_output_tokens=max_tokens,
    )
    plain(out(), prompt, end="")
    asyncio.run(_stream(target, generation, timeout))


def chat(
    model: ModelOption = "",
    system: Annotated[str, typer.Option("--system", help="A system message.")] = "",
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    timeout: TimeoutOption = 120.0,
    grpc_address: GrpcOption = "",
    api_key: ApiKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Talk to a model. An empty line or Ctrl-D ends it."""
    target = targets.gateway(grpc_address, api_key, state_dir)
    name = targets.default_model(model, state_dir)
    history = [inference_pb2.ChatMessage(role="system", content=system)] if system else []
    while text := _ask():  # outside of any event loop: Ctrl-C ends it at once
        history.append(inference_pb2.ChatMessage(role="user", content=text))
        generation = inference_pb2.Generation(
            model=name,
            chat=inference_pb2.Chat(messages=history),
            sampling=_sampling(temperature, seed),
            max_output_tokens=max_tokens,
        )
        answer = asyncio.run(_stream(target, generation, timeout))
        history.append(inference_pb2.ChatMessage(role="assistant", content=answer))


async def _stream(target: Target, generation: inference_pb2.Generation, timeout_s: float) -> str:
    """Print an answer as it comes and return it. Raises CliError unless the stream ends as it must."""
    request = inference_pb2.GenerateRequest(generation=generation)
    pieces: list[str] = []
    finished: inference_pb2.Finished | None = None
    console = out()
    try:
        async with open_channel(target.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async for event in stub.Generate(request, timeout=timeout_s, metadata=bearer(target.key)):
                if event.HasField("chunk"):
                    pieces.append(event.chunk.text)
                    plain(console, event.chunk.text, end="")
                elif event.HasField("finished"):
                    finished = event.finished
    except grpc.aio.AioRpcError as exc:
        plain(console)
        raise to_cli_error(exc, what="the generation failed") from exc
    plain(console)
    if finished is None:
        raise CliError("STREAM_BROKEN", "the stream ended without its terminal event", next_step="try again")
    _show_end(finished)
    return "".join(pieces)


def _show_end(finished: inference_pb2.Finished) -> None:
    reasons = {common_pb2.FinishReason.Name(choice.finish_reason) for choice in finished.choices}
    words = ", ".join(sorted(reason.removeprefix("FINISH_REASON_").lower() for reason in reasons))
    usage = finished.usage
    err().print(f"[dim]({words}; {usage.prompt_tokens} prompt and {usage.output_tokens} output tokens)[/]")


def _sampling(temperature: float | None, seed: int | None) -> common_pb2.Sampling:
    sampling = common_pb2.Sampling()
    if temperature is not None:
        sampling.temperature = temperature
    if seed is not None:
        sampling.seed = seed
    return sampling


def _ask() -> str:
    try:
        return err().input("> ").strip()
    except EOFError:
        return ""
