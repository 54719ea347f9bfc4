"""The reference lists what the code has: each list is checked on its own page, both ways."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

import service.api.errors.refusals  # noqa: F401 - the classes in it are of the tree too
from roundhouse import InferenceEngine
from roundhouse_client import Client, RoundhouseError
from roundhouse_client import errors as client_errors
from roundhouse_client.values import jobs, models, node, transcripts, workers
from service.api.errors.problems import ANSWERS, Problem
from service.api.routes import events
from service.cli.app import Commands
from service.cli.app import app as command_line
from service.cli.conventions import Exit
from service.config.keys import KeyConfig
from service.config.model import HttpToolsConfig, McpServerConfig, ModelConfig
from service.config.schema import Config
from service.conversations.document.spec import AgentSpec, ConversationSpec, JobSpec, ValidationSpec, WebhookSpec
from service.conversations.job.states import ConversationState, JobState, TurnState
from service.errors import ServiceError
from service.node.node import open_node
from service.scheduling.core.policies import POLICIES
from service.store import conversation_rows, event_rows
from service.timeline.spans import Span
from service.timeline.timeline import Timeline
from tests.documents.pages import REFERENCE, names, own_rows, rows, section
from workers import Worker
from workers.outcome import FailureReason
from workers.policy.liveness import Verdict
from workers.spec import EngineKind, WorkerSpec
from workers.states import WorkerState
from workers.tools.calls import ToolRecord

BEFORE_THE_APP = {"internal": 500, "invalid_parameter": 400, "method_not_allowed": 405}  # codes without a class of ours
CONFIGURATION = REFERENCE / "configuration.md"
JOBS = REFERENCE / "jobs.md"
ERRORS = REFERENCE / "errors.md"
PYTHON = REFERENCE / "python-client.md"
CLASSES = REFERENCE / "python-classes.md"


def classes_below(base: type[ServiceError]) -> list[type[ServiceError]]:
    return [found for each in base.__subclasses__() for found in (each, *classes_below(each))]


def same(listed: Iterable[str], there: Iterable[str]) -> None:
    """Check that nothing is missing, unknown or listed twice."""
    listed = list(listed)
    assert sorted(listed) == sorted(set(listed)), "something is listed twice"
    assert set(listed) == set(there)


def fields_of(model: type) -> list[str]:
    if issubclass(model, BaseModel):
        return [field.alias or name for name, field in model.model_fields.items()]
    if issubclass(model, msgspec.Struct):
        return list(model.__struct_fields__)
    assert dataclasses.is_dataclass(model)
    return [field.name for field in dataclasses.fields(model)]


SHOWN = Config(models={"m": ModelConfig(engine="embedded")})
SECTIONS: dict[str, type] = {
    **{f"`{name}`": type(getattr(SHOWN, name)) for name in Config.model_fields if name != "models"},
    "`models`": ModelConfig,
    **{
        f"`models.NAME.{name}`": type(getattr(SHOWN.models["m"], name))
        for name in ("timeouts", "restart", "tools", "repetition", "bios")
    },
    "`models.NAME.tools.mcp.SERVER`": McpServerConfig,
    "`models.NAME.tools.http`": HttpToolsConfig,
    "`server.keys`": KeyConfig,
}


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_of_the_configuration_is_on_its_page(heading: str) -> None:
    """A missing or unknown key is found in its own section, with its default."""
    model = SECTIONS[heading]
    table = {row[0].strip("`"): row for row in own_rows(CONFIGURATION, heading)}
    same(table, fields_of(model))


def test_a_default_of_the_configuration_is_what_the_page_says() -> None:
    """A number, a word or a switch that changes in the code changes on the page."""
    checked = 0
    for heading, path in [
        *((f"`{name}`", name) for name in Config.model_fields if name != "models"),
        ("`models`", "models.m"),
        *((f"`models.NAME.{name}`", f"models.m.{name}") for name in ("timeouts", "restart", "tools", "bios")),
    ]:
        value: object = SHOWN
        for part in path.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        for row in own_rows(CONFIGURATION, heading):
            default, told = getattr(value, row[0].strip("`")), row[2].strip("`").replace("_", "").replace(",", "")
            if isinstance(default, bool) or default is None:
                assert told in ({True: "true", False: "false", None: "null"}[default], "required"), row
            elif isinstance(default, int | float) and re.fullmatch(r"[\d.]+", told):
                assert float(told) == default, row
                checked += 1
    assert checked > 30


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("Job", JobSpec),
        ("Agents", AgentSpec),
        ("Conversations", ConversationSpec),
        ("Validation", ValidationSpec),
        ("Webhook", WebhookSpec),
    ],
)
def test_every_field_of_a_job_is_on_its_page(heading: str, model: type[BaseModel]) -> None:
    """The page has no other field."""
    same((row[0].strip("`") for row in own_rows(JOBS, heading)), fields_of(model))


@pytest.mark.parametrize(
    ("heading", "states"),
    [("Job states", JobState), ("Conversation states", ConversationState), ("Turn states", TurnState)],
)
def test_every_state_is_on_its_page(
    heading: str, states: type[JobState] | type[ConversationState] | type[TurnState]
) -> None:
    """Callers poll for states."""
    same((row[0].strip("`") for row in own_rows(JOBS, heading)), states)


def test_every_reason_is_on_both_pages() -> None:
    """One page has its meaning and the remedy, the other what ends with it."""
    same((row[0].strip("`") for row in own_rows(ERRORS, "Turn failures")), FailureReason)
    same(names(section(JOBS, "Reasons")), FailureReason)


def test_every_method_and_every_error_of_the_client_is_on_its_page() -> None:
    """With parameters and defaults as they are written in Python."""
    rows_of = {heading: own_rows(PYTHON, heading) for heading in ("Methods", "Errors")}
    listed = [text for row in rows_of["Methods"] for text in re.findall(r"`(\w+\(.*?\))`", row[0])]
    methods = {name: method for name, method in vars(Client).items() if not name.startswith("_") and name != "close"}
    there = {f"{name}{_shown(getattr(Client, name))}" for name in methods if name not in ("url", "ask")}
    same(listed, there | {f"ask{_shown(Client.ask).replace('self, ', '')}"})
    kinds = [each for each in vars(client_errors).values() if isinstance(each, type)]
    errors = {each.__name__ for each in kinds if issubclass(each, RoundhouseError) and each is not RoundhouseError}
    same((row[0].strip("`") for row in rows_of["Errors"]), errors)


def test_every_call_and_every_parameter_of_the_python_classes_is_on_their_page() -> None:
    """With defaults as they are written in Python, and each field of a worker's specification."""
    calls = [text for row in rows(section(CLASSES, "Worker")) for text in re.findall(r"`(\w+\(.*?\))`", row[0])]
    calls += [
        text for row in rows(section(CLASSES, "InferenceEngine")) for text in re.findall(r"`(\w+\(.*?\))`", row[0])
    ]
    there = [
        f"{name}{_shown(method).replace('self, ', '').replace('self', '')}"
        for kind in (Worker, InferenceEngine)
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and not name.startswith("_")
    ]
    same(calls, there)
    attributes = [
        row[0].strip("`")
        for name in ("Worker", "InferenceEngine")
        for row in own_rows(CLASSES, name)
        if len(row) == 2 and re.fullmatch(r"`\w+`", row[0])
    ]
    own = [
        name
        for kind in (Worker, InferenceEngine)
        for name, value in vars(kind).items()
        if isinstance(value, property) and not name.startswith("_")
    ]
    same(attributes, [*own, "lanes"])
    listed = [name for row in own_rows(CLASSES, "Fields of a specification") for name in re.findall(r"`(\w+)`", row[0])]
    same(listed, [each.name for each in dataclasses.fields(WorkerSpec)])
    table = [row for row in own_rows(CLASSES, "InferenceEngine") if "(" not in row[0] and len(row) == 3]
    told = {
        name: default
        for row in table
        for name, default in zip(re.findall(r"`(\w+)`", row[0]), re.findall(r"`(.*?)`", row[1]), strict=True)
    }
    parameters = dict(inspect.signature(InferenceEngine).parameters)
    assert told == {name: repr(each.default).replace("'", '"') for name, each in parameters.items()}


def _shown(function: Callable[..., object]) -> str:
    """Return a function's parameters and their defaults, without types."""
    parameters = inspect.signature(function).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(bare)).replace("'", '"')


def test_every_problem_is_on_its_page_with_its_status() -> None:
    """The code that raises it has the whole answer; callers find every code documented."""
    there = dict(BEFORE_THE_APP)
    for kind in classes_below(ServiceError):
        assert kind.title != ServiceError.title
        there[kind.code] = kind.status
    there |= {answer.code: answer.status for answer in ANSWERS.values()}
    table = {row[0].strip("`"): int(row[1]) for row in own_rows(ERRORS, "Problem codes")}
    assert table == there


def test_every_verdict_and_every_state_of_a_worker_is_on_its_page() -> None:
    """Operators look at them first."""
    same((row[0].strip("`") for row in own_rows(ERRORS, "Verdicts")), Verdict)
    same((row[0].strip("`") for row in own_rows(REFERENCE / "http.md", "Worker states")), WorkerState)


async def test_every_metric_is_on_its_page(tmp_path: Path) -> None:
    """With its type and labels, both ways, as a node exports them."""
    model = {"engine": "attached", "url": "http://127.0.0.1:9"}
    config = Config.model_validate({"models": {"m": model}, "store": {"url": "memory"}})
    spec = WorkerSpec(engine=EngineKind.ATTACHED, name="m", url="http://127.0.0.1:9")
    async with open_node(config, [spec], tmp_path) as node:
        families = list(text_string_to_metric_families(node.metrics.exposition().decode()))
    told = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in families
        if not family.name.endswith("_created")
    }
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8").split("## Labels")[0]
    described = {row[0].strip("`"): row for row in rows(page) if row[0] != "Name"}
    assert {name: row[1] for name, row in described.items()} == told
    for family in families:
        for sample in family.samples:
            name = next((each for each in (family.name, f"{family.name}_total") if each in described), None)
            if name is not None and not sample.name.endswith("_created"):
                same(set(re.findall(r"`(\w+)`", described[name][2])), set(sample.labels) - {"le"})


def test_every_policy_is_on_its_page() -> None:
    """A new policy is described where users choose one."""
    same((row[0].strip("`") for row in own_rows(CONFIGURATION, "Policies")), POLICIES)


def parameters_of(command: Any) -> list[Any]:  # noqa: ANN401 - click's, under the name that Typer bundles it by
    """Return the parameters of a command, and of its commands that help shows."""
    below = [each for each in getattr(command, "commands", {}).values() if not each.hidden]
    return [*command.params, *(parameter for each in below for parameter in parameters_of(each))]


def test_every_command_option_and_variable_is_on_its_page() -> None:
    """The output of --help and the page list the same."""
    page = REFERENCE / "commands.md"
    group = typer.main.get_command(command_line)
    shared = set(names(section(page, "Options of commands that speak to a service")))
    all_variables = {str(each.envvar) for each in group.params if each.envvar}
    assert isinstance(group, Commands)
    context = typer.Context(group, **group.context_settings)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    assert {"serve", "top", "upgrade"} <= set(commands)
    for name, command in commands.items():
        assert command is not None
        parameters = parameters_of(command)
        options = {option for each in parameters for option in each.opts if option.startswith("--")}
        listed = {each.split()[0].rstrip(",") for each in names(section(page, f"`roundhouse {name}`"))}
        own = {each for each in listed if each.startswith("--")}
        known = own | {each.split()[0] for each in shared if each.startswith("--")}
        assert options - {"--help"} <= known, name
        assert own - {"--"} <= options, name  # words for other programs stand after it
        all_variables |= {str(each.envvar) for each in parameters if each.envvar}
    read_by_name = {"ROUNDHOUSE_API_KEYS", "ROUNDHOUSE_STORE_URL", "ROUNDHOUSE_PROGRAM"}
    same(names(section(page, "Environment variables")), all_variables | read_by_name)


def test_every_exit_code_is_on_its_page() -> None:
    """Scripts depend on them."""
    same((row[0].strip("`") for row in own_rows(REFERENCE / "commands.md", "Exit codes")), (str(int(e)) for e in Exit))


ANSWERS_BY_HEADING: dict[tuple[str, str], type] = {
    ("http.md", "A job"): jobs.Job,
    ("http.md", "A delivery"): jobs.Delivery,
    ("http.md", "Pools"): workers.Pools,
    ("http.md", "Heads"): node.WaitingTurn,
    ("http.md", "A turn that speaks"): node.SpeakingTurn,
    ("http.md", "A timeline"): Timeline,
    ("http.md", "An attempt on a timeline"): Span,
    ("http.md", "Tool servers"): node.ToolServer,
    ("http.md", "A worker"): workers.Worker,
    ("http.md", "Exits"): workers.EngineExit,
    ("http.md", "Requests"): workers.WorkerRequest,
    ("http.md", "An incident"): workers.Incident,
    ("http.md", "An adapter"): models.Adapter,
    ("http.md", "A group"): models.TrainerGroup,
    ("http.md", "An update"): models.WeightUpdate,
    ("jobs.md", "A turn"): transcripts.Turn,
    ("jobs.md", "An attempt"): transcripts.Attempt,
    ("http.md", "A prompt"): transcripts.AskedPrompt,
    ("http.md", "Usage"): node.UsageReport,
    ("jobs.md", "A tool call"): ToolRecord,
    ("errors.md", "Problem documents"): Problem,
}


@pytest.mark.parametrize(("page", "heading"), ANSWERS_BY_HEADING)
def test_every_field_of_an_answer_is_under_its_heading(page: str, heading: str) -> None:
    """A field that is added, renamed or removed changes where callers look it up."""
    table = own_rows(REFERENCE / page, heading)
    told = {re.split(r"[.\[]", name)[0] for row in table for name in re.findall(r"`([^`]+)`", row[0])}
    assert told == set(fields_of(ANSWERS_BY_HEADING[page, heading]))


def test_every_event_is_on_its_page() -> None:
    """Those that the store writes, and those that only the stream has."""
    writes = "".join(map(inspect.getsource, (conversation_rows, event_rows)))
    stored = re.findall(r'_event\(events, (?:[\w.]+, )?"(\w+)"', writes)
    streamed = re.findall(r"b\"event: (\w+)", inspect.getsource(events))
    page = (REFERENCE / "events.md").read_text(encoding="utf-8")
    assert len(set(stored)) == 4
    same(re.findall(r"^### `(\w+)`$", page, re.MULTILINE), {*stored, *streamed})
    same((row[0].split("`")[1] for row in own_rows(REFERENCE / "events.md", "The stream")), {*stored, *streamed})
