"""The live table (specification, "The terminal"): progress, pools, their first turns with reasons, and workers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from service.cli.displays.console import part, plain
from service.cli.displays.pace import Pace, bar, pace_text

STATE_STYLES: Final[Mapping[str, str]] = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "backoff": "red",
    "failed": "bold red",
}
SPEAKING: Final = 8  # shown turns in flight
PIPE_WORDS: Final = 120  # characters of a turn's last words in a pipe
TABLE_WORDS: Final = 70
PROGRESS_BAR: Final = 24  # characters
MOST_SLOTS: Final = 16  # up to this number each slot has a character in the bar
Document = Mapping[str, Any]  # a document of GET /v1/status, or a turn of GET /v1/speaking
PLACE: Final = "id"


def summary(status: Document) -> str:
    """Return the head line, as plain text."""
    conversations, pools = status["conversations"], status["pools"]
    awaited = part(" | awaited {}", status.get("awaited"))
    return (
        f"{conversations['finished']}/{conversations['total']} conversations ({conversations['persisted']} persisted)"
        f" | in flight {pools['in_flight']}/{pools['capacity']}"
        f" | ready {pools['ready']} | pending {pools['pending']}{awaited}"
    )


def rates(status: Document, pace: Pace) -> str:
    """Return the rates and the time left as plain text; ``pace`` is that of the service's turns."""
    pools = status["pools"]
    left = pools["pending"] + pools["ready"] + pools["in_flight"]
    return pace_text(pace, left, tokens_per_s(status))


def tokens_per_s(status: Document) -> float:
    """Return the tokens that all workers write per second."""
    return sum(float(worker["tokens_per_s"]) for worker in status["workers"])


def plain_lines(status: Document, said: Sequence[Document] = ()) -> list[str]:
    """Return the whole table as lines for a pipe or a file."""
    lines = [summary(status)]
    lines += [f"  worker {_worker_line(worker)}" for worker in status["workers"]]
    lines += [f"  {line}" for line in _lanes(status)]
    lines += [f"  {worker} runs {turn}: {progress}" for worker, turn, progress in _speaking(status)]
    lines += [f"  {who(turn)}: {last_words(turn, PIPE_WORDS)}" for turn in said]
    for pool, heads in status["heads"].items():
        lines += [f"  {pool}: {_turn(head)} waits for {head['waits_for']}" for head in heads]
    return [*lines, *(f"  {note}" for note in _notes(status))]


def table(
    status: Document, title: str = "", *, pace: Pace, said: Sequence[Document] | None = None, hint: str = ""
) -> RenderableType:
    """Return the table for a terminal; ``title`` is markup above it, ``hint`` a text below it.

    ``pace`` is that of all turns; ``said`` shows the last words of turns in flight in place of their progress.
    """
    heads = status["heads"]
    pools = Table(
        Column("READY (waits for a slot)", ratio=1), Column("PENDING (waits for others)", ratio=1),
        box=None, expand=True, header_style="bold",
    )  # fmt: skip
    for place in range(max(len(heads["ready"]), len(heads["pending"]))):
        pools.add_row(_cell(heads["ready"], place), _cell(heads["pending"], place))
    workers = Table("worker", "state", "slots", "kv", "tokens/s", "verdict", "because", box=None, header_style="bold")
    for worker in status["workers"]:
        style = STATE_STYLES.get(worker["state"], "dim")
        slots = _slots(worker["slots"]["in_use"], worker["slots"]["total"])
        workers.add_row(
            escape(worker["id"]), f"[{style}]{worker['state']}[/]", slots, _cache(worker) or "-",
            f"{worker['tokens_per_s']:.0f}",
            worker["verdict"] or "-", escape(plain(worker["because"])),
        )  # fmt: skip
    for line in _lanes(status):
        workers.add_row(Text(line, style="dim"))
    speaking = _progress_table(status) if said is None else _words_table(said)
    head: list[RenderableType] = [title] if title else []
    notes = [Text(note, style="red") for note in _notes(status)]
    head += [Rule(), Text(summary(status), style="bold"), *([] if title else [_progress_line(status, pace)]), *notes]
    below = [Text(hint, style="dim")] if hint else []
    return Group(*head, Rule(), speaking, Rule(), pools, Rule(), workers, Rule(), *below)


def _progress_line(status: Document, pace: Pace) -> Text:
    """Return the share of conversations that have ended, as a bar, with the rates."""
    conversations = status["conversations"]
    shown = bar(conversations["finished"], conversations["total"], PROGRESS_BAR)
    return Text.assemble((shown, "green"), f" {rates(status, pace)}")


def _slots(in_use: int, total: int) -> str:
    """Return slots as numbers and as a bar, with a character per slot where they are few."""
    return f"[cyan]{bar(in_use, total, min(total, MOST_SLOTS))}[/] {in_use}/{total}"


def _progress_table(status: Document) -> Table:
    shown = Table("worker", "speaking (job/conversation/agent/round)", "so far", box=None, header_style="bold")
    for row in _speaking(status):
        shown.add_row(*map(escape, row))
    return shown


def _words_table(said: Sequence[Document]) -> Table:
    columns = Column("speaking", no_wrap=True), Column("last words", no_wrap=True, ratio=1, overflow="crop")
    shown = Table(*columns, box=None, expand=True, header_style="bold")
    for turn in said[:SPEAKING]:
        style = "italic dim" if turn["is_thinking"] else ""
        shown.add_row(Text(who(turn)), Text(last_words(turn, TABLE_WORDS), style=style, justify="right"))
    return shown


def who(turn: Document) -> str:
    """Return the speaking turn and its worker on one line."""
    return plain(f"{turn['name']}/{turn['conversation']} r{turn['round']} {turn['agent']} on {turn['worker']}").replace(
        "\n", " "
    )


def last_words(turn: Document, most: int) -> str:
    """Return the end of a turn's last words, on one line of at most ``most`` characters."""
    words = " ".join(plain(turn["words"]).split())
    if not words:
        return "(reads)"
    return words if len(words) <= most else f"…{words[1 - most :]}"


def _lanes(status: Document) -> list[str]:
    """Return a line for each lane: its device, its model, the next one, and the time of the last load."""
    lines = []
    for lane in status["lanes"]:
        resident = ", ".join(lane["resident"]) or "empty"
        then = part(", then {}", lane["next"])
        took = [f"{lane['load_s'][model]:.1f} s" for model in lane["resident"] if model in lane["load_s"]]
        cost = part(", loaded in {}", "".join(took[:1]))
        lines.append(plain(f"{lane['lane']} on {lane['device']}: {resident}{then}{cost}; {lane['swaps']} loads"))
    return lines


def _speaking(status: Document) -> list[tuple[str, str, str]]:
    """Return worker, turn and progress of the turns in flight, the newest first, as many as fit on a screen."""
    requests = [(worker["id"], request) for worker in status["workers"] for request in worker["requests"]]
    requests.sort(key=lambda each: each[1]["held_s"])
    return [
        (worker, plain(request["job_name"]), f"{_progress(request['evidence'])}, {request['held_s']:.0f} s")
        for worker, request in requests[:SPEAKING]
    ]


def _progress(evidence: Document) -> str:
    if evidence["output_tokens"]:
        return f"{evidence['output_tokens']} tokens"
    if evidence["prompt_tokens"]:
        return f"reads, {evidence['prompt_tokens_done'] or 0} of {evidence['prompt_tokens']} tokens"
    return "reads"


def _notes(status: Document) -> list[str]:
    """List unclaimed conversations, and the troubles of tool servers and of the store."""
    notes = [f"claimed by no node, {waits_for}" for waits_for in status["unclaimed"].values()]
    notes += [
        f"the MCP server {server['name']} of {server['model']}: {plain(server['trouble'])}"
        for server in status["tool_servers"]
        if server["trouble"] is not None
    ]
    trouble = status["store"]["trouble"]
    return notes + ([f"the store: {trouble}"] if trouble is not None else [])


def _cell(heads: Sequence[Document], place: int) -> str:
    if place >= len(heads):
        return ""
    head = heads[place]
    return f"{place + 1:3d}. {escape(_turn(head))} [dim]{escape(head['waits_for'])}[/]"


def _turn(head: Document) -> str:
    return f"[{plain(head['name'])}/{head['conversation']}] r{head['round']} {head['agent']} ({head['model']})"


def _cache(worker: Document) -> str:
    """Return the reserved and total thousands of tokens of a KV cache that is lent by tokens."""
    cache = worker.get("kv")
    return f"{cache['reserved'] / 1000:.1f}k/{cache['budget'] / 1000:.1f}k" if cache else ""


def _worker_line(worker: Document) -> str:
    slots = f"{worker['slots']['in_use']}/{worker['slots']['total']} slots{part(', kv {}', _cache(worker))}"
    return (
        f"{worker['id']}: {worker['state']}, {slots}, {worker['tokens_per_s']:.0f} tokens/s: {plain(worker['because'])}"
    )


def changes(before: Document, now: Document) -> list[str]:
    """Return the changes of workers, lanes, tool servers and the store, in the order of the document."""
    lines = []
    earlier = {worker[PLACE]: worker for worker in before["workers"]}
    for worker in now["workers"]:
        lines += _worker(earlier.get(worker[PLACE]), worker)
    lanes = {lane["lane"]: lane["resident"] for lane in before["lanes"]}
    lines += [
        f"{lane['lane']}: {', '.join(lane['resident']) or 'empty'}"
        for lane in now["lanes"]
        if lanes.get(lane["lane"], lane["resident"]) != lane["resident"]
    ]
    troubles = {(each["model"], each["name"]): each["trouble"] for each in before["tool_servers"]}
    lines += [
        f"the MCP server {server['name']} of {server['model']}: {server['trouble'] or 'is back'}"
        for server in now["tool_servers"]
        if troubles.get((server["model"], server["name"])) != server["trouble"]
    ]
    if before["store"]["trouble"] != now["store"]["trouble"]:
        lines.append(f"the store: {now['store']['trouble'] or 'works again'}")
    return [plain(line).replace("\n", " ") for line in lines]


def _worker(before: Document | None, now: Document) -> list[str]:
    if before is None:
        return [f"{now[PLACE]}: {now['state']}: {now['because']}"]
    if before["state"] != now["state"]:
        return [f"{now[PLACE]}: {before['state']} -> {now['state']}: {now['because']}"]
    if before["incarnation"] != now["incarnation"]:  # the states in between were too short to be seen
        return [f"{now[PLACE]}: engine {now['incarnation']} in place of {before['incarnation']}: {now['because']}"]
    return []
