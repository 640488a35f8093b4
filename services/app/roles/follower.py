"""The follower: ranks on this node of engines that lead from another one."""

from __future__ import annotations

from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.app.environment import Environment
from services.app.process import Role
from services.app.roles.shared import open_shared_files
from services.app.roles.worker import vllm_folder
from services.rpc.server import RpcService
from services.worker.follower import COMMAND, FollowerServicer
from services.worker.slots.engine_process import EngineTimeouts, process_launcher


def follower(environment: Environment) -> Role:
    """The follower: ranks on this node of engines that lead from another one."""
    settings = environment.settings
    files, chunks = open_shared_files(environment)
    launch = process_launcher(
        environment.clock,
        environment.supervisor,
        EngineTimeouts(),
        vllm_dir=vllm_folder(settings),
        ranks_address=settings.ranks_address,
        command=COMMAND,
    )
    servicer = FollowerServicer(launch, files, devices=settings.devices)
    server = environment.server(
        RpcService(
            worker_pb2.DESCRIPTOR.services_by_name["FollowerService"],
            worker_pb2_grpc.add_FollowerServiceServicer_to_server,
            servicer,
        ),
        chunks,
    )
    return Role(server, start=files.own, drain=servicer.close)
