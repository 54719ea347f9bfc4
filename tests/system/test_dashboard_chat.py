"""The chat of the dashboard in a real Chromium: answers as they arrive, their cost, and their ends."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.browser import Page, on_overview
from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.waiting import wait_for

HOLD = r"HOLD:(\S+) SAY:\w+\"}\]$"  # matches the last message alone


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("chat")
    flags: Document = {"record": str(folder / "record.jsonl"), "echo": r"SAY:(\w+)\"}\]$", "hold": HOLD}
    models = {name: scripted_model(free_ports(1), slots=1, **flags) for name in ("m", "n")}
    with serving(folder, free_ports(1), models, {"heartbeat_s": 0.2}) as running:
        yield running


@pytest.fixture
def shown(service: Service, page: Page) -> Iterator[Page]:
    with on_overview(page, service.url, 1280) as live:
        live.click('a[href="#/chat"]')
        live.wait("document.querySelector('#chat-model')?.value === 'm'", "the models are there")
        yield live


def say(page: Page, text: str) -> None:
    page.run(f"document.querySelector('#chat-text').value = {json.dumps(text)}")
    page.click("form button.main")


def messages(service: Service) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in recorded(service.folder / "record.jsonl")[-1]["messages"]]


def test_a_conversation_goes_on_and_outlives_the_view(service: Service, shown: Page) -> None:
    """Each answer shows its cost and its wait; parameters and system text go with each request."""
    shown.run("document.querySelector('details').open = true")
    for field, value in (("chat-system", "You are MARK-x."), ("chat-temperature", "0.25")):
        shown.run(
            f"{{ const field = document.querySelector('#{field}'); field.value = {json.dumps(value)};"
            " field.dispatchEvent(new Event('input')); }"
        )
    say(shown, "SAY:one")
    shown.wait_text("waited 0.0 s · m-0")
    shown.click('a[href="#/pools"]')
    shown.click('a[href="#/chat"]')
    shown.wait_text("SAY:one")
    shown.wait("document.querySelector('#chat-model')?.value === 'm'", "the models are there")
    say(shown, "SAY:two")
    wait_for(lambda: messages(service)[-1] == ("user", "SAY:two"), "it is asked")
    assert messages(service) == [
        ("system", "You are MARK-x."),
        ("user", "SAY:one"),
        ("assistant", "one "),
        ("user", "SAY:two"),
    ]
    request = recorded(service.folder / "record.jsonl")[-1]
    assert (request["temperature"], request["max_tokens"]) == (0.25, 512)
    shown.wait("[...document.querySelectorAll('.chat .beside')].at(-1).textContent.includes('m-0')", "it is answered")
    shown.run(
        "[...document.querySelectorAll('button')].find((each) => each.textContent === 'New conversation').click()"
    )
    say(shown, "SAY:three")
    wait_for(lambda: messages(service)[1:] == [("user", "SAY:three")], "nothing of the last goes with it")


def test_an_answer_is_stopped_and_its_place_is_shown(service: Service, shown: Page, tmp_path: Path) -> None:
    """The slot is free at once; the next request sees its place in the queue."""
    gate = tmp_path / "gate"
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": f"HOLD:{gate} SAY:held"}]}
    with service.http.stream("POST", "/v1/chat/completions", json=body):
        say(shown, "SAY:later")
        shown.wait_text("place 1 in the queue")
        shown.run("[...document.querySelectorAll('button')].find((each) => each.textContent === 'Stop').click()")
        shown.wait_text("stopped")
    wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 0, "nobody has the slot")
    say(shown, "SAY:next")
    shown.wait(
        "[...document.querySelectorAll('.chat .words')].at(-1).textContent.trim() === 'next'", "the next is answered"
    )


def test_a_refused_question_is_reported_and_can_be_sent_again(shown: Page) -> None:
    """The engine's words; the conversation is as it was."""
    shown.run(
        "window.sentBefore = document.querySelectorAll('.chat section').length; window.fetchBefore = window.fetch;"
        " window.fetch = () => Promise.reject(new TypeError('away'))"
    )
    say(shown, "SAY:refused")
    shown.wait_text("Roundhouse cannot be reached")
    shown.run("window.fetch = window.fetchBefore")
    assert shown.run("document.querySelector('#chat-text').value") == "SAY:refused"
    assert shown.run("document.querySelectorAll('.chat section').length === window.sentBefore")
