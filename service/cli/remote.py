"""The commands that speak to a running service over HTTP."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from httpx_sse import ServerSentEvent, connect_sse
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from service.cli.console import can_draw, print_transcript
from service.cli.exits import Exit
from service.cli.plain import plain
from service.cli.status_table import plain_lines, table
from service.errors import ConfigError
from service.formats.documents import parse_document, read_text

LIMIT_S: Final = 30.0  # for one answer; streams wait for as long as the service keeps them alive
RECONNECT_S: Final = 1.0
PATIENCE_S: Final = 60.0  # with a service that was there: a start with much to read back takes a while
FOLLOW_INTERVAL_S: Final = 0.5
DONE: Final = "completed"
PIPE_WIDTH: Final = 1000  # a pipe has no width that anything would have to fit


class Unreachable(Exception):
    """The service does not answer."""


class Refused(Exception):
    """The service answered, and the answer is no."""

    def __init__(self, problem: Mapping[str, Any], status: int) -> None:
        faults = "".join(f"\n  {fault['path']}: {fault['message']}" for fault in problem.get("errors", ()))
        text = problem.get("title", f"status {status}") if faults else problem.get("detail", f"status {status}")
        super().__init__(f"{text}{faults}")
        self.status = status


UrlOption = Annotated[str, typer.Option(envvar="ROUNDHOUSE_URL", help="Where the service is.")]
KeyOption = Annotated[str | None, typer.Option(envvar="ROUNDHOUSE_API_KEY", help="One of the service's api_keys.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
DEFAULT_URL: Final = "http://127.0.0.1:8080"


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command()(submit)
    app.command()(status)
    app.command()(result)
    app.command()(watch)
    app.command()(cancel)
    app.command()(workers)
    app.command()(logs)
    app.command()(top)


def submit(
    job: Annotated[Path, typer.Argument(help="A job file, YAML or JSON.")],
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="Posting again with the same key posts nothing.")] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Post a job. --wait waits for a service that is starting, too; with --json: the job as posted and as it ended."""
    document, _ = parse_document(read_text(job), str(job))
    headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
    with connect(url, api_key) as service:
        if wait:  # one that is starting may not listen yet; the job itself is posted once
            patient_ask(service, "GET", "/healthz")
        try:
            posted = ask(service, "POST", "/v1/jobs", json=document, headers=headers)
        except Refused as refused:
            if refused.status in (400, 413, 422):  # the job file is at fault, not the service
                raise ConfigError(f"{job}: {refused}") from refused
            raise
        if not wait:
            print_document(posted, posted["id"], as_json=as_json)
            return
        # Alone on the standard output, for the script that goes on with it.
        print_document(posted, posted["id"], as_json=as_json)
        end = follow(service, posted["id"], as_json=as_json, is_aside=True)
        if as_json:
            typer.echo(json.dumps(patient_ask(service, "GET", f"/v1/jobs/{posted['id']}")))
    raise typer.Exit(Exit.DONE if end == DONE else Exit.FAILED)


def status(
    job_id: Annotated[str | None, typer.Argument(help="Without one, all jobs are listed.")] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Show one job, or list them."""
    with connect(url, api_key) as service:
        answer = ask(service, "GET", f"/v1/jobs/{job_id}" if job_id else "/v1/jobs")
    jobs = [answer] if job_id else answer["jobs"]
    listing = Table(
        Column("id", no_wrap=True, min_width=20),
        "name",
        "state",
        "conversations",
        "turns",
        "in flight",
        "ready",
        box=None,
    )
    for job in jobs:
        conversations, turns = job["progress"]["conversations"], job["progress"]["turns"]
        listing.add_row(
            job["id"],
            escape(plain(job["name"])),
            job["state"],
            f"{conversations['completed']}/{conversations['total']}",
            f"{turns['completed']}/{turns['total']}",
            str(turns["in_flight"]),
            str(turns["ready"]),
        )
    print_document(answer, listing, as_json=as_json)


def result(
    job_id: str, url: UrlOption = DEFAULT_URL, api_key: KeyOption = None, *, as_json: JsonOption = False
) -> None:
    """Print the transcripts of a job that has ended."""
    with connect(url, api_key) as service:
        answer = ask(service, "GET", f"/v1/jobs/{job_id}/result")
    if as_json:
        print_document(answer, "", as_json=True)
    else:
        for transcript in answer["conversations"]:
            print_transcript(Console(emoji=False), job_id, transcript)
    raise typer.Exit(Exit.DONE if answer["state"] == DONE else Exit.FAILED)


def watch(job_id: str, url: UrlOption = DEFAULT_URL, api_key: KeyOption = None, *, as_json: JsonOption = False) -> None:
    """Follow a job's events to its end."""
    with connect(url, api_key) as service:
        end = follow(service, job_id, as_json=as_json)
    raise typer.Exit(Exit.DONE if end == DONE else Exit.FAILED)


def cancel(
    job_id: str, url: UrlOption = DEFAULT_URL, api_key: KeyOption = None, *, as_json: JsonOption = False
) -> None:
    """End a job early; what was said is kept."""
    with connect(url, api_key) as service:
        answer = ask(service, "POST", f"/v1/jobs/{job_id}/cancel")
    print_document(answer, f"{answer['id']}: {answer['state']}, to be cancelled", as_json=as_json)


def workers(url: UrlOption = DEFAULT_URL, api_key: KeyOption = None, *, as_json: JsonOption = False) -> None:
    """List the workers."""
    with connect(url, api_key) as service:
        answer = ask(service, "GET", "/v1/workers")
    listing = Table("id", "model", "engine", "state", "pid", "port", "slots", "restarts", "tokens/s", box=None)
    for worker in answer["workers"]:
        slots = f"{worker['slots']['in_use']}/{worker['slots']['total']}"
        cells = [worker[name] for name in ("id", "model", "engine", "state", "pid", "port")]
        listing.add_row(*(str(cell) for cell in (*cells, slots, worker["restarts"], worker["tokens_per_s"])))
    print_document(answer, listing, as_json=as_json)


def logs(
    worker_id: str,
    *,
    follow_on: Annotated[bool, typer.Option("-f", "--follow", help="Go on with new lines.")] = False,
    tail: Annotated[int, typer.Option(min=0, max=10_000, help="How many lines.")] = 100,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the last output lines of a worker's engine."""
    after, ask_again = 0, ask
    with connect(url, api_key) as service:
        while True:
            params = {"tail": tail, "after": after}
            for line in ask_again(service, "GET", f"/v1/workers/{worker_id}/logs", params=params)["lines"]:
                after = line["number"]
                typer.echo(json.dumps(line) if as_json else plain(line["text"]))
            if not follow_on:
                return
            tail, ask_again = 10_000, patient_ask
            time.sleep(FOLLOW_INTERVAL_S)


def top(
    *,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show live what runs, what waits, and for what; plain lines where the output is no terminal."""
    console, ask_again = Console(emoji=False), ask
    with connect(url, api_key) as service, _screen(console, is_live=not (once or as_json)) as live:
        while True:
            now = ask_again(service, "GET", "/v1/status")
            ask_again = patient_ask
            if live is not None:
                live.update(table(now))
            elif as_json:
                typer.echo(json.dumps(now))
            elif can_draw(console):
                console.print(table(now))
            else:
                typer.echo("\n".join(plain_lines(now)))
            if once:
                return
            time.sleep(interval)


@contextmanager
def _screen(console: Console, *, is_live: bool) -> Iterator[Live | None]:
    """Give the live display of a terminal for a block; the cursor is back afterwards, whatever happens."""
    if not (is_live and can_draw(console)):
        yield None
        return
    with Live(console=console, screen=True) as live:
        yield live


@contextmanager
def connect(url: str, api_key: str | None) -> Iterator[httpx.Client]:
    """Return a client of the service; it does not speak to it yet."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        client = httpx.Client(base_url=url, headers=headers, timeout=LIMIT_S, trust_env=False)
    except httpx.InvalidURL as error:
        raise Unreachable(f"--url {url}: {error}") from error
    with client:
        yield client


def ask(service: httpx.Client, method: str, path: str, **request: Any) -> Any:  # noqa: ANN401 - JSON of the service
    """Return the JSON of an answer.

    Raises:
        Unreachable: the service does not answer.
        Refused: it answered with an error.
    """
    try:
        answer = service.request(method, path, **request)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(f"no service at {service.base_url}: {error}; start one with 'roundhouse serve'") from error
    return _checked(answer)


def patient_ask(service: httpx.Client, method: str, path: str, **request: Any) -> Any:  # noqa: ANN401 - as above
    """Return the JSON of an answer of a service that is starting or restarting: for a while, and saying so.

    Raises:
        Unreachable: it does not come back.
        Refused: it answered with an error.
    """
    gives_up_at = time.monotonic() + PATIENCE_S
    is_told = False
    while True:
        try:
            return ask(service, method, path, **request)
        except (Unreachable, Refused) as error:
            is_passing = isinstance(error, Unreachable) or error.status == httpx.codes.SERVICE_UNAVAILABLE
            if not is_passing or time.monotonic() > gives_up_at:
                raise
        if not is_told:
            typer.echo(f"the service at {service.base_url} is away; waiting for it", err=True)
            is_told = True
        time.sleep(RECONNECT_S)


def follow(service: httpx.Client, job_id: str, *, as_json: bool, is_aside: bool = False) -> str:
    """Print a job's events to its end, over reconnections; return the state that it ended in.

    ``is_aside`` prints them on the standard error.

    Raises:
        Unreachable: the service does not answer.
        Refused: there is no such job.
    """
    last = "0"
    ask(service, "GET", f"/v1/jobs/{job_id}")  # a service that is not there, or knows no such job, is said at once
    while True:
        try:
            for event in _events(service, job_id, last):
                last = event.id or last
                data = json.loads(event.data)
                line = json.dumps({"event": event.event, **data}) if as_json else plain(_event_line(event.event, data))
                typer.echo(line, err=is_aside)
                if event.event == "end":
                    return str(data["state"])
        except httpx.HTTPError:
            pass  # the connection broke; the next look says whether the service is still there
        except Refused as refused:
            if refused.status != httpx.codes.SERVICE_UNAVAILABLE:
                raise
        try:
            state = patient_ask(service, "GET", f"/v1/jobs/{job_id}")["state"]
        except Unreachable as error:
            raise Unreachable(f"{error}; to go on: roundhouse watch {job_id}") from error
        if state not in ("queued", "running"):
            return str(state)
        time.sleep(RECONNECT_S)


def print_document(document: object, shown: object, *, as_json: bool) -> None:
    """Print for machines, or for people."""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        console = Console(emoji=False)
        if not console.is_terminal:
            console = Console(width=PIPE_WIDTH, emoji=False)
        console.print(shown, highlight=False)


def _events(service: httpx.Client, job_id: str, last: str) -> Iterator[ServerSentEvent]:
    headers = {"Last-Event-ID": last}
    with connect_sse(service, "GET", f"/v1/jobs/{job_id}/events", headers=headers) as source:
        if source.response.is_error:
            source.response.read()
            _checked(source.response)
        yield from source.iter_sse()


def _checked(answer: httpx.Response) -> Any:  # noqa: ANN401 - JSON of the service
    try:
        document = answer.json() if answer.content else {}
    except ValueError as error:
        raise Refused(
            {"detail": f"{answer.url} is not Roundhouse: {answer.text[:100]!r}"}, answer.status_code
        ) from error
    if answer.is_error:
        raise Refused(document if isinstance(document, dict) else {}, answer.status_code)
    return document


def _event_line(kind: str, data: Mapping[str, Any]) -> str:
    match kind:
        case "turn":
            reason = f" ({data['reason']})" if data.get("reason") else ""
            on = f" on {data['worker']}" if data.get("worker") else ""
            return f"{data['conversation']} round {data['round']} {data['agent']}: {data['state']}{reason}{on}"
        case "conversation":
            return f"{data['conversation']}: {data['state']}"
        case "progress":
            tokens = sum(turn["output_tokens"] for turn in data["turns"])
            return f"{len(data['turns'])} turns in flight, {tokens} tokens so far"
        case "swap":
            left = f" in place of {data['left']}" if data["left"] else ""
            return f"{data['lane']}: {data['model']} is loaded{left} in {data['seconds']:.1f} s: {data['because']}"
        case "gap":
            return f"events {data['first']} to {data['last']} are kept no more"
        case _:
            return f"job: {data.get('state', kind)}"
