"""Requests that an earlier program of this process has taken, and has not answered whole."""

from functools import partial
from typing import Final

import msgspec

from service.api.openai.answer import RelayedAnswer
from service.api.openai.session_requests import SessionRecorder
from service.conversations.job.job import JobId
from service.errors import ServiceError
from service.node.node import Node
from service.scheduling.keeping.request import HeldRequest, RelayedRequest, RelayFailure
from workers.outcome import FailureReason

LOST: Final = JobId("request-lost")  # a request that is in no queue
decode: Final = msgspec.json.Decoder(HeldRequest).decode


def resume_request(node: Node, heartbeat_s: float, document: bytes) -> RelayedAnswer:
    """Take a handed-over request to the queue; return its answer, or the rest of it, as an application.

    Raises:
        msgspec.MsgspecError: it cannot be read.
    """
    held, requests, fleet = decode(document), node.scheduler.requests, node.fleet
    model = held.posted.model
    trouble = None if model in fleet.models() else f"model {model} is not in the configuration any more"
    request = RelayedRequest(LOST, held.posted)
    if trouble is None:
        slots = node.scheduler.view.slots(model) or fleet.lanes.slots_on_demand(model)
        try:
            request = requests.submit(held.posted, slots, held)
        except ServiceError as error:
            trouble = str(error)
    if trouble is not None:
        request.take_over(held)
        request.finish(RelayFailure(reason=FailureReason.ENGINE_UNREACHABLE, detail=trouble))
    place = requests.queue.place_in_queue
    return RelayedAnswer(
        request,
        requests.withdraw,
        heartbeat_s,
        trouble=partial(fleet.trouble_of, model),
        place=place,
        recorder=None if held.posted.records is None else SessionRecorder(node.sessions),
    )
