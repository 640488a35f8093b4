"""Reads of workers' flight recorders."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import grpc

from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.core.errors import Unavailable
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.status import from_rpc_error
from services.runtime.certificates import Certificates

READ_S: Final = 5.0  # time of all pages of one worker
MAX_PAGES: Final = 64
MAX_STEPS: Final = 4096
MAX_MEMBERS: Final = 256 * 1024


class GrpcSteps:
    """Implements ``controlplane.timelines.collector.StepReads``."""

    def __init__(
        self, internal_token: str, certificates: Certificates | None = None, *, limit_s: float = READ_S
    ) -> None:
        self._metadata = auth_metadata(internal_token)
        self._certificates = certificates
        self._limit_s = limit_s

    async def read(self, address: str, request_id: str) -> Sequence[worker_pb2.ReadStepsResponse]:
        """Return the pages of a request's steps, at least one; the last has ``next_step`` if there are more
        than one timeline holds, or than arrived in time. Raises Unavailable, or the worker's error."""
        request = worker_pb2.ReadStepsRequest(request_id=request_id)
        pages = list[worker_pb2.ReadStepsResponse]()
        steps = members = 0
        channel = open_channel(address, "worker", self._certificates)
        try:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            async with asyncio.timeout(self._limit_s):
                while len(pages) < MAX_PAGES and steps < MAX_STEPS and members < MAX_MEMBERS:
                    page: worker_pb2.ReadStepsResponse = await stub.ReadSteps(
                        request, timeout=self._limit_s, metadata=self._metadata
                    )
                    pages.append(page)
                    steps += len(page.steps)
                    members += sum(len(step.members) for step in page.steps)
                    if not page.next_step:
                        break
                    request.first_step = page.next_step
        except (TimeoutError, grpc.aio.AioRpcError) as failure:
            if pages:
                return pages
            if isinstance(failure, TimeoutError) or failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unavailable(f"the worker at {address} does not answer") from failure
            raise from_rpc_error(failure) from failure
        finally:
            await channel.close()
        return pages
