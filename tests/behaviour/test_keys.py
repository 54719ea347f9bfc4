"""Named keys: who each is, what it may do, and what of others' jobs it learns."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import anyio
import httpx
import pytest
import yaml
from fastapi.routing import APIRoute, iter_route_contexts

from service.api.app import build_app
from service.api.door.access import ROUTES
from service.config.load import build_config
from service.config.workers import worker_specs
from service.node.node import open_node
from tests.harness.service import Service, scripted_model, serving

SCOPES: Mapping[str, list[str]] = {
    "alice": ["read", "submit"],
    "bob": ["read", "submit"],
    "viewer": ["read"],
    "poster": ["submit"],
    "root": ["admin"],
}


def as_(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer secret-of-{name}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("keys")
    hashed = [{"name": "bob", "sha256": hashlib.sha256(b"secret-of-bob").hexdigest(), "scopes": SCOPES["bob"]}]
    (folder / "keys.yaml").write_text(yaml.safe_dump(hashed))
    (folder / "keys.yaml").chmod(0o600)
    keys = [{"name": name, "key": f"secret-of-{name}", "scopes": SCOPES[name]} for name in SCOPES if name != "bob"]
    server = {"keys": keys, "keys_file": "keys.yaml", "api_keys": ["secret-of-all"]}
    with serving(folder, free_ports(1), {"m": scripted_model(free_ports(1))}, server) as running:
        yield running


def test_every_key_is_known_and_no_other(service: Service) -> None:
    """Those of the configuration, of the file of hashes, and ``api_keys``; none of them is ever logged."""
    for name in (*SCOPES, "all"):
        assert httpx.get(f"{service.url}/readyz", headers=as_(name)).status_code == 200, name
    for headers in ({}, as_("nobody"), {"Authorization": "Basic secret-of-alice"}, {"Authorization": "Bearer"}):
        answer = httpx.get(f"{service.url}/readyz", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "not_authorised")
    assert "secret-of" not in service.log()


def test_each_route_is_for_the_scope_of_the_table(service: Service) -> None:
    """A key without the scope gets 403 with its name, before anything is looked at."""
    for (method, path), access in ROUTES.items():
        for name, scopes in SCOPES.items():
            if access.scope is None or access.scope in scopes or "admin" in scopes:
                continue
            url = service.url + path.replace("{model:path}", "m").replace("{round_number}", "0")
            answer = httpx.request(method, url, headers=as_(name))
            assert (answer.status_code, answer.json()["code"]) == (403, "scope_missing"), (method, path, name)
            assert f"scope {access.scope}" in answer.json()["detail"]
    assert service.http.get("/v1/workers", headers=as_("viewer")).status_code == 200
    assert service.http.post("/v1/workers/m-0/resume", headers=as_("root")).status_code == 202


async def test_no_route_is_missing_from_the_table(tmp_path: Path) -> None:
    """Every route of the app has its row, and passes the check that reads it; no row is of a route that is gone."""
    document = {"store": {"url": "memory"}, "models": {"m": {"engine": "attached", "url": "http://127.0.0.1:9"}}}
    config = build_config(document, {}, "test", {})
    async with open_node(config, worker_specs(config, tmp_path, tmp_path), tmp_path) as node:
        app = build_app(node, config, [tmp_path], {})
        found: set[tuple[str, str]] = set()
        for route in iter_route_contexts(app.routes):
            assert isinstance(route.original_route, APIRoute), f"{route.path}: nothing stands before it"
            assert route.path is not None
            found |= {(method, route.path) for method in route.methods or ()}
        await node.shut_down(0, anyio.Event())
    assert found == set(ROUTES)
