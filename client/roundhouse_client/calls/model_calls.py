"""Calls for models, tools, adapters and weights. Loading may take minutes: ``limit_s`` bounds it.

``nodes`` is ``all`` or ``this``: the nodes of the cluster whose engines change, by default those of the node asked.
"""

from collections.abc import Mapping
from typing import Final

from roundhouse_client.request import Call, Nodes, Request, as_nothing, get, into, model_place, on_nodes, post, slashed
from roundhouse_client.values.models import Adapter, Adapters, Models, Tools, Weights, WeightUpdate
from roundhouse_client.values.workers import Workers

LOAD_S: Final = 1800.0


def list_models() -> Call[Models]:
    """Return the models that a request may name, and the adapters on them."""
    return get("/v1/models", into(Models))


def load_model(model: str, *, nodes: Nodes | None = None) -> Call[Workers]:
    """Start a model's engines, or load it on a lane; return its workers as they are now.

    Raises:
        NotFound: there is no such model.
        StateConflict: it is attached (``not_our_engine``).
    """
    return on_nodes(post(f"{model_place(model)}/load", into(Workers)), nodes)


def unload_model(model: str, *, nodes: Nodes | None = None) -> Call[Workers]:
    """End a model's engines, each after its requests; return its workers as they are now.

    On lanes the next turn loads it again, elsewhere ``load_model`` does.

    Raises:
        NotFound: there is no such model.
        StateConflict: it is attached (``not_our_engine``).
    """
    return on_nodes(post(f"{model_place(model)}/unload", into(Workers)), nodes)


def get_tools(model: str) -> Call[Tools]:
    """Return the tools that agents of a model may ask for, and their servers.

    Raises:
        NotFound: there is no such model.
    """
    return get(f"{model_place(model)}/tools", into(Tools))


def list_adapters(model: str) -> Call[Adapters]:
    """Return the adapters of a model.

    Raises:
        NotFound: there is no such model.
    """
    return get(f"{model_place(model)}/adapters", into(Adapters))


def load_adapter(
    model: str, name: str, path: str, *, nodes: Nodes | None = None, limit_s: float = LOAD_S
) -> Call[Adapter]:
    """Load a LoRA adapter as ``name`` onto every engine of a model; return it once agents may ask for it.

    ``path`` is on the service's machine: a folder in PEFT's format for vLLM, a GGUF file for llama.cpp.

    Raises:
        InvalidRequest: it is not an adapter of the model.
        StateConflict: the name is another's (``name_taken``), or there is no room (``adapters_full``).
    """
    call = post(f"{model_place(model)}/adapters", into(Adapter), {"name": name, "path": path}, limit_s)
    return on_nodes(call, nodes)


def unload_adapter(model: str, name: str, *, nodes: Nodes | None = None, limit_s: float = LOAD_S) -> Call[None]:
    """Unload a LoRA adapter from every engine of a model.

    Raises:
        StateConflict: an unfinished job uses it (``adapter_in_use``).
    """
    path = f"{model_place(model)}/adapters{slashed(name)}"
    return on_nodes(Call(request=Request(method="DELETE", path=path, limit_s=limit_s), read=as_nothing), nodes)


def get_weights(model: str, *, update: int | None = None, wait_s: float | None = None) -> Call[Weights]:
    """Return the state of a model's weights; with ``wait_s``, at most 60, once ``update`` is over or after that time.

    Raises:
        NotFound: the model's weights cannot change, or the update is not known.
    """
    return get(f"{model_place(model)}/weights", into(Weights), update=update, wait_s=wait_s)


def init_weights(
    model: str, body: Mapping[str, object], *, nodes: Nodes | None = None, limit_s: float = LOAD_S
) -> Call[Weights]:
    """Open a trainer's group with every engine of a model (``POST …/weights/init``); ``TrainerClient`` is its rank 0.

    Raises:
        StateConflict: an update is under way.
    """
    return on_nodes(post(f"{model_place(model)}/weights/init", into(Weights), body, limit_s), nodes)


def update_weights(
    model: str, body: Mapping[str, object], *, nodes: Nodes | None = None, limit_s: float = LOAD_S
) -> Call[WeightUpdate]:
    """Give all engines of a model new weights (``POST …/weights/update``), for example ``{"checkpoint": FOLDER}``.

    Raises:
        InvalidRequest: they are not weights of this model.
        StateConflict: another update runs, the version is not newer, or the group is gone.
        ServiceFailed: the update has failed; the model keeps its version.
    """
    return on_nodes(post(f"{model_place(model)}/weights/update", into(WeightUpdate), body, limit_s), nodes)
