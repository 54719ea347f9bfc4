"""Nodes as pods of the Helm chart; their secrets are a Secret, which kubectl and the pods read from standard input."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from service.cluster.machine import DRAIN_MORE_S
from service.cluster.order import ClusterOrder
from service.cluster.place import call, check_done
from service.config.load import API_KEYS, STORE_URL
from service.formats.documents import parse_document, read_text

CHART: Final = Path(__file__).with_name("chart")
RELEASE: Final = "roundhouse"
SECRET: Final = "roundhouse-cluster"  # noqa: S105 - its name
ASK_S: Final = 120.0
OF_CHART: Final = ("host", "port", "state_dir", "address", "api_keys")  # settings of the server that the chart makes


class KubernetesPlace:
    """A release of the chart; ``address`` is a context of kubectl, ``options`` go to helm."""

    def __init__(self, folder: Path, order: ClusterOrder) -> None:
        self._folder = folder
        self._order = order

    def __repr__(self) -> str:
        return f"<KubernetesPlace of {RELEASE}>"

    def start(self) -> ClusterOrder:
        """Write the Secret, and install the chart or upgrade it."""
        secret = json.dumps(secret_of(self._order)).encode()
        check_done(self._kubectl("apply", "--filename", "-", given=secret), "kubectl")
        values = yaml.safe_dump(values_of(self._order, Path(self._order.config))).encode()
        words = ("upgrade", "--install", RELEASE, str(CHART), "--values", "-", *self._order.options)
        check_done(self._helm(*words, given=values), "helm")
        return self._order

    def describe(self) -> Mapping[str, str]:
        """Return the phase of each pod."""
        label = f"app.kubernetes.io/instance={RELEASE}"
        done = self._kubectl("get", "pods", "--selector", label, "--output", "json")
        pods = json.loads(check_done(done, "kubectl"))["items"]
        return {pod["metadata"]["name"]: str(pod["status"].get("phase", "unknown")).lower() for pod in pods}

    def stop(self) -> Mapping[str, str]:
        """Uninstall the chart, whose pods drain, and delete the Secret."""
        limit_s = self._order.drain_s + DRAIN_MORE_S + ASK_S
        wait = f"{self._order.drain_s + DRAIN_MORE_S:.0f}s"
        check_done(self._helm("uninstall", RELEASE, "--wait", "--timeout", wait, limit_s=limit_s), "helm")
        check_done(self._kubectl("delete", "secret", SECRET, "--ignore-not-found"), "kubectl")
        return {f"release {RELEASE}": "uninstalled; volumes of pods stay"}

    def _kubectl(self, *words: str, given: bytes = b"") -> Any:  # noqa: ANN401 - a completed process
        context = ["--context", self._order.address] if self._order.address else []
        return call(["kubectl", *context, *words], self._order, ASK_S, given)

    def _helm(self, *words: str, given: bytes = b"", limit_s: float = ASK_S) -> Any:  # noqa: ANN401 - likewise
        context = ["--kube-context", self._order.address] if self._order.address else []
        return call(["helm", *context, *words], self._order, limit_s, given)


def secret_of(order: ClusterOrder) -> dict[str, Any]:
    """Return the Secret with the variables that the configuration reads."""
    data = {name: base64.b64encode(value.encode()).decode() for name, value in order.environment.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "type": "Opaque", "data": data}


def values_of(order: ClusterOrder, config: Path) -> dict[str, Any]:
    """Return the chart's values: the configuration as it is written, its variables still to be read from the Secret.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    document, _ = parse_document(read_text(config), str(config))
    assert isinstance(document, dict)  # noqa: S101 - it has been loaded before
    written = {**document, "server": {k: v for k, v in (document.get("server") or {}).items() if k not in OF_CHART}}
    written["store"] = {key: value for key, value in (document.get("store") or {}).items() if key != "url"}
    spans = [model["span"]["nodes"] for model in document["models"].values() if (model or {}).get("span")]
    values: dict[str, Any] = {
        "replicas": order.nodes,
        "config": written,
        "auth": {"existingSecret": SECRET, "secretKey": API_KEYS},
        "postgresql": {"existingSecret": SECRET, "secretKey": STORE_URL},
        "env": [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": name}}}
            for name in sorted(order.environment)
            if name not in {API_KEYS, STORE_URL}
        ],
    }
    if order.most > order.nodes:
        scale = {"minReplicas": order.nodes, "maxReplicas": order.most}
        values["autoscaling"] = {"enabled": True, "kind": "keda", **scale}
    elif spans and order.nodes % max(spans) == 0 and max(spans) > 1:
        values["groups"] = {"size": max(spans)}
    return values
