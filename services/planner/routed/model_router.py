"""Router of one model in a grouper: its view of instances, and the state that it publishes."""

from collections.abc import Mapping
from zlib import crc32

import msgspec
import numpy as np

from services.planner.state import identity
from shared.contracts.base import InstanceId, ModelName, RequestId, Seconds, UnixTime
from shared.contracts.errors import ContractError, SchemaMismatchError
from shared.contracts.requests import QueuedRequest, ReplyMode
from shared.contracts.routing import (
    CalibrationSnapshot,
    InstanceLoad,
    Prefill,
    PrefillSample,
    PrefillsSampled,
    RouterState,
    RoutingTrust,
    SoftState,
)
from shared.contracts.telemetry import InstanceStatus
from solver.prediction.calibration.coverage import ALL
from solver.prediction.prefill.features import SCHEMA_VERSION, feature_matrix
from solver.routing.admission_queue import Assignment
from solver.routing.backlog import Backlog
from solver.routing.device_prefills import DeviceKey, DevicePrefills
from solver.routing.options import RoutingOptions
from solver.routing.prefills import request_features
from solver.routing.prefix_hashes import part_tokens
from solver.routing.prefix_index import PrefixIndex
from solver.routing.request import RoutedRequest
from solver.routing.router import Router

LEFT_MEMORY_S = 60.0
"""
Time after which an instance that left is forgotten; by then all routers have recorded that it left
without pending work.
"""
SENT_MEMORY_S = 3600.0
"""
Time after which a sent request counts as ended.

The limit is needed because the message about the end of a request may be lost.
"""


class ModelRouter:
    """
    A `Router` with its data about the instances of one model; all methods are synchronous, without
    IO.

    The tenant and the request id together identify a request.

    Args:
        model: Model of the requests.
        options: Options of the routing policy.
        sender: Unique name of this grouper's run.
    """

    def __init__(self, model: ModelName, options: RoutingOptions, sender: str) -> None:
        self.model = model
        self.prefills = DevicePrefills(options=options, origin=sender)
        self._sender = sender
        self._backlog = Backlog(sender)
        self.router = Router(
            [],
            options,
            self.prefills,
            random=np.random.default_rng(crc32(sender.encode())),
            backlog=self._backlog,
        )
        self._indices: dict[InstanceId, PrefixIndex] = {}
        self._incarnations: dict[InstanceId, str] = {}
        self._left_at: dict[InstanceId, UnixTime] = {}
        """Instances that left recently -> time at which they left."""
        self._shared_version = 0
        self._samples: dict[DeviceKey, list[PrefillSample]] = {}

    @property
    def num_waiting(self) -> int:
        """Number of requests that are assigned to an instance and not yet sent."""
        return sum(self.router.num_waiting(each) for each in self.router.instances)

    def on_status(self, status: InstanceStatus, now: UnixTime) -> None:
        """Handle the status of an instance of the model, which may be new or restarted."""
        instance_id = status.instance_id
        if self._incarnations.get(instance_id) != status.incarnation:
            self._incarnations[instance_id] = status.incarnation
            self._indices[instance_id] = PrefixIndex(status.kv_capacity_tokens)
        self.prefills.device_of[instance_id] = (status.engine, status.device)
        self._indices[instance_id].resize(status.kv_capacity_tokens)
        self._left_at.pop(instance_id, None)
        if instance_id not in self.router.instances:
            self.router.change_instances([*self.router.instances, instance_id], now)
        # Time stamps order the reports, since restarted agents restart their counters. The agent's
        # clock may be ahead of this one.
        at = min(status.at, now)
        load = InstanceLoad(
            seq=_seq_at(at),
            at=at,
            running=status.running,
            prefill_backlog_tokens=status.prefill_backlog_tokens,
            kv_utilization=status.kv_utilization,
        )
        self.router.observe(instance_id, load, now)

    def lose(self, instance_id: InstanceId, now: UnixTime) -> list[RequestId]:
        """
        Remove an instance that is silent or serves another model; return the requests to reassign.

        The known content of the instance's cache is kept for some time, since the same incarnation
        may return.
        """
        if instance_id not in self.router.instances:
            return []
        left = self.router.change_instances(
            [each for each in self.router.instances if each != instance_id], now
        )
        self._left_at[instance_id] = now
        self.prefills.device_of.pop(instance_id, None)
        return [request.request_id for request in left]

    def forget_cache(self, instance_id: InstanceId) -> None:
        """Drop the known content of the instance's cache."""
        self._indices.pop(instance_id, None)
        self._incarnations.pop(instance_id, None)

    def reset(self, now: UnixTime) -> None:
        """Drop the expected work of all assigned and sent requests."""
        instances = self.router.instances
        self.router.change_instances([], now)
        self.router.change_instances(instances, now)

    def submit(self, key: RequestId, request: QueuedRequest, now: UnixTime) -> None:
        """
        Choose an instance and queue the request for the instance; at least one instance must be
        known.
        """
        sampling = request.sampling
        routed = RoutedRequest(
            request_id=key,
            tenant=request.tenant,
            arrived_at=request.arrived_at,
            prompt_tokens=request.prompt_tokens,
            max_tokens=sampling.max_tokens,
            slo=request.slo,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            is_streaming=request.reply_mode is ReplyMode.STREAM,
            cached_tokens=self._cached_tokens(request),
        )
        self.router.submit(routed, now)

    def on_prefill(self, instance_id: InstanceId, prefill: Prefill, now: UnixTime) -> None:
        """Handle the first token of a request; any grouper may have sent the request."""
        self.router.served(prefill.tenant, prefill.prompt_tokens, now)
        index = self._indices.get(instance_id)
        if index is not None:
            index.store(prefill.prefix, part_tokens(len(prefill.prefix), prefill.prompt_tokens))
        key = RequestId(identity(prefill.tenant, prefill.request_id))
        assignment = self.router.first_token(key, now)
        if assignment is None or assignment.instance_id != instance_id:
            return
        if index is not None:
            index.observe(assignment.candidate.cached_tokens, prefill.cached_tokens)
        if prefill.prefill_s > 0:
            self._learn(assignment, prefill.prefill_s)

    def shared_work(self, now: UnixTime) -> RouterState | None:
        """
        State that the other routers of the model need immediately; None if the state has not
        changed.
        """
        if self._backlog.version == self._shared_version:
            return None
        self._shared_version = self._backlog.version
        work = self._backlog.snapshot().work.get(self._sender, {})
        return RouterState(
            sender=self._sender, model=self.model, at=now, work=SoftState(work={self._sender: work})
        )

    def forget(self, sender: str) -> None:
        """Drop another router that has been silent for too long."""
        self._backlog.forget(sender)

    def shared_state(self, now: UnixTime, since: Mapping[str, int]) -> RouterState:
        """
        State that the other routers of the model need periodically.

        Args:
            now: Current time.
            since: Number of the last published residual, by version of the model that residuals
                correct.
        """
        self.router.forget(now - SENT_MEMORY_S, now)
        for instance_id, at in list(self._left_at.items()):
            if at < now - LEFT_MEMORY_S:
                del self._left_at[instance_id]
                self._backlog.leave(instance_id)
                self.forget_cache(instance_id)
        known = self._backlog.snapshot()
        return RouterState(
            sender=self._sender,
            model=self.model,
            at=now,
            work=SoftState(
                work={self._sender: known.work.get(self._sender, {})}, loads=known.loads
            ),
            calibrations=tuple(
                _newer(each, since.get(each.model_version, 0)) for each in self.prefills.snapshots()
            ),
            trusts=self.trusts(),
        )

    def adopt(self, state: RouterState, now: UnixTime) -> None:
        """
        Adopt the state that another router published about itself and about instances known here.

        Entries of unknown instances and invalid residuals are ignored.
        """
        known = self._indices.keys()
        work = state.work.work.get(state.sender, {})
        shared = SoftState(
            work={state.sender: {each: work[each] for each in work.keys() & known}},
            loads={
                each: _no_later(state.work.loads[each], now)
                for each in state.work.loads.keys() & known
            },
        )
        self._backlog.adopt(shared, now)
        for snapshot in state.calibrations:
            try:
                self.prefills.adopt(snapshot)
            except (SchemaMismatchError, ContractError):
                continue

    def take_samples(self, now: UnixTime) -> list[PrefillsSampled]:
        """
        Return the prefills observed since the last call, as training samples for the estimator.
        """
        taken, self._samples = self._samples, {}
        return [
            PrefillsSampled(
                sender=self._sender,
                model=self.model,
                engine=engine,
                device=device,
                at=now,
                schema_version=SCHEMA_VERSION,
                samples=tuple(samples),
            )
            for (engine, device), samples in taken.items()
        ]

    def trusts(self) -> tuple[RoutingTrust, ...]:
        """Quality of the router's predictions, for operators."""
        found = []
        for (engine, device), monitor in self.prefills.monitors.items():
            residuals = monitor.residuals().get(ALL)
            if residuals is not None:
                found.append(
                    RoutingTrust(
                        engine=engine,
                        device=device,
                        version=self.prefills.version((engine, device)),
                        trusted=monitor.trusted,
                        level=monitor.level,
                        count=residuals.count,
                        covered=residuals.covered,
                        residual_s=residuals.residual_s,
                    )
                )
        return tuple(found)

    def _learn(self, assignment: Assignment, prefill_s: Seconds) -> None:
        key = self.prefills.device_of.get(assignment.instance_id)
        if key is None:
            return
        self.prefills.observe(assignment, prefill_s)
        if self.prefills.is_trusted:
            self.router.recover()
        else:
            self.router.fall_back()
        features = request_features(assignment.request)
        row = feature_matrix(features, [assignment.candidate])[0]
        sample = PrefillSample(features=tuple(row.tolist()), prefill_s=prefill_s)
        self._samples.setdefault(key, []).append(sample)

    def _cached_tokens(self, request: QueuedRequest) -> dict[InstanceId, int]:
        each_tokens = part_tokens(len(request.prefix), request.prompt_tokens)
        matches = {
            instance_id: self._indices[instance_id].matched_parts(request.prefix)
            for instance_id in self.router.instances
        }
        return {
            instance_id: min(request.prompt_tokens - 1, int(parts * each_tokens))
            for instance_id, parts in matches.items()
            if parts
        }


def _newer(snapshot: CalibrationSnapshot, number: int) -> CalibrationSnapshot:
    residuals = tuple(each for each in snapshot.residuals if each.number > number)
    return msgspec.structs.replace(snapshot, residuals=residuals)


def _no_later(load: InstanceLoad, now: UnixTime) -> InstanceLoad:
    """
    Copy of *load* whose time is at most *now*, since the clock of the reporting host may be ahead.
    """
    at = min(load.at, now)
    return msgspec.structs.replace(load, at=at, seq=min(load.seq, _seq_at(now)))


def _seq_at(at: UnixTime) -> int:
    """Sequence number for a report that was made at time *at*."""
    return round(at * 1000)
