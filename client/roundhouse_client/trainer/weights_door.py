"""A trainer's calls to the service for one model, with a trainer's errors."""

import time
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import httpx

from roundhouse_client.calls import model_calls
from roundhouse_client.client import Client
from roundhouse_client.errors import AnswerLost, AnswerMalformed, Refused, Unreachable, WeightsError
from roundhouse_client.request import Call, Nodes
from roundhouse_client.values.value import Value

ASK_LIMIT_S: Final = 60.0
POLL_S: Final = 20.0  # longest wait of one request
AWAY_S: Final = 1.0
Answer = TypeVar("Answer")
Document = dict[str, Any]


class WeightsDoor:
    """The calls of one model; each is sent once."""

    def __init__(self, url: str | None, model: str, api_key: str | None, timeout_s: float, nodes: Nodes | None) -> None:
        self._model = model
        self._nodes = nodes
        self._timeout_s = timeout_s
        self._http = httpx.Client()  # with the environment's proxies: engines and trainer may be far apart
        self._client = Client(url, api_key=api_key, timeout_s=ASK_LIMIT_S, patience_s=0.0, http=self._http)

    def __repr__(self) -> str:
        return f"<WeightsDoor {self._model}>"

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def look(self, *, update: int | None = None, wait_s: float | None = None) -> Document:
        """Return the state of the model's weights."""
        return self._ask(model_calls.get_weights(self._model, update=update, wait_s=wait_s))

    def init(self, body: Mapping[str, object]) -> Document:
        """Open a group that every engine joins."""
        return self._ask(model_calls.init_weights(self._model, body, nodes=self._nodes, limit_s=self._timeout_s))

    def update(self, body: Mapping[str, object]) -> Document:
        """Begin an update."""
        return self._ask(model_calls.update_weights(self._model, body, nodes=self._nodes, limit_s=self._timeout_s))

    def load_adapter(self, name: str, path: str) -> Document:
        """Load an adapter."""
        return self._ask(model_calls.load_adapter(self._model, name, path, nodes=self._nodes, limit_s=self._timeout_s))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        self._sent(model_calls.unload_adapter(self._model, name, nodes=self._nodes, limit_s=self._timeout_s))

    def wait_over(self, update: Document) -> Document:
        """Return an update once it is over.

        Raises:
            WeightsError: it failed, is not over in time, or is no longer known.
        """
        until = time.monotonic() + self._timeout_s
        while update["state"] == "running":
            if time.monotonic() > until:
                raise WeightsError(f"not over within {self._timeout_s:g} s", "timeout", update)
            try:
                document = self.look(update=update["number"], wait_s=POLL_S)
            except (Unreachable, AnswerLost):  # it may be restarting, and a read is safe to repeat
                time.sleep(AWAY_S)
                continue
            known = [each for each in document["updates"] if _identity(each) == _identity(update)]
            if not known:
                detail = f"the service no longer knows it, and has weights {document['version']}"
                raise WeightsError(detail, "update_not_found", document)
            update = known[0]
        if update["state"] == "failed":
            raise WeightsError(f"weights {update['version']}: {update['error']}", "weights_failed", update)
        return update

    def _ask(self, call: Call[Any]) -> Document:
        value: Value = self._sent(call)
        return dict(value.document)

    def _sent(self, call: Call[Answer]) -> Answer:
        try:
            return self._client.ask(call)
        except Refused as error:
            raise WeightsError(error.detail, error.code, error.document) from error
        except AnswerMalformed as error:
            raise WeightsError(str(error), "no_json", {}) from error


def _identity(update: Mapping[str, Any]) -> tuple[int, int]:
    """Return the identity of an update; a restarted service reuses its numbers."""
    return update["number"], update["version"]
