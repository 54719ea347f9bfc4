"""The commands that speak to a running service over HTTP."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NoReturn, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from roundhouse_client import AnswerLost, Client, Event, Refused, Unreachable
from roundhouse_client.calls import job_calls, node_calls
from roundhouse_client.flows.asking import PATIENCE_S
from roundhouse_client.values.events import END, ConversationChange, Gap, Progress, Swap, TurnChange
from roundhouse_client.values.jobs import ConversationCounts, Job, JobPage, TurnCounts
from roundhouse_client.values.models import Tools
from roundhouse_client.values.workers import LogLine
from service.cli.connection import JsonOption, KeyOption, ServiceAway, UrlOption, connect, print_document
from service.cli.conventions import Exit, FormOption, Panel
from service.cli.displays.console import given_up_line, part, plain, print_transcript
from service.errors import ConfigError, Fault
from service.formats.documents import Place, lines_of_file, parse_document, read_text
from service.formats.result_form import ResultForm
from service.run import refuse_configuration, refuse_shape, told_with_lines, with_rows_of
from workers.requests.prompts.bios import signature_text

DONE: Final = "completed"
SECOND_S: Final = 1.0  # time between two updates of a progress line
MOST_GIVEN_UP: Final = 10  # given-up patterns that a job lists
FILE_AT_FAULT: Final = (400, 413, 422)  # statuses for which the job file is at fault
NO_SLOT: Final = "a slot of "  # start of the reason of a turn that waits only for a slot
SHOWN = ("changed", "added", "removed", "resized", "restarted", "unchanged")


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    in_panel = {Panel.JOBS: (submit, status, result, watch, cancel), Panel.LOOK: (workers, logs)}
    for panel, those in in_panel.items():
        for each in cast("tuple[Callable[..., None], ...]", those):
            app.command(rich_help_panel=panel)(each)


def submit(
    job: Annotated[Path, typer.Argument(help="A job file, YAML or JSON.")],
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="With --wait: print each event.")] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="A second post with this key posts nothing.")] = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Post a job. --wait also waits for a starting service; with --json it prints the job as posted and as ended."""
    if verbose and not wait:
        raise ConfigError("--verbose prints events as they come; it needs --wait")
    if idempotency_key == "":
        raise ConfigError("--idempotency-key is empty")
    text = read_text(job)
    document, lines = parse_document(text, str(job))
    refuse_configuration(document, str(job))
    read = with_rows_of(document, str(job), lines)
    document = document if read is None else read.document
    if read is not None and read.file is not None:
        typer.echo(plain(f"{len(read.lines)} conversations of {read.file}"), err=True)
    with _reporting_shape(document, str(job), text, lines), connect(url, api_key) as service:
        if wait:  # a starting service may not listen yet; the job itself is posted once
            service.ask(node_calls.get_health(), patience_s=PATIENCE_S)
        try:
            posted = service.post_job(cast("dict[str, object]", document), idempotency_key=idempotency_key)
        except Refused as refused:
            if refused.status not in FILE_AT_FAULT:
                raise
            faults = [Fault(path=fault.path, message=fault.message) for fault in refused.faults]
            faults_text = told_with_lines(faults, str(job), lines_of_file(text, lines), read)
            raise ConfigError(faults_text or f"{job}: {refused}") from refused
        # The id alone goes to standard output, for scripts.
        print_document(posted.document, posted.id, as_json=as_json)
        if wait:
            follow_posted(service, posted.id, verbose=verbose, as_json=as_json)


def follow_posted(service: Client, job_id: str, *, verbose: bool = False, as_json: bool = False) -> NoReturn:
    """Follow a posted job to its end, and exit with its status."""
    _tell_waits(service, job_id)
    show = partial(_print_event, as_json=as_json, is_aside=True)
    end = follow(service, job_id, show if verbose or as_json else ProgressLine(service, job_id).show)
    ended = service.ask(job_calls.get_job(job_id), patience_s=PATIENCE_S)
    _tell_given_up(ended)
    if as_json:
        typer.echo(json.dumps(ended.document))
    raise _exit_of(end)


def _exit_of(state: str) -> typer.Exit:
    return typer.Exit(Exit.DONE if state == DONE else Exit.FAILED)


def _tell_given_up(job: Job) -> None:
    """Report patterns and schemas that ran out of time: the job's end would otherwise pass for their verdict."""
    for each in job.given_up:
        typer.echo(given_up_line(each.document), err=True)
    if len(job.given_up) >= MOST_GIVEN_UP:
        typer.echo(f"there may be more: roundhouse result {job.id} --format json has all", err=True)


@contextmanager
def _reporting_shape(document: object, source: str, text: str, lines: dict[Place, int]) -> Iterator[None]:
    """Report the faults of the file itself where no service is there to do so."""
    try:
        yield
    except ServiceAway:
        refuse_shape(document, source, lines_of_file(text, lines))
        raise


def status(
    job_id: Annotated[str | None, typer.Argument(help="Default: list all jobs.")] = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Show one job, or list jobs."""
    with connect(url, api_key) as service:
        answer = service.list_jobs() if job_id is None else service.get_job(job_id)
    jobs = answer.jobs if isinstance(answer, JobPage) else (answer,)
    if job_id and not as_json:
        _tell_given_up(jobs[0])
        for each in jobs[0].waits_for:
            typer.echo(plain(f"waits: {each}"), err=True)
    listing = Table(
        Column("id", no_wrap=True, min_width=20),
        "name",
        "state",
        "conversations",
        "turns",
        "in flight",
        "ready",
        "awaited",
        box=None,
    )
    for job in jobs:
        counts, turns = job.progress.conversations, job.progress.turns
        listing.add_row(
            job.id,
            escape(plain(job.name)),
            job.state,
            _ended(counts),
            _ended(turns),
            str(turns.in_flight),
            str(turns.ready),
            str(turns.awaited),
        )
    print_document(answer.document, listing, as_json=as_json)


def _ended(counts: ConversationCounts | TurnCounts, what: str = "") -> str:
    """Return the numbers of ended, all and failed ones, as ``3/4 turns, 1 failed``."""
    ended = f"{counts.completed + counts.failed + counts.cancelled}/{counts.total} {what}".rstrip()
    return ended + part(", {} failed", counts.failed)


def result(
    job_id: str,
    form: FormOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Print the transcripts of a job that has ended."""
    if as_json and form not in {None, ResultForm.JSON}:
        raise ConfigError(f"--json and --format {form}: give one of them")
    with connect(url, api_key) as service:
        job = service.get_job(job_id)
        _tell_given_up(job)
        if as_json:  # the same document as over HTTP
            form = ResultForm.JSON
        if form is not None:
            for piece in service.download_result(job_id, form, patience_s=0.0):
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            raise _exit_of(job.state)
        for transcript in service.read_result(job_id, patience_s=0.0):
            print_transcript(Console(emoji=False), job_id, transcript.document)
    raise _exit_of(job.state)


def watch(job_id: str, url: UrlOption = None, api_key: KeyOption = None, *, as_json: JsonOption = False) -> None:
    """Follow a job's events to its end."""
    with connect(url, api_key) as service:
        end = follow(service, job_id, partial(_print_event, as_json=as_json, is_aside=False))
        _tell_given_up(service.ask(job_calls.get_job(job_id), patience_s=PATIENCE_S))
    raise _exit_of(end)


def cancel(job_id: str, url: UrlOption = None, api_key: KeyOption = None, *, as_json: JsonOption = False) -> None:
    """End a job early; turns already spoken are kept."""
    with connect(url, api_key) as service:
        had_ended = service.get_job(job_id).has_ended
        job = service.cancel_job(job_id)
    # A quick service ends the job before it answers.
    note = ", nothing to cancel" if had_ended else "" if job.has_ended else ", to be cancelled"
    print_document(job.document, f"{job.id}: {job.state}{note}", as_json=as_json)


def workers(url: UrlOption = None, api_key: KeyOption = None, *, as_json: JsonOption = False) -> None:
    """List the workers."""
    with connect(url, api_key) as service:
        answer = service.list_workers()
    listing = Table(
        "id", "model", "engine", "state", "pid", "port", "slots", "restarts", "tokens/s", "because", box=None
    )
    for worker in answer.workers:
        listing.add_row(
            worker.id, worker.model, worker.engine, worker.state, str(worker.pid), str(worker.port),
            f"{worker.slots.in_use}/{worker.slots.total}", str(worker.restarts), str(worker.tokens_per_s),
            escape(plain(worker.because)),
        )  # fmt: skip
    print_document(answer.document, listing, as_json=as_json)


def logs(
    worker_id: str,
    *,
    follow_on: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing new lines.")] = False,
    tail: Annotated[int, typer.Option(min=0, max=10_000, help="How many lines.")] = 100,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the last output lines of a worker's engine."""
    with connect(url, api_key) as service:
        if not follow_on:
            for line in service.get_log(worker_id, tail=tail).lines:
                _print_line(line, as_json=as_json)
            return
        service.get_worker(worker_id)  # reports a missing service or worker at once
        for line in service.follow_log(worker_id, tail=tail, patience_s=PATIENCE_S):
            _print_line(line, as_json=as_json)


def _print_line(line: LogLine, *, as_json: bool) -> None:
    typer.echo(json.dumps(line.document) if as_json else plain(line.text))


class ProgressLine:
    """A job's progress on standard error: one line that is redrawn, or a line a second without a terminal."""

    def __init__(self, service: Client, job_id: str) -> None:
        self._service = service
        self._job_id = job_id
        self._shown = ""
        self._shown_at = -SECOND_S
        self._moves = Console(stderr=True).is_terminal

    def show(self, event: Event) -> None:
        """Show the job's progress if it has changed and the last line is a second old."""
        is_end = event.kind == END
        if time.monotonic() - self._shown_at < SECOND_S and not is_end:
            return
        self._shown_at = time.monotonic()
        job = self._service.ask(job_calls.get_job(self._job_id), patience_s=PATIENCE_S)
        counts, turns = job.progress.conversations, job.progress.turns
        awaited = part(", {} awaited", turns.awaited)
        line = plain(
            f"{job.name}: {_ended(turns, 'turns')}, {_ended(counts, 'conversations')}, "
            f"{turns.in_flight} in flight, {turns.ready} ready{awaited}"
        )
        if line != self._shown:
            typer.echo(f"\r{line}\x1b[K" if self._moves else line, err=True, nl=not self._moves)
            self._shown = line
        if is_end:
            typer.echo("\n" * self._moves + f"{plain(job.name)}: {job.state}", err=True)


def _print_event(event: Event, *, as_json: bool, is_aside: bool) -> None:
    line = json.dumps({"event": event.kind, **event.data}) if as_json else plain(_event_line(event))
    typer.echo(line, err=is_aside)


def follow(service: Client, job_id: str, show: Callable[[Event], None]) -> str:
    """Show a job's events to its end, across reconnections; return its final state.

    Raises:
        ServiceAway: the service does not answer any more.
        Refused: there is no such job.
    """
    service.get_job(job_id)  # reports a missing service or job at once
    try:
        for event in service.follow_job(job_id, patience_s=PATIENCE_S):
            show(event)
            if event.kind == END:
                return str(event.data["state"])
        return service.ask(job_calls.get_job(job_id), patience_s=PATIENCE_S).state
    except (Unreachable, AnswerLost) as error:
        raise ServiceAway.at(error, f"; to continue: roundhouse watch {job_id}") from error


def _tell_waits(service: Client, job_id: str) -> None:
    """Report what a job waits for other than a slot, such as a model without a worker."""
    heads = service.ask(node_calls.get_status()).heads
    waits = {head.waits_for for head in heads.ready if head.job == job_id and NO_SLOT not in head.waits_for}
    for waits_for in sorted(waits):
        typer.echo(plain(f"waits for {waits_for}"), err=True)


def _event_line(event: Event) -> str:
    match event.value:
        case TurnChange() as turn:
            why = part(" ({})", turn.reason) + part(" on {}", turn.worker)
            return f"{turn.conversation} round {turn.round} {turn.agent}: {turn.state}{why}"
        case ConversationChange() as conversation:
            return f"{conversation.conversation}: {conversation.state}"
        case Progress() as progress:
            tokens = sum(turn.output_tokens for turn in progress.turns)
            return f"{len(progress.turns)} turns in flight, {tokens} tokens so far"
        case Swap() as swap:
            left = part(" in place of {}", swap.left)
            return f"{swap.lane}: {swap.model} is loaded{left} in {swap.seconds:.1f} s: {swap.because}"
        case Gap() as gap:
            return f"events {gap.first} to {gap.last} are no longer kept"
        case _:
            return f"job: {event.data.get('state', event.kind)}"


def tools(
    model: Annotated[str | None, typer.Argument(help="Default: the tools of all models.")] = None,
    *,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tools that agents of a model may call, and the MCP servers that are down."""
    with connect(url, api_key) as service:
        models = (each.model for each in service.list_workers().workers) if model is None else (model,)
        listings = [service.get_tools(name) for name in dict.fromkeys(models)]
    if as_json:
        documents = [listing.document for listing in listings]
        typer.echo(json.dumps(documents if model is None else documents[0]))
        return
    console = Console(emoji=False)
    for listing in listings:
        _print(console, listing)


def _print(console: Console, listing: Tools) -> None:
    table = Table("tool", "from", "what it does", title=plain(listing.model), title_justify="left", box=None)
    for tool in listing.tools:
        first = plain(tool.description).strip().partition("\n")[0]
        source = f"mcp: {tool.server}" if tool.server else "python"
        table.add_row(plain(signature_text(tool.name, dict(tool.parameters))), plain(source), first)
    console.print(table, markup=False)
    for server in listing.servers:
        if server.trouble:
            known = f"; its last {server.tools} tools are still known" if server.tools is not None else ""
            console.print(f"mcp {plain(server.name)} is down: {plain(server.trouble)}{known}", markup=False)


def reload(
    url: UrlOption = None,
    api_key: KeyOption = None,
    *,
    all_nodes: Annotated[bool, typer.Option("--all-nodes", help="On all nodes of the cluster.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make the service reload its configuration; if it is refused or not usable, nothing changes."""
    with connect(url, api_key) as service:
        answer = service.reload_configuration(nodes="all" if all_nodes else None)
    listing = Table("what", "settings and models", box=None)
    for what, names in [(what, names) for what in SHOWN if (names := getattr(answer, what))]:
        listing.add_row(what, ", ".join(names))
    for node in answer.document.get("nodes", ()):
        listing.add_row("reloaded", plain(str(node["url"])))
    print_document(answer.document, listing, as_json=as_json)
