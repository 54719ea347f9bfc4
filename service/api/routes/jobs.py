"""The HTTP API of jobs."""

from functools import partial
from typing import Annotated, Final, Literal

import anyio
import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.responses import StreamingResponse

from roundhouse_client.values import jobs as values
from roundhouse_client.values import transcripts
from service.api.body import YAML, decode_soon, read_body, with_lines, yaml_as_json
from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.api.routes.batch import MEDIA_TYPE as NDJSON
from service.api.routes.batch import is_batch, post_batch
from service.api.routes.events import follow
from service.conversations.document.limits import Limits
from service.conversations.job.job import JobId, TurnKey, TurnKind
from service.conversations.job.states import ENDED_TURNS, ConversationState, JobState, TurnState
from service.errors import InvalidJob, InvalidParameter
from service.formats.result_form import ResultForm
from service.node.job_door import JobDoor
from service.node.jobs import Jobs, JobView
from service.node.prompt_history import AskedPrompt, PromptHistory
from service.node.results import result_pieces, spread
from service.store.records import GivenUp
from transport.dialects.openai import message_document

CSV: Final = "text/csv"
WHOLE_AT_ONCE: Final = 4  # documents and prompts, of many megabytes maybe, that are built at once
MAX_KEY_LENGTH: Final = 255
MOST_WAIT_S: Final = 60.0
MOST_TURNS: Final = 2**31
MAX_DIGITS: Final = 18  # within 64 bits
CURSOR: Final = f"^[0-9]{{1,{MAX_DIGITS}}}$"
JSON: Final = "application/json"
MEDIA_TYPES: Final = {ResultForm.JSON: JSON, ResultForm.JSONL: NDJSON, ResultForm.CSV: CSV}
BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": {"$ref": "#/components/schemas/JobSpec"}} for kind in (JSON, NDJSON, YAML)},
    }
}


def jobs_router(jobs: Jobs, door: JobDoor, limits: Limits) -> APIRouter:
    """Return the routes of all jobs."""
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
    _add_posting(router, jobs, door, limits)
    _add_listing(router, jobs)
    return router


def job_router(jobs: Jobs, prompts: PromptHistory) -> APIRouter:
    """Return the routes of one job; another key's is a 404."""

    async def check_seen(job_id: str, caller: CallerNow) -> None:
        await jobs.check_seen(JobId(job_id), caller)

    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"], dependencies=[Depends(check_seen)])
    _add_looking(router, jobs)
    _add_reading(router, jobs, prompts)
    _add_ending(router, jobs)
    return router


def _add_posting(router: APIRouter, jobs: Jobs, door: JobDoor, limits: Limits) -> None:
    @router.post(
        "",
        status_code=202,
        response_model=values.Job,
        openapi_extra=BODY,
        summary="Post a job",
        responses={
            200: {
                "model": values.Job,
                "description": "The job posted before with this Idempotency-Key and body; for a batch, a line per job",
                "content": {NDJSON: {"schema": {"$ref": "#/components/schemas/BatchLine"}}},
            },
            **refused(400, 401, 409, 413, 422, 429, 503),
        },
    )
    async def post_job(
        request: Request,
        caller: CallerNow,
        idempotency_key: Annotated[
            str | None, Header(json_schema_extra={"minLength": 1, "maxLength": MAX_KEY_LENGTH})
        ] = None,
        queue: Annotated[bool, Query(description="false: refuse with 429 unless every first turn starts now")] = True,
    ) -> Response:
        if idempotency_key is not None and not 0 < len(idempotency_key) <= MAX_KEY_LENGTH:
            raise InvalidParameter(f"Idempotency-Key: 1 to {MAX_KEY_LENGTH} characters, not {len(idempotency_key)}")
        if is_batch(request):
            decode = partial(decode_soon, limits=limits, handle=partial(door.large.handle, caller))
            post = partial(door.post, queue=queue, caller=caller)
            return await post_batch(request, decode, post, limits, idempotency_key)
        posted = content = await read_body(request, limits)
        is_yaml = request.headers.get("content-type", "").partition(";")[0].strip().lower() == YAML
        if is_yaml:
            content = await yaml_as_json(content, limits)
        document = await decode_soon(content, limits, partial(door.large.handle, caller))
        try:
            stored, is_new = await door.post(document, idempotency_key, queue=queue, size=len(content), caller=caller)
        except InvalidJob as refusal:
            raise await with_lines(refusal, posted) from refusal
        body = shown_job(jobs.view_of_new(stored) if is_new else await jobs.get(stored.id))
        location = {"Location": f"/v1/jobs/{stored.id}"}
        return _json(body, status=202 if is_new else 200, headers=location)


def _add_listing(router: APIRouter, jobs: Jobs) -> None:
    @router.get("", response_model=values.JobPage, summary="List jobs, the newest first", responses=refused(400, 401))
    async def list_jobs(
        caller: CallerNow,
        state: JobState | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        cursor: Annotated[
            str | None, Query(description="next_cursor of the previous page", json_schema_extra={"pattern": CURSOR})
        ] = None,
    ) -> Response:
        if cursor is not None and not _is_number(cursor):
            raise InvalidParameter("cursor: not a cursor of this service; use next_cursor of the previous page")
        views = await jobs.page(state, limit, int(cursor) if cursor else None, caller)
        more = str(views[-1].stored.number) if len(views) == limit else None
        return _json(values.JobPage(jobs=tuple(map(shown_job, views)), next_cursor=more))


def _add_looking(router: APIRouter, jobs: Jobs) -> None:
    @router.get("", response_model=values.Job, summary="Read a job", responses=refused(400, 401, 404))
    async def get_job(
        job_id: str,
        wait_s: Annotated[float, Query(ge=0, le=MOST_WAIT_S, description="wait up to this long for its end")] = 0.0,
    ) -> Response:
        if wait_s:
            await jobs.wait_ended(JobId(job_id), wait_s)
        return _json(shown_job(await jobs.get(JobId(job_id))))

    @router.get(
        "/events",
        summary="Follow a job as server-sent events",
        response_class=StreamingResponse,
        responses={
            200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
            **refused(400, 401, 404),
        },
    )
    async def get_events(
        job_id: str,
        last_event_id: Annotated[str, Header(json_schema_extra={"pattern": f"^[0-9]{{0,{MAX_DIGITS}}}$"})] = "",
    ) -> Response:
        if last_event_id and not _is_number(last_event_id):
            raise InvalidParameter("Last-Event-ID: not an event's id; send the id of the last event that you read")
        return await follow(jobs, JobId(job_id), int(last_event_id or 0))


def _add_reading(router: APIRouter, jobs: Jobs, prompts: PromptHistory) -> None:
    few = anyio.CapacityLimiter(WHOLE_AT_ONCE)

    @router.get("/document", summary="Read the job as it was posted", responses=refused(400, 401, 404, 503))
    async def get_document(
        job_id: str,
        conversations: Annotated[
            Literal["all", "none"] | ConversationState, Query(description="all, none, or those in one state")
        ] = "all",
    ) -> Response:
        async with few:
            return Response(await jobs.document(JobId(job_id), conversations), media_type=JSON)

    @router.get(
        "/result",
        response_model=transcripts.Result,
        summary="Read all transcripts",
        responses={
            200: {"content": {kind: {"schema": {"type": "string"}} for kind in (NDJSON, CSV)}},
            **refused(400, 401, 404, 409),
        },
    )
    async def get_result(job_id: str, format: ResultForm = ResultForm.JSON) -> Response:  # noqa: A002 - the specification's
        stored = await jobs.ended(JobId(job_id))
        return StreamingResponse(result_pieces(jobs, stored, format), media_type=MEDIA_TYPES[format])

    @router.get(
        "/conversations/{conversation_id}",
        response_model=transcripts.Transcript,
        summary="Read one transcript, as far as it is",
        responses=refused(400, 401, 404),
    )
    async def get_conversation(
        job_id: str,
        conversation_id: str,
        after: Annotated[int, Query(ge=0, le=MOST_TURNS, description="leave out the first N ended turns")] = 0,
    ) -> Response:
        pieces = await jobs.transcript_json(JobId(job_id), conversation_id, after)
        return StreamingResponse(spread(pieces), media_type=JSON)

    @router.get(
        "/conversations/{conversation_id}/turns/{agent}/{round_number}/prompt",
        response_model=transcripts.AskedPrompts,
        summary="Read the prompt of a turn as it was sent",
        responses=refused(400, 401, 404),
    )
    async def get_prompt(
        job_id: str,
        conversation_id: str,
        agent: str,
        round_number: int,
        kind: Annotated[TurnKind, Query(description="summary: of what left the memory window")] = TurnKind.TURN,
    ) -> Response:
        async with few:
            asked = await prompts.of_turn(TurnKey(JobId(job_id), conversation_id, agent, round_number), kind)
            return _json(transcripts.AskedPrompts(attempts=tuple(map(_shown_prompt, asked))))

    @router.get(
        "/deliveries",
        response_model=values.Deliveries,
        summary="See the deliveries of the job's webhook",
        responses=refused(401, 404),
    )
    async def get_deliveries(job_id: str) -> Response:
        return _json({"deliveries": await jobs.deliveries(JobId(job_id))})


def _add_ending(router: APIRouter, jobs: Jobs) -> None:
    @router.post(
        "/cancel",
        status_code=202,
        response_model=values.Job,
        summary="End a job early",
        responses=refused(401, 404),
    )
    async def cancel_job(job_id: str) -> Response:
        await jobs.cancel(JobId(job_id))
        return _json(shown_job(await jobs.get(JobId(job_id))), status=202)

    @router.delete(
        "",
        status_code=204,
        summary="Delete everything stored about an ended job",
        responses=refused(401, 404, 409),
    )
    async def delete_job(
        job_id: str,
        heirs: Annotated[
            Literal["keep", "drop"], Query(description="drop: also the jobs that inherit from it")
        ] = "keep",
    ) -> Response:
        await jobs.delete(JobId(job_id), with_heirs=heirs == "drop")
        return Response(status_code=204)


def _shown_prompt(prompt: AskedPrompt) -> transcripts.AskedPrompt:
    """Return an attempt's prompt as callers see it, with the messages that the engine got."""
    messages = prompt.messages
    return transcripts.AskedPrompt(
        messages=None if messages is None else tuple(map(message_document, messages)),
        params=prompt.params,
        tools=tuple(prompt.tools),
    )


def shown_job(view: JobView) -> values.Job:
    """Return a job as callers see it."""
    stored, by_state = view.stored, view.tally.conversations
    return values.Job(
        id=stored.id,
        name=stored.name,
        state=stored.state,
        created_at=stored.created_at,
        started_at=stored.started_at,
        finished_at=stored.finished_at,
        progress=values.JobProgress(
            conversations=values.ConversationCounts(
                total=stored.total_conversations,
                completed=by_state.get(ConversationState.COMPLETED, 0),
                failed=by_state.get(ConversationState.FAILED, 0),
                cancelled=by_state.get(ConversationState.CANCELLED, 0),
            ),
            turns=_turn_counts(view),
        ),
        key=stored.owner,
        waits_for=tuple(view.waits_for),
        given_up=tuple(map(_shown_given_up, view.tally.given_up)),
        metadata=stored.metadata,
        is_metadata_cut=stored.is_metadata_cut,
    )


def _shown_given_up(given_up: GivenUp) -> transcripts.GivenUp:
    key = given_up.key
    since = transcripts.TurnPlace(conversation=key.conversation_id, agent=key.agent_id, round=key.round)
    return transcripts.GivenUp(path=given_up.path, pattern=given_up.pattern, since=since)


def _turn_counts(view: JobView) -> values.TurnCounts:
    turns, total = view.tally.turns, view.stored.total_turns
    ended = sum(turns.get(state, 0) for state in ENDED_TURNS)
    return values.TurnCounts(
        total=total,
        pending=max(0, total - ended - view.ready - view.in_flight - view.tally.awaited),
        awaited=view.tally.awaited,
        ready=view.ready,
        in_flight=view.in_flight,
        completed=turns.get(TurnState.COMPLETED, 0),
        failed=turns.get(TurnState.FAILED, 0),
        cancelled=turns.get(TurnState.CANCELLED, 0),
    )


def _is_number(text: str) -> bool:
    """Whether a text is a number that the store can hold."""
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def _json(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(document), status_code=status, media_type=JSON, headers=headers)
