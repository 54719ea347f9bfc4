"""The dashboard of a service with keys: the page needs none, its data does."""

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.harness.axe import axe_script, violations
from tests.harness.browser import Page, browsing
from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import wait_for

KEYS = {name: f"{name}-{'k' * 24}" for name in ("root", "viewer")}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    keys = [
        {"name": "root", "key": KEYS["root"], "scopes": ["admin"]},
        {"name": "viewer", "key": KEYS["viewer"], "scopes": ["read"]},
    ]
    models = {"m": scripted_model(free_ports(1))}
    with serving(tmp_path_factory.mktemp("keys"), free_ports(1), models, {"keys": keys}, ready=False) as running:
        wait_for(lambda: httpx.get(f"{running.url}/readyz").status_code == 200, "the bare readyz says 200")
        yield running


@pytest.fixture
def page(service: Service) -> Iterator[Page]:
    with browsing() as opened:
        opened.open(f"{service.url}/#/")
        opened.wait("document.querySelector('dialog')?.open", "a key is asked for")
        yield opened


def give(page: Page, key: str) -> None:
    page.write("#key", key)
    page.press("Enter")


def test_a_key_is_asked_for_and_kept_for_the_tab(service: Service, page: Page) -> None:
    """A wrong one is reported; a right one shows all, survives a reload, and is forgotten on request."""
    assert violations(page, axe_script()) == []
    assert page.run("document.activeElement.id") == "key"
    give(page, "none-of-ours")
    page.wait_text("does not know this key")
    assert page.run("sessionStorage.length") == 0
    give(page, KEYS["root"])
    page.wait_text("m-0")
    assert page.run("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    assert KEYS["root"] not in str(page.run("document.documentElement.outerHTML + location.href"))
    page.send("Page.reload")
    page.wait_text("m-0")
    page.run("location.hash = '#/post'")
    page.wait('document.querySelector("#job")?.value.includes("model: m")', "an example of the gallery names the model")
    page.click("form .tools button:first-of-type")
    page.wait('document.querySelector("#job")?.value.includes(\'"m"\')', "the question names the model")
    page.click("form button.main")  # the browser sends an Origin with it
    page.wait_text("completed")
    page.click("#forget")
    page.wait("document.querySelector('dialog')?.open", "a key is asked for again")
    assert page.run("sessionStorage.length") == 0
    assert KEYS["root"] not in service.log()


def test_views_beyond_the_scope_of_a_key_say_so(page: Page) -> None:
    """A key that reads sees the worker, and learns that logs and incidents need another scope."""
    give(page, KEYS["viewer"])
    page.wait_text("m-0")
    page.run("location.hash = '#/workers/m-0'")
    page.wait_text("needs the scope admin")
    assert page.run("document.getElementById('banner').hidden")
    page.click(".tools button:last-of-type")
    page.wait_text("POST /v1/workers/m-0/resume needs the scope admin")
