"""References between the rendered objects resolve."""

from collections import Counter
from typing import Any

from tests.unit.ops.kustomize.manifests import Container, Manifests, Pod, matches

NAMESPACE = "headway"
SERVERS = "models"
"""Namespace of the servers that others run, in which agents watch endpoints."""


def referred(pod: Pod) -> set[tuple[str, str]]:
    """Kind and name of each object that a pod reads, except optional ones."""
    found = {("ServiceAccount", pod.spec["serviceAccountName"])}
    for volume in pod.volumes.values():
        if "secret" in volume:
            found.add(("Secret", volume["secret"]["secretName"]))
        if "configMap" in volume:
            found.add(("ConfigMap", volume["configMap"]["name"]))
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            found.add(("PersistentVolumeClaim", claim))
    for container in pod.containers:
        found |= {(kind, name) for kind, name, _ in variables_from(container)}
    return found


def variables_from(container: Container) -> set[tuple[str, str, str | None]]:
    """Kind, name and key of each source of variables, except optional ones."""
    found: set[tuple[str, str, str | None]] = set()
    for source in container.spec.get("envFrom", ()):
        for field, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
            if field in source:
                found.add((kind, source[field]["name"], None))
    for variable in container.spec.get("env", ()):
        for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
            reference = variable.get("valueFrom", {}).get(field)
            if reference and not reference.get("optional"):
                found.add((kind, reference["name"], reference["key"]))
    return found


def port_exists(pod: Pod, port: str | int) -> bool:
    """Whether a container of *pod* declares a port, by its name or number."""
    ports = [item for container in pod.containers for item in container.ports.items()]
    return any(port in item for item in ports)


def test_no_object_is_defined_twice(manifests: Manifests):
    names = Counter(
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
        for each in manifests.objects
    )

    assert [name for name, count in names.items() if count > 1] == []


def test_objects_are_in_the_namespace_that_exists(manifests: Manifests):
    namespaces = {
        each["metadata"].get("namespace")
        for each in manifests.objects
        if each["kind"] != "Namespace"
    }

    assert namespaces - {SERVERS} == {NAMESPACE}
    assert manifests.has("Namespace", NAMESPACE)
    foreign = {
        each["kind"] for each in manifests.objects if each["metadata"].get("namespace") == SERVERS
    }
    assert foreign <= {"Role", "RoleBinding"}


def test_workloads_select_their_own_pods_only(manifests: Manifests):
    selecting = [pod for pod in manifests.pods if pod.owner["kind"] != "Job"]
    selected = {str(pod): manifests.selected(pod.owner["spec"]["selector"]) for pod in selecting}

    assert selected == {str(pod): [pod] for pod in selecting}


def test_services_lead_to_ports_of_pods(manifests: Manifests):
    services = manifests.of("Service")
    unresolved = [
        (service["metadata"]["name"], port["targetPort"])
        for service in services
        for port in service["spec"]["ports"]
        for pods in [manifests.selected({"matchLabels": service["spec"]["selector"]})]
        if not pods or not all(port_exists(pod, port["targetPort"]) for pod in pods)
    ]

    assert services
    assert unresolved == []


def test_a_stateful_set_has_a_headless_service_that_selects_its_pods(manifests: Manifests):
    for each in manifests.of("StatefulSet"):
        service = manifests.named("Service", each["spec"]["serviceName"])

        assert service["spec"]["clusterIP"] == "None"
        assert matches(
            {"matchLabels": service["spec"]["selector"]},
            each["spec"]["template"]["metadata"]["labels"],
        )


def test_everything_that_pods_read_exists(manifests: Manifests):
    missing = {
        (str(pod), kind, name)
        for pod in manifests.pods
        for kind, name in referred(pod)
        if not manifests.has(kind, name)
    }

    assert missing == set()


def test_keys_of_variables_exist(manifests: Manifests):
    missing = {
        (str(container), name, key)
        for container in manifests.containers
        for kind, name, key in variables_from(container)
        if key is not None and key not in manifests.data(kind, name)
    }

    assert missing == set()


def test_files_that_are_mounted_alone_exist(manifests: Manifests):
    missing = [
        (str(container), mount["subPath"])
        for container in manifests.containers
        for mount in container.spec.get("volumeMounts", ())
        if "subPath" in mount
        for volume in [container.pod.volumes[mount["name"]]]
        if mount["subPath"] not in manifests.data("ConfigMap", volume["configMap"]["name"])
    ]

    assert missing == []


def test_every_config_map_secret_claim_and_account_is_used(manifests: Manifests):
    kinds = ("ConfigMap", "Secret", "PersistentVolumeClaim", "ServiceAccount")
    defined = {(kind, each["metadata"]["name"]) for kind in kinds for each in manifests.of(kind)}
    used = {reference for pod in manifests.pods for reference in referred(pod)}

    assert defined - used == set()


def test_mounted_volumes_exist_and_volumes_are_mounted(manifests: Manifests):
    for pod in manifests.pods:
        mounted = {
            mount["name"]
            for container in pod.containers
            for mount in container.spec.get("volumeMounts", ())
        }

        assert mounted == pod.volumes.keys()


def test_probes_ask_ports_of_their_container(manifests: Manifests):
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    missing = [
        (str(container), probe, port)
        for container in manifests.containers
        for probe in probes
        for how in ("httpGet", "tcpSocket")
        for port in [container.spec.get(probe, {}).get(how, {}).get("port")]
        if port is not None and port not in container.ports
    ]

    assert missing == []


def test_disruption_budgets_select_one_workload_and_allow_a_drain(manifests: Manifests):
    budgets = manifests.of("PodDisruptionBudget")
    selected = {
        each["metadata"]["name"]: [str(pod) for pod in manifests.selected(each["spec"]["selector"])]
        for each in budgets
    }

    assert selected == {name: [name] for name in selected}
    assert {each["spec"]["maxUnavailable"] for each in budgets} == {1}


def test_every_workload_with_several_pods_has_a_disruption_budget(manifests: Manifests):
    several = {str(pod) for pod in manifests.pods if pod.replicas > 1}
    budgets = {each["metadata"]["name"] for each in manifests.of("PodDisruptionBudget")}

    assert several <= budgets


def test_autoscalers_have_a_target_without_a_number_of_replicas(manifests: Manifests):
    for kind in ("ScaledObject", "HorizontalPodAutoscaler"):
        for each in manifests.of(kind):
            target = each["spec"]["scaleTargetRef"]
            found = manifests.named(target.get("kind", "Deployment"), target["name"])

            assert "replicas" not in found["spec"]
            assert found["metadata"]["namespace"] == each["metadata"]["namespace"]


def peers(policy: dict[str, Any]) -> list[dict[str, Any]]:
    spec = policy["spec"]
    rules = [(rule, "from") for rule in spec.get("ingress", ())]
    rules += [(rule, "to") for rule in spec.get("egress", ())]
    return [peer for rule, key in rules for peer in rule.get(key, ())]


def test_network_policies_select_pods_on_both_sides(manifests: Manifests):
    policies = manifests.of("NetworkPolicy")
    empty = [
        each["metadata"]["name"]
        for each in policies
        if not manifests.selected(each["spec"]["podSelector"])
        or not all(
            manifests.selected(peer["podSelector"])
            for peer in peers(each)
            if "podSelector" in peer and "namespaceSelector" not in peer
        )
    ]

    assert policies
    assert empty == []


def test_named_ports_of_ingress_policies_exist(manifests: Manifests):
    missing = [
        (each["metadata"]["name"], port["port"])
        for each in manifests.of("NetworkPolicy")
        for rule in each["spec"].get("ingress", ())
        for port in rule.get("ports", ())
        for pods in [manifests.selected(each["spec"]["podSelector"])]
        if not any(port_exists(pod, port["port"]) for pod in pods)
    ]

    assert missing == []


def test_roles_are_bound_to_accounts_whose_token_pods_get(manifests: Manifests):
    bound = set()
    for each in manifests.of("RoleBinding"):
        role = manifests.named("Role", each["roleRef"]["name"])
        assert role["metadata"]["namespace"] == each["metadata"]["namespace"]
        for subject in each["subjects"]:
            account = manifests.named("ServiceAccount", subject["name"])
            assert account["metadata"]["namespace"] == subject["namespace"]
            bound.add(subject["name"])
    with_token = {
        pod.spec["serviceAccountName"]
        for pod in manifests.pods
        if pod.spec["automountServiceAccountToken"]
    }

    assert with_token == bound


def test_monitors_scrape_one_port_of_each_pod(manifests: Manifests):
    for each in manifests.of("PodMonitor"):
        ports = {endpoint["port"] for endpoint in each["spec"]["podMetricsEndpoints"]}
        scraped = {
            str(pod): [port for port in ports if port_exists(pod, port)]
            for pod in manifests.selected(each["spec"]["selector"])
            if pod.owner["kind"] != "Job"
        }

        assert {name: len(found) for name, found in scraped.items()} == dict.fromkeys(scraped, 1)
        assert len(scraped) == 6


def test_pods_spread_relative_to_their_own_kind(manifests: Manifests):
    for pod in manifests.pods:
        terms = list(pod.spec.get("topologySpreadConstraints", ()))
        anti = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
        terms += anti.get("requiredDuringSchedulingIgnoredDuringExecution", ())

        assert all(matches(term["labelSelector"], pod.labels) for term in terms)
