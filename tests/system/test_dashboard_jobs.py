"""The dashboard for readers of results: the question, the neighbours, the speakers, and the job posted again."""

import json
from collections.abc import Callable, Iterator

import pytest

from tests.harness.browser import Page, on_overview
from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import wait_for

AGENTS = [
    {"id": "pro", "model": "m", "system": "You argue for it.", "params": {"max_tokens": 9}},
    {"id": "chair", "model": "m", "speak_after_within_round": ["pro"], "validation": {"choices": ["yes", "no"]}},
]
BUTTON = "[...document.querySelectorAll('button')].find((each) => each.textContent === %s)"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    models = {
        "m": scripted_model(free_ports(1), echo="yes", reject=400, reject_on="NEVER"),
        "gone": {"engine": "attached", "url": f"http://127.0.0.1:{free_ports(1)}", "model": "x"},
    }
    with serving(tmp_path_factory.mktemp("jobs"), free_ports(1), models, ready=False) as running:
        yield running


@pytest.fixture
def shown(service: Service, page: Page) -> Iterator[Page]:
    with on_overview(page, service.url, 1280) as live:
        yield live


def go(page: Page, place: str, text: str) -> None:
    page.run(f"location.hash = {json.dumps(place)}")
    page.wait_text(text)


def post(service: Service, *prompts: str, name: str = "debate") -> str:
    talks = [{"id": f"q{number}", "prompt": f"{prompt} yes"} for number, prompt in enumerate(prompts)]
    job_id = service.post_job({"name": name, "rounds": 1, "agents": AGENTS, "conversations": talks})
    service.wait_ended(job_id)
    return job_id


def test_an_engine_that_is_down_is_shown_on_the_overview(shown: Page) -> None:
    """With its cause, not only as a number of workers."""
    shown.wait_text("gone-0 of gone is starting: asked to start; not ready:")


def test_a_job_shows_its_speakers_and_its_prompts(service: Service, shown: Page) -> None:
    """In their posted form; conversations begin with their prompts."""
    job_id = post(service, "Should towns ban cars?", "Should homework end?")
    go(shown, f"#/jobs/{job_id}", "Should homework end?")
    for text in ("You argue for it.", "max_tokens: 9", "answers held by choices", "completed"):
        shown.wait_text(text)
    shown.click('a[href$="/q0"]')
    shown.wait_text("Should towns ban cars?")
    shown.wait_text("1 of 2, 1 round")
    shown.run("[...document.querySelectorAll('a')].find((each) => each.textContent === 'Next').click()")
    shown.wait_text("2 of 2, 1 round")
    assert "Should homework end?" in shown.text


@pytest.mark.parametrize("name", ["a\u2028b", "a\u2029b", "\u202eabc"])
def test_a_name_with_unusual_line_ends_is_shown(service: Service, shown: Page, name: str) -> None:
    """A Unicode separator in a text breaks no page."""
    job_id = post(service, "Go.", name=name)
    go(shown, "#/", "Newest jobs")
    shown.wait(f"document.querySelector('a[href=\"#/jobs/{job_id}\"]')", "it is among the newest")
    go(shown, f"#/jobs/{job_id}", "Agents")
    shown.wait(f"document.querySelector('h1').textContent === {json.dumps(name)}", "it has its name")


def test_failed_conversations_are_posted_again(service: Service, shown: Page) -> None:
    """The form has the failed ones alone, and the same agents."""
    job_id = post(service, "Go.", "NEVER")
    go(shown, f"#/jobs/{job_id}", "Post the failed ones again")
    shown.run(
        "[...document.querySelectorAll('a')].find((each) => each.textContent.startsWith('Post the failed')).click()"
    )
    shown.wait("document.querySelector('#job')?.value.includes('NEVER')", "the form is filled")
    document = json.loads(shown.run("document.querySelector('#job').value"))
    assert [talk["id"] for talk in document["conversations"]] == ["q1"]
    assert document["agents"] == AGENTS
    go(shown, f"#/post/{job_id}", "Post the job")
    shown.wait("document.querySelector('#job')?.value.includes('q0')", "all of it is there")


def test_a_job_is_posted_in_yaml(shown: Page) -> None:
    """In the documentation's form; faults are shown with their lines."""
    go(shown, "#/post", "Example: a debate")
    text = "name: in yaml\nagents: [{id: a, model: m}]\nconversations:\n  - {id: c, prompt: 'Go: yes'}\n"
    shown.run(f"document.querySelector('#job').value = {json.dumps(text + '  - broken')}")
    shown.click("form button.main")
    shown.wait_text("conversations[1]")
    shown.complaints.clear()  # the browser reports each refusal
    shown.run(f"document.querySelector('#job').value = {json.dumps(text)}")
    shown.click("form button.main")
    shown.wait_text("in yaml")
    shown.wait_text("completed")


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv"])
def test_a_result_is_saved_as_a_file(service: Service, shown: Page, kind: str) -> None:
    """It has its job's name; with a key it cannot be a plain link."""
    job_id = post(service, "Go.")
    go(shown, f"#/jobs/{job_id}", "completed")
    shown.run(
        "window.saved = null; HTMLAnchorElement.prototype.click = function () { window.saved.name = this.download; };"
        " window.make ??= URL.createObjectURL; URL.createObjectURL = (blob) => {"
        " window.saved = {}; blob.text().then((text) => { window.saved.text = text; }); return window.make(blob); }"
    )
    shown.wait(f"{BUTTON % json.dumps(kind.upper())}?.disabled === false", "it can be saved")
    shown.run(f"{BUTTON % json.dumps(kind.upper())}.click()")
    shown.wait("window.saved?.text !== undefined", "it is saved")
    assert shown.run("window.saved.name") == f"debate.{kind}"
    assert shown.run("window.saved.text") == service.http.get(f"/v1/jobs/{job_id}/result?format={kind}").text
    shown.run("delete HTMLAnchorElement.prototype.click")


def test_a_caller_speaks_in_a_field_beneath_the_conversation(service: Service, shown: Page) -> None:
    """The field exists while the turn is awaited; refusals are shown beside it, and the words stay."""
    guest = {"id": "guest", "by": "caller", "validation": {"choices": ["yes", "no"]}}
    agents = [guest, {**AGENTS[0], "speak_after_within_round": ["guest"]}]
    job_id = service.post_job({"agents": agents, "rounds": 2, "conversations": [{"id": "talk", "prompt": "Go on?"}]})
    go(shown, f"#/jobs/{job_id}/talk", "guest speaks in round 1")
    field = "document.querySelector('textarea')"
    for words, told in (
        ("Perhaps.", "exactly one of: yes, no"),
        ("Yes.", "guest speaks in round 2"),
        ("no", "completed"),
    ):
        shown.run(f"{field}.value = {json.dumps(words)}")
        shown.run(f"{BUTTON % json.dumps('Say it')}.click()")
        shown.wait_text(told)
        shown.complaints.clear()  # the browser reports the refusal
        if words == "Perhaps.":
            assert shown.run(f"{field}.value") == words
    shown.wait(f"{field} === null", "there is nothing more to say")
    spoken = service.get(f"/v1/jobs/{job_id}/conversations/talk")["turns"]
    assert [turn["text"] for turn in spoken if turn["by"] == "caller"] == ["Yes.", "no"]


def test_a_turn_is_forked_and_compared(service: Service, shown: Page) -> None:
    """From a button at the turn, over the form, to both side by side."""
    job_id = post(service, "Should bread be free?")
    go(shown, f"#/jobs/{job_id}/q0", "1 of 1, 1 round")
    shown.wait_text("Fork")
    shown.click(f'a[href="#/post/{job_id}/q0/chair%3A0"]')
    shown.wait_text("Post a job")
    wait_for(lambda: '"before"' in str(shown.run("document.querySelector('#job').value")), "the fork is in the form")
    shown.run(f"{BUTTON % json.dumps('Post the job')}.click()")
    shown.wait_text("completed")
    fork = str(shown.run("location.hash")).rpartition("/")[2]
    assert fork != job_id
    go(shown, f"#/jobs/{fork}/q0", "Compare with its source")
    shown.wait_text(f"inherited of {job_id}/q0")
    shown.run(
        "[...document.querySelectorAll('a')].find((each) => each.textContent === 'Compare with its source').click()"
    )
    shown.wait_text("2 turns, 2 of them the same")
    assert shown.run("document.querySelectorAll('.pairs > li').length") == 2


ROWS = (
    "[...document.querySelectorAll('tbody th a')].map((each) => each.textContent).filter((each) => /^q\\d/.test(each))"
)


def find(page: Page, text: str) -> None:
    page.run(
        f"{{ const field = document.querySelector('#conversation-text'); field.value = {json.dumps(text)};"
        " field.dispatchEvent(new Event('input')); }"
    )


def test_conversations_are_found_and_sorted(service: Service, shown: Page) -> None:
    """By words, by a variable, and by duration and tokens; the page shows how many there are."""
    talks = [
        {"id": f"q{number}", "prompt": f"About $topic, yes {'x' * number}", "variables": {"topic": topic}}
        for number, topic in enumerate(["cars", "tea", "cars", "trains"])
    ]
    job_id = service.post_job({"name": "topics", "agents": AGENTS, "conversations": talks})
    service.wait_ended(job_id)
    go(shown, f"#/jobs/{job_id}", "4 conversations")
    find(shown, "topic=cars")
    shown.wait_text("2 conversations")
    assert shown.run(ROWS) == ["q0", "q2"]
    find(shown, "trains")
    shown.wait(f"JSON.stringify({ROWS}) === '[\"q3\"]'", "one is found")
    find(shown, "nothing has this")
    shown.wait_text("None that fits.")
    find(shown, "")
    shown.wait_text("4 conversations")
    shown.run(f"{BUTTON % json.dumps('Conversation')}.click()")
    shown.wait(f"{ROWS}[0] === 'q3'", "the last comes first")
    assert shown.run("document.querySelector('[aria-sort=descending] button').textContent") == "Conversation"
    shown.run(f"{BUTTON % json.dumps('Took')}.click()")
    shown.wait(
        "document.querySelector('[aria-sort=descending] button')?.textContent === 'Took'", "it is sorted by time"
    )
    shown.wait_text("chair: yes")


def test_a_condition_that_ended_a_conversation_is_named(service: Service, shown: Page) -> None:
    """In the list and on its page, as the job words it, in any order of answers."""
    until = [{"agent": "pro", "says": ["yes"]}]
    talk = {"id": "q0", "prompt": "Go, yes"}
    job_id = service.post_job(
        {"name": "early", "rounds": 3, "until": until, "agents": AGENTS[:1], "conversations": [talk]}
    )
    service.wait_ended(job_id)
    go(shown, f"#/jobs/{job_id}", "pro says yes, in round 1")
    shown.wait(
        "[...document.querySelectorAll('.facts div')].some((fact) =>"
        " fact.innerText.replace(/\\s+/g, ' ') === 'Ends early when pro says yes')",
        "it says when",
    )
    shown.run(
        "window.fetchBefore = window.fetch; window.fetch = (url, ...rest) => (String(url).endsWith('/place')"
        " ? new Promise((go) => { window.letGo = go; }) : Promise.resolve())"
        ".then(() => window.fetchBefore(url, ...rest))"
    )
    shown.click('tbody a[href$="/q0"]')
    shown.wait_text("ended early, in round 1")
    shown.run("window.fetch = window.fetchBefore; window.letGo()")
    shown.wait_text("ended early, in round 1: pro says yes")


def test_the_cause_of_a_queued_job_is_shown_on_its_page(service: Service, shown: Page) -> None:
    """With the address that refuses, and since when."""
    job_id = service.post_job(
        {"name": "stuck", "agents": [{"id": "a", "model": "gone"}], "conversations": [{"prompt": "?"}]}
    )
    go(shown, f"#/jobs/{job_id}", "Its turns wait for a worker of gone")
    shown.wait_text("refuses connections since")
    service.http.post(f"/v1/jobs/{job_id}/cancel")


def test_awaited_turns_are_shown_on_every_page(service: Service, shown: Page) -> None:
    """In the menu, on the overview, in lists; one click leads to the field."""
    guest = {"id": "guest", "by": "caller", "speak_after_within_round": ["pro"]}
    job = {"name": "asked", "agents": [AGENTS[0], guest], "conversations": [{"id": "talk", "prompt": "Go, yes?"}]}
    job_id = service.post_job(job)
    for place in ("#/", "#/jobs", "#/pools", "#/workers", "#/models"):
        go(shown, place, "Awaited 1")
    go(shown, "#/jobs", "1 awaited")
    go(shown, f"#/jobs/{job_id}", "awaits guest")
    go(shown, "#/awaited", "pro: yes")
    shown.click('tbody a[href$="/talk"]')
    shown.wait_text("guest speaks in round 1")
    service.http.post(f"/v1/jobs/{job_id}/cancel")
    go(shown, "#/awaited", "No turn waits for a caller.")
