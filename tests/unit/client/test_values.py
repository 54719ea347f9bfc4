"""The client's values against the service's own schemas, and what becomes of answers of other versions."""

from datetime import UTC, datetime
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel

from roundhouse_client.decoding import decode, parse
from roundhouse_client.errors import AnswerMalformed
from roundhouse_client.values import events, job_document, jobs, models, node, transcripts, workers
from roundhouse_client.values.value import Value
from service.api import schemas
from service.api.routes import adapters, configuration, overview, tools, upgrades, usage, weights_schemas
from service.api.routes import status as status_schemas
from service.conversations import spec
from service.conversations.transcript import TokenUsage
from service.node import speaking, status
from tests.unit.client.answers import JOB, LINE
from workers.health import incident, probes
from workers.policy import pace

PAIRS: list[tuple[type[Value], type]] = [
    (jobs.Job, schemas.JobOut),
    (jobs.JobProgress, schemas.ProgressOut),
    (jobs.ConversationCounts, schemas.ConversationCounts),
    (jobs.TurnCounts, schemas.TurnCounts),
    (jobs.JobPage, schemas.JobList),
    (jobs.BatchLine, schemas.BatchLine),
    (jobs.LineFault, schemas.ProblemFault),
    (jobs.Delivery, schemas.DeliveryOut),
    (jobs.Deliveries, schemas.DeliveryList),
    (transcripts.Transcript, schemas.TranscriptOut),
    (transcripts.Turn, schemas.TurnOut),
    (transcripts.Attempt, schemas.AttemptOut),
    (transcripts.TokenUsage, TokenUsage),
    (transcripts.AskedPrompt, schemas.PromptOut),
    (transcripts.AskedPrompts, schemas.PromptsOut),
    (workers.Worker, schemas.WorkerOut),
    (workers.Workers, schemas.WorkerList),
    (workers.Slots, schemas.SlotsOut),
    (workers.EngineExit, schemas.ExitOut),
    (workers.WorkerRequest, incident.RequestView),
    (workers.Evidence, incident.Evidence),
    (workers.Pace, schemas.PaceOut),
    (workers.Spread, pace.Spread),
    (workers.KvCache, schemas.KvOut),
    (workers.WorkerLog, schemas.LogsOut),
    (workers.LogLine, schemas.LogLineOut),
    (workers.Incidents, schemas.IncidentsOut),
    (workers.Incident, schemas.IncidentOut),
    (workers.ProcessTree, probes.KernelView),
    (workers.Process, probes.ProcessView),
    (workers.MemoryAtIncident, schemas.MemoryAtIncident),
    (workers.Pools, status.Pools),
    (node.Status, status_schemas.StatusOut),
    (node.Configuration, configuration.ConfigurationOut),
    (node.ReloadFailure, configuration.ReloadFailureOut),
    (node.Reload, configuration.ReloadOut),
    (node.ConversationsSoFar, status.ConversationsSoFar),
    (node.PrefixTokens, status.PrefixTokens),
    (node.PoolHeads, status_schemas.HeadsOut),
    (node.WaitingTurn, status.Head),
    (node.StoreStatus, status_schemas.StoreOut),
    (node.Speaking, overview.SpeakingOut),
    (node.SpeakingTurn, speaking.SpeakingTurn),
    (node.ToolServer, schemas.ToolServerOut),
    (node.Lane, schemas.LaneOut),
    (node.Lanes, schemas.LaneList),
    (node.DeviceMemory, schemas.DeviceMemoryOut),
    (node.UsageReport, usage.UsageOut),
    (node.UsageLine, usage.UsageRow),
    (node.ServiceProgram, upgrades.UpgradeOut),
    (node.UpgradeEnd, upgrades.UpgradeEndOut),
    (node.AgreedUpgrade, upgrades.UpgradeAgreedOut),
    (node.Health, schemas.HealthOut),
    (node.Readiness, schemas.ReadyOut),
    (models.Tools, tools.ToolsOut),
    (models.Tool, tools.ToolOut),
    (models.McpServer, tools.ServerOut),
    (models.Adapters, adapters.AdaptersOut),
    (models.Adapter, adapters.AdapterOut),
    (models.Weights, weights_schemas.WeightsOut),
    (models.WeightUpdate, weights_schemas.UpdateOut),
    (models.UpdateShare, weights_schemas.ShareOut),
    (models.TrainerGroup, weights_schemas.GroupOut),
    (models.GroupMember, weights_schemas.MemberOut),
    (models.WorkerWeights, weights_schemas.WorkerWeightsOut),
]
MODULES = (events, jobs, models, node, transcripts, workers)


def fields_of(kind: type) -> set[str]:
    if issubclass(kind, BaseModel):
        return set(kind.model_fields)
    return {name for name in get_type_hints(kind) if name != "document"}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda kind: kind.__name__)
def test_a_value_has_the_fields_that_the_service_answers(ours: type[Value], theirs: type) -> None:
    """A field that is added there is added here, and none is made up."""
    assert fields_of(ours) == fields_of(theirs)


def test_every_value_stands_beside_its_schema() -> None:
    """A value that is compared with nothing could drift; those of events are compared with a real stream."""
    listed = {ours for ours, _ in PAIRS}
    there = {
        each
        for module in MODULES
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Value) and each.__module__ == module.__name__
    }
    assert {each for each in there if each.__module__ != events.__name__} == listed


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (job_document.JobDocument, spec.JobSpec),
        (job_document.AgentDocument, spec.AgentSpec),
        (job_document.ConversationDocument, spec.ConversationSpec),
        (job_document.ValidationDocument, spec.ValidationSpec),
        (job_document.PromptsDocument, spec.PromptsSpec),
        (job_document.WebhookDocument, spec.WebhookSpec),
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_job_that_is_posted_has_the_fields_that_the_service_takes(ours: type, theirs: type[BaseModel]) -> None:
    """And requires those that the service requires."""
    assert set(get_type_hints(ours)) == set(theirs.model_fields)
    required = {name for name, field in theirs.model_fields.items() if field.is_required()}
    assert getattr(ours, "__required_keys__") == required  # noqa: B009 - of a TypedDict, which type does not know


def test_a_job_is_read_with_its_types() -> None:
    """Times are times, nested objects are values."""
    job = decode(jobs.Job, JOB)
    assert job.created_at == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert (job.started_at, job.progress.turns.total, job.metadata) == (None, 2, {"mine": [1]})
    assert not job.has_ended


def test_a_field_of_a_newer_service_is_passed_over_and_kept() -> None:
    """Unknown fields never break an older client; its caller may still look."""
    newer = {**JOB, "mood": "good", "progress": {**JOB["progress"], "share": 0.5}}
    job = decode(jobs.Job, newer)
    assert job == decode(jobs.Job, JOB)
    assert (job.document["mood"], job.progress.document["share"]) == ("good", 0.5)


def test_a_state_of_a_newer_service_is_an_end() -> None:
    """States are words; all but those of a job that goes on are ends."""
    assert decode(jobs.Job, {**JOB, "state": "archived"}).has_ended


def without(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != name}


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (without(JOB, "name"), "Job.name: missing"),
        ({**JOB, "name": 1}, "Job.name: of another type"),
        ({**JOB, "created_at": "soon"}, "Job.created_at: not a time"),
        ({**JOB, "metadata": []}, "Job.metadata: not an object"),
        ({**JOB, "progress": {**JOB["progress"], "turns": 3}}, "Job.progress.turns: not an object"),
        ({**JOB, "is_metadata_cut": 1}, "Job.is_metadata_cut: of another type"),
        ([], "Job: not an object"),
    ],
)
def test_an_answer_that_cannot_be_used_names_its_place(document: object, told: str) -> None:
    """Said once, where it comes in, and not as a KeyError in the caller's code."""
    with pytest.raises(AnswerMalformed, match=f"^{told}$"):
        decode(jobs.Job, document)


def test_places_in_lists_are_named() -> None:
    """By their number; and a truth value is no number."""
    with pytest.raises(AnswerMalformed, match=r"^WorkerLog.lines\[1\].number: of another type$"):
        log = {"id": "m-0", "incarnation": 1, "lines": [LINE, {**LINE, "number": True}]}
        decode(workers.WorkerLog, log)


def test_what_may_be_none_may_be_missing() -> None:
    """An older service does not know it yet."""
    assert decode(jobs.Job, without(JOB, "finished_at")).finished_at is None


def test_what_is_not_json_is_no_answer() -> None:
    """A page of a proxy, say."""
    with pytest.raises(AnswerMalformed, match="not JSON: b'<html>'"):
        parse(b"<html>")
