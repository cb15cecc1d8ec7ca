"""
Fields of the custom resources that the manifests use.

No package has their schemas. The fields are from the custom resource definitions of the Prometheus
Operator (monitoring.coreos.com/v1) and of KEDA (keda.sh/v1alpha1); fields that the manifests do not
use are left out, so that adding one means looking it up.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
Duration = Annotated[str, Meta(pattern=r"^([0-9]+(ms|s|m|h))+$")]
Window = Annotated[int, Meta(ge=0, le=3600)]


class Metadata(Struct, forbid_unknown_fields=True):
    name: Name
    namespace: Name
    labels: dict[str, str] = {}


class LabelSelector(Struct, forbid_unknown_fields=True, rename="camel"):
    match_labels: dict[str, str]


class PodMetricsEndpoint(Struct, forbid_unknown_fields=True, rename="camel"):
    port: Name
    path: str
    interval: Duration
    scrape_timeout: Duration | None = None


class PodMonitorSpec(Struct, forbid_unknown_fields=True, rename="camel"):
    selector: LabelSelector
    pod_metrics_endpoints: Annotated[list[PodMetricsEndpoint], Meta(min_length=1)]
    pod_target_labels: list[str] = []


class PodMonitor(Struct, forbid_unknown_fields=True, rename="camel"):
    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: PodMonitorSpec


class ScaleTarget(Struct, forbid_unknown_fields=True, rename="camel"):
    name: Name
    """Name of a Deployment, unless a kind is given."""


class ScalingRules(Struct, forbid_unknown_fields=True, rename="camel"):
    stabilization_window_seconds: Window


class Behavior(Struct, forbid_unknown_fields=True, rename="camel"):
    scale_up: ScalingRules
    scale_down: ScalingRules


class AutoscalerConfig(Struct, forbid_unknown_fields=True):
    behavior: Behavior


class Advanced(Struct, forbid_unknown_fields=True, rename="camel"):
    horizontal_pod_autoscaler_config: AutoscalerConfig


class PrometheusMetadata(Struct, forbid_unknown_fields=True, rename="camel"):
    """All values of a trigger's metadata are strings."""

    server_address: Annotated[str, Meta(pattern=r"^https?://\S+$")]
    query: str
    threshold: Annotated[str, Meta(pattern=r"^[0-9.]+$")]
    activation_threshold: Annotated[str, Meta(pattern=r"^[0-9.]+$")]
    ignore_null_values: Literal["true", "false"]


class Trigger(Struct, forbid_unknown_fields=True, rename="camel"):
    type: Literal["prometheus"]
    metric_type: Literal["AverageValue", "Value"]
    metadata: PrometheusMetadata


class ScaledObjectSpec(Struct, forbid_unknown_fields=True, rename="camel"):
    scale_target_ref: ScaleTarget
    triggers: Annotated[list[Trigger], Meta(min_length=1)]
    advanced: Advanced
    polling_interval: int
    cooldown_period: int
    min_replica_count: int
    max_replica_count: int


class ScaledObject(Struct, forbid_unknown_fields=True, rename="camel"):
    api_version: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: ScaledObjectSpec


CUSTOM: dict[str, type[Struct]] = {"PodMonitor": PodMonitor, "ScaledObject": ScaledObject}
"""Kind -> its fields."""
