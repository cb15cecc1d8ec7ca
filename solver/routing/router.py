"""QUARTZ's router: choice of instance and dispatch time of each request (algorithm 1)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from shared.contracts.base import InstanceId, RequestId, TenantId, UnixTime
from shared.contracts.routing import InstanceLoad
from solver.routing.admission_queue import AdmissionQueue, Assignment
from solver.routing.backlog import Backlog
from solver.routing.dispatch_key import KeyInputs, dispatch_key
from solver.routing.options import FALLBACK, Placement, RoutingOptions
from solver.routing.placement import best_by_load, best_by_score, candidate_set, size_s
from solver.routing.request import Candidate, PrefillEstimate, PrefillPredictor, RoutedRequest
from solver.routing.service_counters import ServiceCounters


class Router:
    """
    Router as an incremental, deterministic state machine; each call passes the time.

    A request is known from `submit` to `finish`, `discard` or `forget`. Every policy of `VARIANTS`
    is this class with other options.

    Args:
        instances: Instances that serve the model, see `change_instances`.
        predictor: Prefill times; also called if the policy does not need them, so that backlogs and
            coverage of policies can be compared.
        random: Draws candidates.
        backlog: Expected work; the caller shares its state with other routers.
    """

    def __init__(
        self,
        instances: Sequence[InstanceId],
        options: RoutingOptions,
        predictor: PrefillPredictor,
        *,
        random: np.random.Generator,
        backlog: Backlog,
    ) -> None:
        self._options = options
        self._active = options
        self._predictor = predictor
        self._random = random
        self.backlog = backlog
        self._queues = {instance_id: AdmissionQueue(_by_key) for instance_id in instances}
        self._in_flight = dict.fromkeys(instances, 0)
        self._dispatched: dict[RequestId, tuple[Assignment, UnixTime]] = {}
        """Dispatched requests with their dispatch times, the oldest first."""
        self._prefilling = {instance_id: set[RequestId]() for instance_id in instances}
        self._counters = ServiceCounters()

    @property
    def is_fallen_back(self) -> bool:
        return self._active is not self._options

    @property
    def instances(self) -> Sequence[InstanceId]:
        """Instances to which the router may send requests."""
        return list(self._queues)

    def change_instances(
        self, instances: Sequence[InstanceId], now: UnixTime
    ) -> list[RoutedRequest]:
        """
        Send requests only to *instances* from now on.

        Returns:
            Requests that waited for removed instances, in order; the router forgets them.
        """
        for instance_id in instances:
            if instance_id not in self._queues:
                self._queues[instance_id] = AdmissionQueue(self._ordering)
                self._in_flight[instance_id] = 0
                self._prefilling[instance_id] = set()
        gone = [each for each in self._queues if each not in instances]
        left = [request for each in gone for request in self._leave_queue(each, now)]
        for instance_id in gone:
            sent = [a for a, _ in self._dispatched.values() if a.instance_id == instance_id]
            for assignment in sent:
                self.finish(assignment.request.request_id, now)
            del self._queues[instance_id], self._in_flight[instance_id]
            del self._prefilling[instance_id]
        return left

    def num_waiting(self, instance_id: InstanceId) -> int:
        """Number of requests that are assigned to the instance and not dispatched."""
        return len(self._queues[instance_id])

    def submit(self, request: RoutedRequest, now: UnixTime) -> Assignment:
        """
        Choose an instance for *request*, and queue the request for the instance (algorithm 1, lines
        1-10).

        The router must have an instance, and the request must not wait in a queue. If the request
        was dispatched before, this call first finishes the earlier submission.
        """
        self.finish(request.request_id, now)
        instance_ids = candidate_set(
            list(self._queues),
            cached_tokens=request.cached_tokens,
            num_candidates=self._active.num_candidates,
            random=self._random,
        )
        candidates = [self._candidate(request, instance_id) for instance_id in instance_ids]
        estimates = self._predictor.predict(request, candidates)
        index = self._choose(candidates, estimates, now)
        assignment = self._assignment(request, candidates[index], estimates[index], now)
        self._in_flight[assignment.instance_id] += 1
        self.backlog.assign(
            request.request_id,
            assignment.instance_id,
            mean_s=assignment.estimate.mean_s,
            tokens=request.prompt_tokens - candidates[index].cached_tokens,
            now=now,
        )
        self._queues[assignment.instance_id].push(assignment)
        return assignment

    def dispatch(self, now: UnixTime) -> list[Assignment]:
        """
        Return the requests to send now, in order per instance; an idle engine always gets a waiting
        request.
        """
        sent = []
        for instance_id, queue in self._queues.items():
            while self._has_room(instance_id, now):
                assignment = self._next(queue, now)
                if assignment is None:
                    break
                request_id = assignment.request.request_id
                self.backlog.dispatch(request_id, now)
                self._dispatched[request_id] = (assignment, now)
                self._prefilling[instance_id].add(request_id)
                sent.append(assignment)
        return sent

    def first_token(self, request_id: RequestId, now: UnixTime) -> Assignment | None:
        """
        Record a first token; return the assignment, or None if no prefill of the request is
        pending.
        """
        assignment, _ = self._dispatched.get(request_id, (None, now))
        if assignment is None or request_id not in self._prefilling[assignment.instance_id]:
            return None
        self.backlog.finish(request_id, now)
        self._prefilling[assignment.instance_id].discard(request_id)
        return assignment

    def served(self, tenant: TenantId, prompt_tokens: int, now: UnixTime) -> None:
        """
        Count a prompt as service of *tenant* at its first token, whichever router sent the request.
        """
        self._counters.count(tenant, prompt_tokens, now)

    def finish(self, request_id: RequestId, now: UnixTime) -> None:
        """Record the request's last token or failure; unknown requests are ignored."""
        assignment, _ = self._dispatched.pop(request_id, (None, now))
        if assignment is not None:
            self.backlog.give_up(request_id, now)
            self._prefilling[assignment.instance_id].discard(request_id)
            self._in_flight[assignment.instance_id] -= 1

    def forget(self, before: UnixTime, now: UnixTime) -> None:
        """
        Finish requests that were sent before the time *before*, since the messages about their ends
        may be lost.
        """
        while self._dispatched:
            request_id, (_, sent_at) = next(iter(self._dispatched.items()))
            if sent_at >= before:
                break
            self.finish(request_id, now)

    def discard(self, request_id: RequestId, now: UnixTime) -> None:
        """
        Drop a waiting request that was cancelled or served elsewhere; ignore unknown requests.
        """
        for instance_id, queue in self._queues.items():
            if queue.discard(request_id):
                self.backlog.give_up(request_id, now)
                self._in_flight[instance_id] -= 1

    def observe(self, instance_id: InstanceId, load: InstanceLoad, now: UnixTime) -> None:
        """Adopt a load report of an instance."""
        self.backlog.observe(instance_id, load, now)

    def fall_back(self) -> None:
        """Start the fallback to first come, first served and least loaded (§3.5)."""
        if self._options.falls_back and not self.is_fallen_back:
            self._active = FALLBACK
            self._reorder()

    def recover(self) -> None:
        """End the fallback: predictions are trusted again."""
        if self.is_fallen_back:
            self._active = self._options
            self._reorder()

    def _leave_queue(self, instance_id: InstanceId, now: UnixTime) -> list[RoutedRequest]:
        left, queue = [], self._queues[instance_id]
        while (assignment := queue.pop()) is not None:
            self.backlog.give_up(assignment.request.request_id, now)
            left.append(assignment.request)
        return left

    @property
    def _ordering(self) -> Callable[[Assignment], float]:
        return _by_arrival if self.is_fallen_back else _by_key

    def _reorder(self) -> None:
        for queue in self._queues.values():
            queue.reorder(self._ordering)

    def _choose(
        self,
        candidates: Sequence[Candidate],
        estimates: Sequence[PrefillEstimate],
        now: UnixTime,
    ) -> int:
        placement = self._active.placement
        if placement is Placement.SCORE:
            waits_s = [self.backlog.expected_wait_s(each.instance_id, now) for each in candidates]
            return best_by_score(
                candidates, waits_s, [size_s(self._active.size, each) for each in estimates]
            )
        in_flight = [self._in_flight[each.instance_id] for each in candidates]
        return best_by_load(placement, candidates, in_flight)

    def _assignment(
        self,
        request: RoutedRequest,
        candidate: Candidate,
        estimate: PrefillEstimate,
        now: UnixTime,
    ) -> Assignment:
        """
        Assignment of a request, with its key by the configured policy; a fallback does not use the
        key.
        """
        inputs = KeyInputs(
            arrived_at=request.arrived_at,
            deadline_at=request.deadline_at,
            size_s=size_s(self._options.size, estimate),
            service_rate_per_s=self._counters.rate_per_s(request.tenant, now),
        )
        key = dispatch_key(self._options.admission, self._options.weights, inputs)
        return Assignment(request=request, candidate=candidate, estimate=estimate, key=key)

    def _candidate(self, request: RoutedRequest, instance_id: InstanceId) -> Candidate:
        load = self.backlog.load(instance_id)
        cached = request.cached_tokens.get(instance_id, 0)
        return Candidate(
            instance_id=instance_id,
            cached_tokens=cached if self._options.sees_locality else 0,
            running=load.running,
            prefill_backlog_tokens=self.backlog.outstanding_tokens(instance_id),
            kv_utilization=load.kv_utilization,
        )

    def _next(self, queue: AdmissionQueue, now: UnixTime) -> Assignment | None:
        """
        Remove and return the head of *queue*; a request that will certainly be late is first moved
        back once.
        """
        penalty_s = self._active.late_penalty_s
        while (assignment := queue.pop()) is not None:
            if penalty_s <= 0 or assignment.is_late or not assignment.will_be_late(now):
                return assignment
            queue.push(replace(assignment, key=assignment.key + penalty_s, is_late=True))
        return None

    def _has_room(self, instance_id: InstanceId, now: UnixTime) -> bool:
        if not self._prefilling[instance_id] and self.backlog.is_idle(instance_id):
            return True
        return self.backlog.engine_wait_s(instance_id, now) < self._options.max_engine_wait_s


def _by_key(assignment: Assignment) -> float:
    return assignment.key


def _by_arrival(assignment: Assignment) -> float:
    return assignment.request.arrived_at
