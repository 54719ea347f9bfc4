"""Nodes as detached actors of Ray, one on each machine of a placement group.

Ray only places them. Which engine runs is decided by the store's leases: a second instance of an actor, after a cut,
is one more node, and takes nothing from the first while that one renews its lease.
"""

import argparse
import hashlib
import logging
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from service.cluster import ray_actors
from service.cluster.failure import ClusterFailed
from service.cluster.machine import DRAIN_MORE_S, HURRY_S
from service.cluster.order import ClusterOrder, write_order
from service.errors import ConfigError

NAMESPACE: Final = "roundhouse"
PLACE_S: Final = 300.0  # Ray's autoscaler may have to start machines
ANSWER_S: Final = 10.0
MOST_CHARS: Final = 200
SCALER: Final = "scaler"
MISSING: Final = "there is no Ray here: pip install 'roundhouse-llm[ray]', of the version that the cluster runs"


class RayPlace:
    """Nodes on a Ray cluster; ``options`` say what each reserves: ``--num-cpus`` and ``--num-gpus``."""

    def __init__(self, folder: Path, order: ClusterOrder) -> None:
        self._folder = folder
        self._order = order
        self._name = f"roundhouse-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        self._needs = _needs(order.options)

    def __repr__(self) -> str:
        return f"<RayPlace {self._name}>"

    def start(self) -> ClusterOrder:
        """Reserve the machines and start an actor on each; those that are there stay."""
        ray = self._connect()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup  # noqa: PLC0415

        order = msgspec.structs.replace(self._order, job=ray.get_runtime_context().gcs_address)
        write_order(self._folder, order)
        group = self._group(ray)
        for number in range(order.nodes):
            place = InGroup(group, placement_group_bundle_index=number, placement_group_capture_child_tasks=False)
            self._add(ray, number, scheduling_strategy=place)
        if order.most > order.nodes:
            command = [*order.command, "cluster", "scale", "--home", str(self._folder)]
            log = str(self._folder / "scaler.log")
            self._actor(ray, SCALER, num_cpus=0).remote(command, log, has_address=False)
        return order

    def describe(self) -> Mapping[str, str]:
        """Return the state of each actor."""
        ray = self._connect()
        return {name: self._state(ray, name) for name in self._names(ray)}

    def stop(self) -> Mapping[str, str]:
        """Stop the scaler, then drain all nodes at once; the actors and the reservation are removed."""
        ray = self._connect()
        names = self._names(ray)
        self._end(ray, [name for name in names if name == SCALER])
        how = self._end(ray, [name for name in names if name != SCALER])
        group = self._found_group(ray)
        if group is not None:
            ray.util.remove_placement_group(group)
        if left := [name for name, end in how.items() if end == "runs on"]:
            raise ClusterFailed(f"of Ray's actors {', '.join(left)} did not end")
        return how

    def add(self) -> str:
        """Start one more node, wherever Ray has what it needs; return its name."""
        ray = self._connect()
        taken = self._names(ray)
        number = next(each for each in range(self._order.nodes, self._order.most) if str(each) not in taken)
        self._add(ray, number, scheduling_strategy="SPREAD")
        return str(number)

    def drain(self, name: str) -> str:
        """Drain an added node and give back what it reserved; return how it ended."""
        ray = self._connect()
        return self._end(ray, [name])[name]

    def added(self) -> list[str]:
        """Return the names of the nodes beyond the first ones, in the order of their numbers."""
        names = [name for name in self._names(self._connect()) if name != SCALER]
        return sorted((name for name in names if int(name) >= self._order.nodes), key=int)

    def is_running(self, name: str) -> bool:
        """Whether an actor has been placed, and its program runs."""
        return "runs" in self._state(self._connect(), name)

    def _add(self, ray: Any, number: int, **place: object) -> None:  # noqa: ANN401 - Ray is not there to be typed
        command = [*self._order.command, "cluster", "node", "--home", str(self._folder)]
        log = str(self._folder / "{host}.log")
        options = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs["GPU"], **place}
        self._actor(ray, str(number), **options).remote(command, log, has_address=True)

    def _actor(self, ray: Any, name: str, **options: object) -> Any:  # noqa: ANN401 - as above
        actor = ray.remote(ray_actors.ProgramActor)
        return actor.options(
            name=f"{self._name}-{name}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            **options,
        )

    def _group(self, ray: Any) -> Any:  # noqa: ANN401 - as above
        bundle = {name: amount for name, amount in self._needs.items() if amount}
        group = self._found_group(ray)
        if group is None:
            for name in self._names(ray):  # actors of a group that was removed are placed no more
                ray.kill(self._handle(ray, name), no_restart=True)
            group = ray.util.placement_group(
                [bundle] * self._order.nodes, strategy="STRICT_SPREAD", name=self._name, lifetime="detached"
            )
        if not group.wait(PLACE_S):
            ray.util.remove_placement_group(group)
            count = self._order.nodes
            raise ClusterFailed(f"Ray found no {count} machines with {bundle} each within {PLACE_S:g} s")
        return group

    def _found_group(self, ray: Any) -> Any:  # noqa: ANN401 - as above
        try:
            return ray.util.get_placement_group(self._name)
        except ValueError:
            return None

    def _names(self, ray: Any) -> list[str]:  # noqa: ANN401 - as above
        """Return the names of this cluster's actors, without its own name before each."""
        prefix = f"{self._name}-"
        listed = [each for each in ray.util.list_named_actors() if each.startswith(prefix)]
        return sorted(each.removeprefix(prefix) for each in listed)

    def _state(self, ray: Any, name: str) -> str:  # noqa: ANN401 - as above
        try:
            found = ray.get(self._handle(ray, name).status.remote(), timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError:
            return "waits for a machine, or does not answer"
        except (ray.exceptions.RayError, ValueError) as error:
            return f"does not answer: {_first_line(error)}"
        where = f"{found['address']}: "
        return where + (f"runs as process {found['pid']}" if found["pid"] else found["fault"] or "starts")

    def _end(self, ray: Any, names: list[str]) -> dict[str, str]:  # noqa: ANN401 - as above
        if not names:
            return {}
        limit_s = self._order.drain_s + DRAIN_MORE_S
        handles = {name: self._handle(ray, name) for name in names}
        looks = {name: handle.status.remote() for name, handle in handles.items()}
        answered, _ = ray.wait(list(looks.values()), num_returns=max(1, len(looks)), timeout=ANSWER_S)
        asked = {name: handles[name].stop.remote(limit_s) for name, reply in looks.items() if reply in answered}
        how = dict.fromkeys(names, "its actor did not answer, and is killed")
        end = time.monotonic() + limit_s + 2 * HURRY_S + ANSWER_S
        for name, reply in asked.items():
            try:
                how[name] = ray.get(reply, timeout=max(0.0, end - time.monotonic()))
            except (ray.exceptions.RayError, TimeoutError) as error:
                how[name] = f"its actor did not answer: {_first_line(error)}"
        for handle in handles.values():
            ray.kill(handle, no_restart=True)  # its program dies with it
        return how

    def _handle(self, ray: Any, name: str) -> Any:  # noqa: ANN401 - as above
        return ray.get_actor(f"{self._name}-{name}", namespace=NAMESPACE)

    def _connect(self) -> Any:  # noqa: ANN401 - as above
        """Return Ray's module, connected to the cluster.

        Raises:
            ClusterFailed: Ray is not installed, or the cluster refuses.
        """
        try:
            import ray  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ClusterFailed(MISSING) from error
        if ray.is_initialized():
            return ray
        address = self._order.job or self._order.address or "auto"
        host, _, port = address.rpartition(":")
        try:
            if host and port.isdecimal() and "/" not in host:  # Ray would try for a minute and more
                socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray's own, of no common class
            token = "; set RAY_AUTH_TOKEN to the cluster's token" if "uth" in type(error).__name__ + str(error) else ""
            raise ClusterFailed(f"Ray at {address}: {error}{token}") from error
        ray.cloudpickle.register_pickle_by_value(ray_actors)
        return ray


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:MOST_CHARS]


def _needs(options: tuple[str, ...]) -> dict[str, float]:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--num-cpus", type=float, default=1.0)
    parser.add_argument("--num-gpus", type=float, default=0.0)
    try:
        given, others = parser.parse_known_args(options)
    except argparse.ArgumentError as error:
        raise ConfigError(f"after --: {error}") from error
    if others:
        raise ConfigError(f"after --: Ray's nodes take --num-cpus and --num-gpus, not {' '.join(others)}")
    return {"CPU": given.num_cpus, "GPU": given.num_gpus}
