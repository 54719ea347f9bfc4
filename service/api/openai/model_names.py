"""The models that clients may name: GET /v1/models and GET /v1/models/NAME."""

from collections.abc import Sequence
from datetime import UTC, datetime

from fastapi import APIRouter, Response

from roundhouse_client.values.models import Model
from service.api.errors.forms import MODELS, error_of_service
from service.api.openai.elsewhere import Elsewhere
from service.api.openai.responses import ANSWERED, REFUSED_EARLY
from service.errors import ModelNotFound
from service.node.node import Node
from workers.spec import EngineKind


def model_router(node: Node, elsewhere: Elsewhere | None) -> APIRouter:
    """Return the route of one model; it comes last, since it also matches all paths below."""
    router, models = APIRouter(tags=["openai"]), Models(node, elsewhere)

    @router.get(
        "/v1/models/{model:path}",
        summary="Look at a model or adapter",
        response_model=Model,
        responses={**REFUSED_EARLY, 404: ANSWERED[404]},
    )
    async def get_model(model: str) -> Model | Response:
        found = next((each for each in models.listed() if each.id == model), None)
        if found is None:  # a name may hold slashes, so the path does not show which API's client asks
            return error_of_service(unknown_model(model, node), "model").response(MODELS, {})
        return found

    return router


class Models:
    """The names that a request may give: models and adapters of this node, and those of other nodes."""

    def __init__(self, node: Node, elsewhere: Elsewhere | None) -> None:
        self._node = node
        self._elsewhere = elsewhere
        self._created = int(datetime.now(UTC).timestamp())  # the start's time: a model's own is not known

    def __repr__(self) -> str:
        return f"<Models of {self._node.fleet!r}>"

    def listed(self) -> list[Model]:
        """List all names, models first."""
        fleet, adapters = self._node.fleet, self._node.adapters
        names = {**{model: model for model in fleet.models()}, **adapters.names()}
        if self._elsewhere is not None:
            names = {**{model: model for model in sorted(self._elsewhere.served())}, **names}
        return [
            Model(
                id=name,
                object="model",
                created=self._created,
                owned_by="roundhouse",
                root=model,
                max_model_len=self._context_of(model),
            )
            for name, model in names.items()
        ]

    def _context_of(self, model: str) -> int | None:
        """Return the context in tokens; None where an attached server decides."""
        config = self._node.live.config.models.get(model)
        return None if config is None or EngineKind(config.engine) is EngineKind.ATTACHED else config.context


def unknown_model(name: str, node: Node) -> ModelNotFound:
    """Return the refusal of a name that this node does not know."""
    known: Sequence[str] = [*node.fleet.models(), *node.adapters.names()]
    return ModelNotFound(name, known, known, "of this node")
