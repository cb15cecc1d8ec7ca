"""
vLLM connector for KV checkpoints in the host memory of a CPU engine.

This connector supports only CPUs, where a copy is a plain memory copy. On a GPU, use vLLM's own
offloader (`kv_offloading_size` in a model's `engine_args`), which does not support CPUs. It copies
with pinned memory, a separate stream and events, and is maintained with vLLM's model runners.

The module uses experimental interfaces of vLLM; the contract suite fails when these change.
"""

from dataclasses import dataclass
from typing import Any

import structlog
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from services.agent.backends.host_index import HostIndex
from services.agent.backends.totals import CheckpointTotals
from services.agent.backends.vllm.kv.checkpoints import Checkpoints
from services.agent.backends.vllm.kv.layout import block_bytes, layers_of, obstacle
from services.agent.backends.vllm.kv.store import HostStore
from services.agent.backends.vllm.kv.transfers import Transfers
from services.agent.backends.vllm.shared.core_settings import refusal
from services.agent.backends.vllm.shared.qos import qos_in_core

log = structlog.get_logger()


@dataclass
class HostKvMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Message to the worker with every iteration."""

    transfers: Transfers


@dataclass
class HostKvReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Report of the worker after every iteration that was not preempted."""

    step: int
    totals: CheckpointTotals

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Not supported: there is only one worker."""
        raise NotImplementedError(
            f"KV checkpoints support one worker, but a second one reported {other}"
        )


class HostKvConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped
    """
    Connector with a scheduler side and a worker side; vLLM creates one object for each side.

    Keys of `kv_connector_extra_config`: `host_kv_bytes` is the host memory budget; with `required`,
    an engine that cannot have checkpoints fails instead of starting without them.

    Raises:
        ValueError: Checkpoints are required, but the model, the configuration or the budget does
            not allow them.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        reason = obstacle(vllm_config, kv_cache_config, options["host_kv_bytes"])
        self._required = bool(options["required"])
        if reason is not None and self._required:
            raise refusal(
                vllm_config.additional_config,
                f"engine.vllm.host_kv_bytes: {reason}; set it to 0 to turn KV checkpoints off",
            )
        if reason is not None and role is KVConnectorRole.SCHEDULER:
            log.warning("checkpoints.refused", reason=reason)
        self._slot_bytes = 0 if reason else block_bytes(kv_cache_config)
        num_slots = 0 if reason else options["host_kv_bytes"] // self._slot_bytes
        # Scheduler side.
        self._index = HostIndex(num_slots)
        self._checkpoints = Checkpoints(
            self._index, block_tokens=vllm_config.cache_config.block_size
        )
        self.totals = CheckpointTotals()
        """Totals that the worker reported last."""
        # Worker side.
        self._store: HostStore | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: if a copy is missing, its tokens are computed again; the answer is the same."""
        return False

    @property
    def used_bytes(self) -> int:
        """Host memory occupied by copies."""
        return self._index.num_used * self._slot_bytes

    @property
    def capacity_bytes(self) -> int:
        """Host memory budget for copies, in bytes."""
        return self._index.num_slots * self._slot_bytes

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        qos = qos_in_core(request)
        if self._index.num_slots and qos.checkpointed:
            self._checkpoints.track(request, qos.origin or request.request_id)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self._checkpoints.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._checkpoints.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> HostKvMetadata:
        state = scheduler_output.kv_connector_block_state
        return HostKvMetadata(
            self._checkpoints.plan(
                scheduler_output.num_scheduled_tokens,
                lambda request_id: state.get_block_ids(request_id)[0],
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            self.totals = report.totals
            self._checkpoints.complete(report.step)

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: Any,  # noqa: ARG002 - vLLM's signature
    ) -> tuple[bool, None]:
        if request.status == RequestStatus.FINISHED_ABORTED:
            self._checkpoints.abort(request.request_id)
        else:
            self._checkpoints.finish(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._checkpoints.has_work

    def reset_cache(self) -> bool:
        self._checkpoints.clear()
        return True

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if not self._index.num_slots:
            return
        try:
            self._store = HostStore(self._index.num_slots, layers_of(kv_caches, self._slot_bytes))
        except ValueError as error:
            if self._required:
                raise refusal(self._vllm_config.additional_config, str(error)) from error
            # A worker without a store reports nothing, so the scheduler never saves a block.
            log.warning("checkpoints.refused", reason=str(error))

    def handle_preemptions(self, kv_connector_metadata: HostKvMetadata) -> None:
        """
        Execute all saves before the iteration overwrites any KV, and begin the loads.

        Loads continue during the forward pass.
        """
        if self._store is not None:
            self._store.carry_out(kv_connector_metadata.transfers)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """No-op: `handle_preemptions` has begun the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._store is not None:
            self._store.wait_for(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """No-op: blocks are saved when all of their layers are computed."""

    def wait_for_save(self) -> None:
        """
        Wait for all copies at the end of a complete or preempted forward pass.

        No copy may overlap the next forward pass.
        """
        if self._store is not None:
            self._store.finish()

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = frozenset() if self._store is None else self._store.failed
        if failed:
            log.error("checkpoints.lost", num_blocks=len(failed))
        return set(failed)

    def build_connector_worker_meta(self) -> HostKvReport | None:
        if self._store is None:
            return None
        return HostKvReport(self._store.step, self._store.totals)
