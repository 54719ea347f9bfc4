"""The HTTP API of sessions: opened, read, rewarded and deleted; their requests come to the front door."""

from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, ValidationError

from roundhouse_client.values.rollout_rows import OpenSession, StoredReward
from service.api.body import body_of, read_document
from service.api.door.access import CallerNow
from service.api.door.session_urls import SESSIONS
from service.api.errors.problems import refused
from service.api.routes.rollouts import NDJSON, SessionRewardSent
from service.conversations.document.job_faults import JobRules
from service.conversations.document.limits import Limits
from service.conversations.document.spec import Name, RecordSpec
from service.conversations.record.rollout import Reward
from service.conversations.record.session import AGENT, CONVERSATION, Session, SessionWanted
from service.errors import Fault, RewardInvalid, SessionInvalid
from service.formats.faults import StrictModel, faults_of, unknown
from service.node.rollouts import RolloutForm
from service.node.sessions import Sessions
from service.store.session_rows import SessionCounts
from transport.request import TokenDetail

TTL_S: Final = 86_400.0
MOST_TTL_S: Final = 31_536_000.0  # a year


class SessionSent(StrictModel):
    """A session that is to be opened."""

    model: Name | None = None
    record: RecordSpec
    max_staleness: int | None = Field(default=None, ge=0, strict=True)
    ttl_s: float = Field(default=TTL_S, gt=0, le=MOST_TTL_S, strict=True)


SESSION_BODIES: Final = (SessionSent, SessionRewardSent)


def sessions_router(sessions: Sessions, rules: Callable[[], JobRules], limits: Limits) -> APIRouter:
    """Return the routes of sessions; another key's session is a 404. ``rules`` returns those in force."""
    router = APIRouter(prefix="/v1/sessions", tags=["rollouts"])

    @router.post(
        "",
        status_code=201,
        response_model=OpenSession,
        summary="Open a session: a base URL whose requests are recorded",
        responses=refused(400, 401, 413, 422, 429, 503),
        openapi_extra=body_of(SessionSent),
    )
    async def open_session(request: Request, caller: CallerNow) -> Response:
        document = await read_document(request, limits)
        try:
            sent = SessionSent.model_validate(document)
        except ValidationError as error:
            raise SessionInvalid(faults_of(error, SessionSent)) from error
        if (fault := _fault_of(sent, rules())) is not None:
            raise SessionInvalid([fault])
        wanted = SessionWanted(
            model=sent.model,
            records=TokenDetail.LOGPROBS if sent.record.logprobs else TokenDetail.IDS,
            max_staleness=sent.max_staleness,
            ttl_s=sent.ttl_s,
        )
        session = await sessions.open_session(wanted, caller.name)
        shown = _shown(request, session, SessionCounts(exchanges=0, uncertain=0, reward=None))
        headers = {"Location": f"/v1/sessions/{session.id}"}
        return Response(msgspec.json.encode(shown), 201, headers, media_type="application/json")

    @router.get("/{session_id}", summary="Look at a session", responses=refused(400, 401, 404))
    async def get_session(session_id: str, request: Request, caller: CallerNow) -> OpenSession:
        session = await sessions.find_seen(session_id, caller)
        return _shown(request, session, await sessions.count(session))

    @router.delete("/{session_id}", status_code=204, summary="Delete a session", responses=refused(400, 401, 404, 503))
    async def delete_session(session_id: str, caller: CallerNow) -> None:
        await sessions.delete(await sessions.find_seen(session_id, caller))

    @router.get(
        "/{session_id}/rollouts",
        summary="Read the recorded tokens of a session so far",
        response_class=Response,
        responses={
            200: {"content": {NDJSON: {"schema": {"$ref": "#/components/schemas/RolloutRow"}}}},
            **refused(400, 401, 404),
        },
    )
    async def get_rollouts(
        session_id: str,
        caller: CallerNow,
        form: RolloutForm = RolloutForm.ROWS,
        partial: Annotated[bool, Query(description="true: also rows whose record is not whole")] = False,
    ) -> Response:
        session = await sessions.find_seen(session_id, caller)
        lines = await sessions.lines(session, form, is_partial=partial)
        return Response(b"".join(lines), media_type=NDJSON)

    @router.post(
        "/{session_id}/reward",
        status_code=201,
        response_model=StoredReward,
        summary="Give a session its reward",
        description="201 when it is durable, 200 if the same reward is there already.",
        responses={200: {"model": StoredReward}, **refused(400, 401, 404, 409, 413, 422, 503)},
        openapi_extra=body_of(SessionRewardSent),
    )
    async def post_reward(session_id: str, request: Request, caller: CallerNow) -> Response:
        document = await read_document(request, limits)
        try:
            sent = SessionRewardSent.model_validate(document)
        except ValidationError as error:
            raise RewardInvalid(faults_of(error, SessionRewardSent)) from error
        session = await sessions.find_seen(session_id, caller)
        is_new = await sessions.put_reward(session, Reward(reward=sent.reward, metrics=dict(sent.metrics)))
        stored = StoredReward(conversation=CONVERSATION, agent=AGENT, reward=sent.reward, metrics=dict(sent.metrics))
        content = msgspec.json.encode(stored)
        return Response(content, 201 if is_new else 200, media_type="application/json")

    return router


def _fault_of(sent: SessionSent, rules: JobRules) -> Fault | None:
    if not sent.record.tokens:
        return Fault(path="record.tokens", message="a session records tokens: give true")
    if sent.model is None:
        return None
    if sent.model not in (*rules.models, *rules.adapters):
        return Fault(path="model", message=unknown("model", sent.model, (*rules.models, *rules.adapters)))
    why = rules.unable.get(rules.adapters.get(sent.model, sent.model))
    return None if why is None else Fault(path="record", message=f"{sent.model!r} cannot be recorded: {why}")


def _shown(request: Request, session: Session, counts: SessionCounts) -> OpenSession:
    reward = counts.reward or Reward()
    return OpenSession(
        id=session.id,
        url=f"{str(request.base_url).rstrip('/')}{SESSIONS}{session.id}/v1",
        model=session.model,
        record={"tokens": True, "logprobs": session.records is TokenDetail.LOGPROBS},
        max_staleness=session.max_staleness,
        ttl_s=session.ttl_s,
        created_at=session.created_at,
        expires_at=session.expires_at,
        exchanges=counts.exchanges,
        uncertain=counts.uncertain,
        reward=reward.reward,
        metrics=reward.metrics,
    )
