"""The Helm chart: rendered for the last five versions of Kubernetes, and run."""

import base64
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.config.load import load_config
from tests.harness.service import ROUNDHOUSE
from tests.harness.waiting import wait_for
from tests.system import deploy_tools
from tests.system.test_deployment_files import check, longest_stop_s

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "roundhouse"
PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"
SIDECAR = ROOT / "deploy" / "examples" / "kubernetes-sidecar.yaml"
OTHERS = frozenset({"ScaledObject", "ServiceMonitor"})  # kinds of KEDA and of the Prometheus operator
DATABASE = {"postgresql": {"existingSecret": "database"}}
GPU = {
    "replicas": 2,
    "image": {"repository": "registry.example/roundhouse", "tag": "vllm"},
    "config": {
        "server": {"drain_s": 120.5, "hosts": ["llm.example"]},
        "limits": {"body_bytes": 33554432},
        "models": {"big": {"engine": "vllm", "model": "/models/big", "timeouts": {"stop_grace_s": 45}}},
    },
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
    "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "nodeSelector": {"gpu": "yes"},
    "runtimeClassName": "nvidia",
    "auth": {"existingSecret": "keys", "secretKey": "all"},
    "persistence": {"enabled": False},
    "networkPolicy": {"egress": None},
    "imagePullSecrets": [{"name": "registry"}],
    **DATABASE,
}
VALUES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "gpus": GPU,
    "hpa": {**DATABASE, "autoscaling": {"enabled": True, "model": "tiny"}},
    "keda": {**DATABASE, "autoscaling": {"enabled": True, "kind": "keda"}, "serviceMonitor": {"enabled": True}},
    "little": {"networkPolicy": {"enabled": False}, "disruptionBudget": {"enabled": False}},
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nodes without a database": ({"replicas": 3}, "postgresql.existingSecret"),
    "scaling without a database": ({"autoscaling": {"enabled": True}}, "postgresql.existingSecret"),
    "a wrong range": ({**DATABASE, "autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas"),
    "groups without a database": ({"groups": {"size": 2}, "replicas": 0}, "groups.size"),
    "half a group": ({**DATABASE, "groups": {"size": 2}, "replicas": 3}, "not a multiple of groups.size"),
    "groups that scale": (
        {**DATABASE, "groups": {"size": 2}, "replicas": 2, "autoscaling": {"enabled": True}},
        "groups of nodes are not scaled",
    ),
    "a misspelt value": ({"replica": 2}, "replica"),
    "no configuration": ({"config": None}, "config"),
    "a host of one's own": ({"config": {"server": {"host": "127.0.0.1"}}}, "host"),
    "a password in the values": ({"config": {"store": {"url": "postgresql://u:p@h/d"}}}, "url"),
}


@contextmanager
def values_file(values: dict[str, Any], folder: Path) -> Iterator[str]:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    yield str(file)


def rendered(values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a release named ``rh`` in the namespace ``llm``."""
    with values_file(values, folder) as file:
        told = check(deploy_tools.helm(), "template", "rh", str(CHART), "--namespace", "llm", "--values", file)
    return [document for document in yaml.safe_load_all(told) if document]


def one(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


def pod_of(objects: list[dict[str, Any]], kind: str = "StatefulSet") -> dict[str, Any]:
    pod: dict[str, Any] = one(objects, kind)["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_chart_is_valid_for_the_last_five_versions(values: dict[str, Any], tmp_path: Path) -> None:
    """Helm finds no fault in the chart, and Kubernetes' own schemas none in its objects, nor any unknown field."""
    with values_file(values, tmp_path) as file:
        check(deploy_tools.helm(), "lint", "--strict", str(CHART), "--values", file)
    objects = [each for each in rendered(values, tmp_path) if each["kind"] not in OTHERS]
    assert len(objects) >= 4
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(objects))
    valid_for_all(tmp_path / "objects.yaml")


def valid_for_all(file: Path) -> None:
    """Check a file with the schemas of five versions; each must have been there."""
    versions = deploy_tools.kubernetes_versions()
    assert len(versions) == 5
    count = len([document for document in yaml.safe_load_all(file.read_text()) if document])
    for version in versions:
        told = check(deploy_tools.checker("kubernetes-validate"), "--strict", "-k", version, str(file))
        minor = version.rpartition(".")[0]
        assert told.count(f"against version {minor}") == count, told


def test_groups_have_the_pod_of_a_node(tmp_path: Path) -> None:
    """A LeaderWorkerSet places it, with a volume that a group needs no claim for; its restart restarts no other."""
    alone = pod_of(rendered(DATABASE, tmp_path))
    objects = rendered({**DATABASE, "replicas": 4, "groups": {"size": 2}}, tmp_path)
    assert "StatefulSet" not in {each["kind"] for each in objects}
    spec = one(objects, "LeaderWorkerSet")["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"], group["restartPolicy"]) == (2, 2, "None")
    pod = group["workerTemplate"]["spec"]
    assert {"name": "state", "emptyDir": {}} in pod["volumes"]
    assert pod["containers"] == alone["containers"]
    (address,) = (each for each in pod["containers"][0]["env"] if each["name"] == "ROUNDHOUSE_ADDRESS")
    assert address["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


def test_nodes_reach_each_other(tmp_path: Path) -> None:
    """On all ports, whatever else the policy allows: spans need more than HTTP."""
    policy = one(rendered(DATABASE, tmp_path), "NetworkPolicy")["spec"]
    nodes = {"podSelector": policy["podSelector"]}
    assert {"from": [nodes]} in policy["ingress"]
    assert {"to": [nodes]} in policy["egress"]


def test_a_sidecar_is_valid_for_the_last_five_versions() -> None:
    """The example of a pod, unchanged."""
    valid_for_all(SIDECAR)


def test_an_unknown_field_would_be_found(tmp_path: Path) -> None:
    """A check that finds no fault at all proves nothing."""
    pods = rendered({}, tmp_path)
    pod_of(pods)["enableServiceLink"] = False
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump_all(pods))
    told = check(deploy_tools.checker("kubernetes-validate"), "--strict", str(tmp_path / "wrong.yaml"), status=1)
    assert "enableServiceLink" in told


@pytest.mark.parametrize(("values", "word"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], word: str, tmp_path: Path) -> None:
    """Before anything reaches the cluster."""
    with values_file(values, tmp_path) as file:
        command = [deploy_tools.helm(), "template", "rh", str(CHART), "--values", file]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert word in done.stderr


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_node_of_the_chart_has_a_valid_configuration(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens on the pod's network, has a key, knows the Service's names, and ends within the pod's grace period."""
    objects = rendered(values, tmp_path)
    pod, effective = pod_of(objects), None
    (tmp_path / "roundhouse.yaml").write_text(one(objects, "ConfigMap")["data"]["roundhouse.yaml"])
    environment = {each["name"]: each.get("value", "postgresql://u:p@h/d") for each in pod["containers"][0]["env"]}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    effective = load_config(tmp_path / "roundhouse.yaml")
    assert effective.server.host == "0.0.0.0"
    assert set(effective.server.hosts) >= {"rh-roundhouse", "rh-roundhouse.llm.svc.cluster.local"}
    assert effective.server.api_keys
    assert effective.store.url.startswith("postgresql:" if "postgresql" in values else "sqlite")
    pre_stop = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pre_stop + longest_stop_s(effective) + 15
    given = values.get("config", {}).get("models", {"tiny": {}})
    assert set(effective.models) == set(given), "a model of one's own stands alone"


@pytest.mark.parametrize("source", ["chart", "sidecar"])
def test_no_container_of_ours_has_unneeded_rights(source: str, tmp_path: Path) -> None:
    """No root, no capability, writable volumes only, no token, and no variables of other Services."""
    if source == "chart":
        pod = pod_of(rendered({}, tmp_path))
    else:
        pod = pod_of([each for each in yaml.safe_load_all(SIDECAR.read_text()) if each], "Deployment")
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_a_key_is_generated_if_none_is_given(tmp_path: Path) -> None:
    """It is long, and the pod reads it from its secret."""
    objects = rendered({}, tmp_path)
    secret = one(objects, "Secret")
    assert len(base64.b64decode(secret["data"]["api-keys"])) >= 32
    env = {each["name"]: each for each in pod_of(objects)["containers"][0]["env"]}
    assert env["ROUNDHOUSE_API_KEYS"]["valueFrom"]["secretKeyRef"] == {
        "name": secret["metadata"]["name"],
        "key": "api-keys",
    }
    assert not [each for each in rendered(GPU, tmp_path) if each["kind"] == "Secret"]


def test_scaling_reads_the_exported_gauge(tmp_path: Path) -> None:
    """In both ways, for one model or for all; no other setting then sets the number of nodes."""
    hpa = rendered(VALUES["hpa"], tmp_path)
    (metric,) = one(hpa, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"] == {
        "name": "roundhouse_slots_wanted",
        "selector": {"matchLabels": {"model": "tiny"}},
    }
    assert "replicas" not in one(hpa, "StatefulSet")["spec"]
    keda = rendered(VALUES["keda"], tmp_path)
    (trigger,) = one(keda, "ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'sum(roundhouse_slots_wanted{namespace="llm",service="rh-roundhouse"})'
    assert not [each for each in rendered({}, tmp_path) if each["kind"] in {"HorizontalPodAutoscaler", *OTHERS}]


def test_the_chart_has_our_version() -> None:
    """Its image's tag is the version that is built here."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == told


def test_a_node_of_the_chart_answers_its_probes(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The kubelet asks the pod's address without a key; the command inside has one; all other requests need it.

    Readiness follows the engine, and the other probes do not wait for it.
    """
    port = free_ports(1)
    models = {"tiny": {"engine": "embedded", "port": free_ports(1), "slots": 2}}
    objects = rendered({"config": {"models": models}}, tmp_path)
    container = pod_of(objects)["containers"][0]
    config = tmp_path / "roundhouse.yaml"
    config.write_text(one(objects, "ConfigMap")["data"]["roundhouse.yaml"])
    key = base64.b64decode(one(objects, "Secret")["data"]["api-keys"]).decode()
    environment = {each["name"]: each.get("value", key) for each in container["env"]}
    environment |= {"ROUNDHOUSE_CONFIG": str(config), "ROUNDHOUSE_STATE_DIR": str(tmp_path / "state")}
    environment |= {"ROUNDHOUSE_PORT": str(port), "PATH": "/usr/bin:/bin"}  # the chart's own is taken on this machine
    program, script = container["readinessProbe"]["exec"]["command"]
    assert f"COPY deploy/healthcheck.py {script}\n" in (ROOT / "Dockerfile").read_text()
    probe = [str(Path(ROUNDHOUSE).with_name(program)), str(ROOT / "deploy" / "healthcheck.py")]

    def readiness() -> subprocess.CompletedProcess[str]:
        return subprocess.run(probe, env=environment, capture_output=True, text=True, timeout=30, check=False)

    assert readiness().returncode == 1
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([ROUNDHOUSE, "serve"], env=environment, stdout=log, stderr=log)
    headers = {"Host": "10.1.2.3:8080"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False) as kubelet:

        def answers(name: str) -> bool:
            try:
                return kubelet.get(container[name]["httpGet"]["path"]).status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_for(lambda: answers("startupProbe"), "it has started", 60)
            assert answers("livenessProbe")
            wait_for(lambda: readiness().returncode == 0, "it is ready", 60)
            assert kubelet.get("/v1/workers").status_code == 401
            named = {"Host": "rh-roundhouse.llm.svc:8080", "Authorization": f"Bearer {key}"}
            (worker,) = kubelet.get("/v1/workers", headers=named).json()["workers"]
            assert worker["state"] == "ready"
            kubelet.post(f"/v1/workers/{worker['id']}/drain", headers=named)
            wait_for(lambda: "no ready worker for: tiny" in readiness().stderr, "unready, it says what is missing", 60)
            assert answers("livenessProbe"), "and nothing restarts it for that"
        finally:
            process.terminate()
            assert process.wait(60) == 0, (tmp_path / "log").read_text()


def test_the_values_on_the_page_are_accepted(tmp_path: Path) -> None:
    """The chart knows the values in docs/how-to/kubernetes.md, each block alone with those before it."""
    values: dict[str, Any] = {}
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        values |= yaml.safe_load(block)
        rendered(values, tmp_path)
    objects = rendered(values, tmp_path)
    assert one(objects, "HorizontalPodAutoscaler")["spec"]["maxReplicas"] == 8
    container = pod_of(objects)["containers"][0]
    assert container["image"] == "registry.example/roundhouse:1.0.0"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
