"""Scaling on the wire: what was decided, why, and from which figures."""

from __future__ import annotations

from fairway.v1 import controlplane_pb2 as pb
from services.adapters.grpc.leader_calls import LeadingPlane
from services.controlplane.fleet import FleetSnapshot, read_snapshot, readable, replicas_of, wanted_in
from services.controlplane.scaling.controller import ScalingController
from services.core.errors import NoLeader, NotFound, Unavailable
from services.core.paging import page_of
from services.core.records import DEPLOYMENTS, SCALED, Deployment
from services.core.scaling import Scaled
from services.ports.store import Store
from services.rpc.convert import controlplane as convert
from services.rpc.convert.inference import duration_of, timestamp
from services.rpc.convert.scheduler import LOAD


class ScalingListing:
    """Answers with the leader's observations. Without a leader, from the stored decisions alone."""

    def __init__(self, store: Store, controller: ScalingController, leader: LeadingPlane) -> None:
        self._store = store
        self._controller = controller
        self._leader = leader

    async def page(self, request: pb.ListScalingRequest, *, forwarded: bool) -> pb.ListScalingResponse:
        """Return a page. ``forwarded``: another control plane took this one for the leader.

        Raises NotFound for a named deployment without bounds.
        """
        if not self._controller.leads and not forwarded:
            try:
                return await self._leader.ask(lambda plane: plane.ListScaling, request)
            except (NoLeader, Unavailable):
                pass  # the stored decisions answer
        snapshot = await read_snapshot(self._store)
        found = [
            one
            for entry in snapshot.under(DEPLOYMENTS)
            if (one := readable(entry, Deployment)) is not None
            and one.scaling is not None
            and request.deployment in ("", one.meta.name)
        ]
        if request.deployment and not found:
            name = request.deployment
            raise NotFound(
                f"no deployment {name} has scaling bounds; "
                f"`fairway deployments update {name} --max-replicas N` sets them",
                name=name,
            )
        page, token = page_of(
            found, lambda one: one.meta.name, size=request.page_size, token=request.page_token
        )
        return pb.ListScalingResponse(
            deployments=[self._message(one, snapshot) for one in page], next_page_token=token
        )

    def _message(self, deployment: Deployment, snapshot: FleetSnapshot) -> pb.DeploymentScaling:
        name = deployment.meta.name
        entry, observed = snapshot.entries.get(SCALED + name), self._controller.scaler(name)
        decided = None if entry is None else readable(entry, Scaled)
        decided = decided or Scaled(name, wanted_in(snapshot.fleet, deployment))
        replicas = replicas_of(snapshot.fleet, name)
        ready = sum(one.ready for one in replicas)
        assert deployment.scaling is not None
        message = convert.SCALED.to_proto(
            decided,
            scaling=convert.SCALING.to_proto(deployment.scaling),
            ready_replicas=ready,
            starting_replicas=len(replicas) - ready,
        )
        if observed is not None:
            message.start.CopyFrom(duration_of(observed.starts.mean_s))
            message.present_reasons.extend(map(convert.REASON.to_proto, observed.reasons))
            message.zones.extend(pb.ZoneReplicas(zone=zone, replicas=n) for zone, n in observed.zones)
            if observed.load is not None:
                message.load.CopyFrom(LOAD.to_proto(observed.load))
                message.observe_time.CopyFrom(timestamp(observed.load_unix_s))
        return message
