"""The HTTP API of turns that callers speak."""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ValidationError

from roundhouse_client.values.transcripts import AwaitedTurn, AwaitedTurns, Turn
from service.api.body import body_of, read_document
from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.conversations.document.limits import Limits
from service.conversations.job.job import JobId, TurnKey
from service.conversations.record.transcript import turn_document
from service.errors import InvalidWords
from service.formats.faults import StrictModel, faults_of
from service.node.callers_turns import CallersTurns
from service.node.jobs import Jobs
from service.store.awaited_turns import OpenTurn, Which

MOST_LISTED: Final = 1000
MOST_ROUND: Final = 2**31 - 1
JSON: Final = "application/json"
Limit = Annotated[int, Query(ge=1, le=MOST_LISTED)]
After = Annotated[int, Query(ge=0, le=MOST_ROUND, description="leave out the first N")]


class WordsSpec(StrictModel):
    """The words of a caller in one turn."""

    text: str


CALLERS_BODIES: Final = (WordsSpec,)


def callers_turns_router(jobs: Jobs, callers: CallersTurns, limits: Limits) -> APIRouter:
    """Return the routes of turns that callers speak; another key's job is a 404."""

    async def check_seen(job_id: str, caller: CallerNow) -> None:
        await jobs.check_seen(JobId(job_id), caller)

    router = APIRouter(tags=["jobs"])

    @router.get(
        "/v1/awaited",
        response_model=AwaitedTurns,
        summary="List the turns that wait for a caller, the oldest first",
        responses=refused(400, 401),
    )
    async def list_awaited(caller: CallerNow, limit: Limit = 100, after: After = 0) -> Response:
        which = Which(owner=caller.owner)
        return _listed(await callers.listed(which, after, limit))

    @router.get(
        "/v1/jobs/{job_id}/awaited",
        response_model=AwaitedTurns,
        summary="List the turns of a job that wait for a caller, the oldest first",
        responses=refused(400, 401, 404),
        dependencies=[Depends(check_seen)],
    )
    async def list_awaited_of_job(
        job_id: str,
        conversation: Annotated[str | None, Query(description="only of this conversation")] = None,
        limit: Limit = 100,
        after: After = 0,
    ) -> Response:
        which = Which(job_id=JobId(job_id), conversation_id=conversation)
        return _listed(await callers.listed(which, after, limit))

    @router.post(
        "/v1/jobs/{job_id}/conversations/{conversation_id}/turns/{agent}/{round_number}",
        status_code=201,
        response_model=Turn,
        summary="Speak a turn that waits for a caller",
        description="201 when the words are durable, 200 if the same words were said before.",
        responses={200: {"model": Turn}, **refused(400, 401, 404, 409, 413, 422, 503)},
        openapi_extra=body_of(WordsSpec),
        dependencies=[Depends(check_seen)],
    )
    async def say(
        job_id: str, conversation_id: str, agent: str, round_number: int, request: Request, caller: CallerNow
    ) -> Response:
        document = await read_document(request, limits)
        try:
            words = WordsSpec.model_validate(document)
        except ValidationError as error:
            raise InvalidWords("; ".join(map(str, faults_of(error, WordsSpec)))) from error
        place = TurnKey(JobId(job_id), conversation_id, agent, max(-1, min(round_number, MOST_ROUND)))
        turn, is_new = await callers.say(place, words.text, caller.name)
        return _json(turn_document(turn), status=201 if is_new else 200)

    return router


def _listed(turns: list[OpenTurn]) -> Response:
    return _json(
        AwaitedTurns(
            awaited=tuple(
                AwaitedTurn(
                    job=turn.key.job_id,
                    conversation=turn.key.conversation_id,
                    agent=turn.key.agent_id,
                    round=turn.key.round,
                    since=turn.since_at,
                    until=turn.until_at,
                )
                for turn in turns
            )
        )
    )


def _json(document: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status_code=status, media_type=JSON)
