"""The HTTP API of rollouts: rows of recorded tokens, and their rewards."""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field, ValidationError
from starlette.responses import StreamingResponse

from roundhouse_client.values.rollout_rows import StoredReward
from service.api.body import body_of, read_document
from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.conversations.document.limits import Limits
from service.conversations.document.spec import Identifier, Name
from service.conversations.job.job import JobId
from service.conversations.record.rollout import Reward
from service.errors import RewardInvalid
from service.formats.faults import StrictModel, faults_of
from service.node.jobs import Jobs
from service.node.rollouts import RolloutForm, Rollouts, RolloutsWanted

NDJSON: Final = "application/x-ndjson"
MOST_NUMBER: Final = 2**53
MOST_WAIT_S: Final = 86_400.0
MOST_METRICS: Final = 100


class SessionRewardSent(StrictModel):
    """The reward of a session."""

    reward: float = Field(strict=True)
    metrics: dict[Annotated[str, Field(max_length=128)], Annotated[float, Field(strict=True)]] = Field(
        default_factory=dict, max_length=MOST_METRICS
    )


class RewardSent(SessionRewardSent):
    """The reward of a conversation, or of one agent in it."""

    conversation: Name
    agent: Identifier | None = None


ROLLOUT_BODIES: Final = (RewardSent,)


def rollouts_router(jobs: Jobs, rollouts: Rollouts, limits: Limits) -> APIRouter:
    """Return the routes of rollouts; another key's job is a 404."""

    async def check_seen(job_id: str, caller: CallerNow) -> None:
        await jobs.check_seen(JobId(job_id), caller)

    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["rollouts"], dependencies=[Depends(check_seen)])

    @router.get(
        "/rollouts",
        summary="Read the recorded tokens of a job, each conversation's once it has ended",
        response_class=StreamingResponse,
        responses={
            200: {"content": {NDJSON: {"schema": {"$ref": "#/components/schemas/RolloutRow"}}}},
            **refused(400, 401, 404, 409),
        },
    )
    async def get_rollouts(
        job_id: str,
        form: RolloutForm = RolloutForm.ROWS,
        after: Annotated[int, Query(ge=0, le=MOST_NUMBER, description="leave out rows up to this number")] = 0,
        partial: Annotated[bool, Query(description="true: also rows whose record is not whole")] = False,
        wait_s: Annotated[
            float | None,
            Query(ge=0, le=MOST_WAIT_S, description="end after this long; else with the job"),
        ] = None,
    ) -> Response:
        posted = await rollouts.check_recorded(JobId(job_id))
        wanted = RolloutsWanted(form=form, after=after, partial=partial, wait_s=wait_s)
        return StreamingResponse(rollouts.lines(JobId(job_id), posted, wanted), media_type=NDJSON)

    @router.post(
        "/rewards",
        status_code=201,
        response_model=StoredReward,
        summary="Give a conversation, or an agent in it, its reward",
        description="201 when it is durable, 200 if the same reward is there already.",
        responses={200: {"model": StoredReward}, **refused(400, 401, 404, 409, 413, 422, 503)},
        openapi_extra=body_of(RewardSent),
    )
    async def post_reward(job_id: str, request: Request) -> Response:
        document = await read_document(request, limits)
        try:
            sent = RewardSent.model_validate(document)
        except ValidationError as error:
            raise RewardInvalid(faults_of(error, RewardSent)) from error
        reward = Reward(reward=sent.reward, metrics=dict(sent.metrics))
        is_new = await rollouts.put_reward(JobId(job_id), sent.conversation, sent.agent, reward)
        stored = StoredReward(
            conversation=sent.conversation, agent=sent.agent, reward=sent.reward, metrics=dict(sent.metrics)
        )
        content = msgspec.json.encode(stored)
        return Response(content, status_code=201 if is_new else 200, media_type="application/json")

    return router
