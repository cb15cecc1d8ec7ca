"""Examples of `shared.contracts.routing`."""

import msgspec

from shared.contracts.base import InstanceId, Message, ModelName, RequestId, TenantId
from shared.contracts.routing import (
    CalibrationSnapshot,
    InstanceLoad,
    Prefill,
    PrefillSample,
    PrefillsObserved,
    PrefillsSampled,
    PrefillTrees,
    Residual,
    RouterState,
    SoftState,
    WorkTotals,
)

EXAMPLES: tuple[Message, ...] = (
    PrefillsObserved(
        instance_id=InstanceId("gpu-0"),
        incarnation="abc",
        model=ModelName("m"),
        at=1000.5,
        prefills=(
            Prefill(
                request_id=RequestId("r-1"),
                tenant=TenantId("t"),
                prompt_tokens=700,
                cached_tokens=512,
                prefill_s=0.04,
                at=1000.4,
                prefix=(17, 29),
            ),
        ),
    ),
    PrefillsSampled(
        sender="planner-1",
        model=ModelName("m"),
        engine="simulated",
        device="d",
        at=1000.5,
        schema_version=1,
        samples=(PrefillSample(features=(700.0, 0.5), prefill_s=0.04),),
    ),
    PrefillTrees(
        model=ModelName("m"),
        engine="simulated",
        device="d",
        version=3,
        at=1000.5,
        trees=msgspec.Raw(b'{"schema_version":1}'),
    ),
    RouterState(
        sender="planner-1",
        model=ModelName("m"),
        at=1000.5,
        work=SoftState(
            work={
                "planner-1": {
                    InstanceId("gpu-0"): WorkTotals(
                        version=4,
                        assigned_s=0.5,
                        dispatched_s=0.4,
                        finished_s=0.25,
                        num_assigned=3,
                        num_finished=1,
                    )
                }
            },
            loads={
                InstanceId("gpu-0"): InstanceLoad(
                    seq=9, at=1000.0, running=2, prefill_backlog_tokens=64, kv_utilization=0.5
                )
            },
        ),
        calibrations=(
            CalibrationSnapshot(
                snapshot_version=1,
                model_version="3",
                levels=(0.5, 0.9),
                origin="planner-1",
                residuals=(
                    Residual(
                        number=1,
                        bucket=(0, 1, 2),
                        pace=0.1,
                        scores=(0.0, 0.25),
                        mean_s=0.04,
                        actual_s=0.05,
                    ),
                ),
            ),
        ),
    ),
)
