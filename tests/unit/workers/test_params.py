"""Generation parameters of a model (specification, "Generation parameters")."""

import pytest

from workers.errors import InvalidSpec
from workers.spec import EngineKind, WorkerSpec, WorkerTimeouts


@pytest.mark.parametrize("engine", ["vllm", "attached"])
@pytest.mark.parametrize(
    ("fields", "params", "bound"),
    [
        ({"params": {"n_predict": 5}}, {}, 5),
        ({"max_answer": 7}, {"n_predict": 9}, 9),
        ({"params": {"max_tokens": 5}}, {"n_predict": 9}, 9),
        ({"params": {"n_predict": 5}}, {"max_completion_tokens": 9}, None),
        ({"params": {"n_predict": 5}}, {"n_predict": None}, 5),
    ],
)
def test_a_bound_by_llama_cpps_name_holds_on_other_engines(
    engine: str, fields: dict[str, object], params: dict[str, object], bound: int | None
) -> None:
    """They would ignore the name, and the answer would have no end."""
    where: dict[str, object] = {"url": "http://127.0.0.1:9"} if engine == "attached" else {"model": "m"}
    spec = WorkerSpec(engine=EngineKind(engine), **where, **fields)  # type: ignore[arg-type]
    assert spec.params_of(params).get("max_tokens") == bound
    assert spec.longest_answer(params) == (9 if bound is None else bound)
    said = {name: value for name, value in params.items() if value is not None}
    assert {**spec.defaults_beside(params), **said} == spec.params_of(params), "as the record of a prompt tells it"


@pytest.mark.parametrize(
    "params",
    [
        {"n": 3},
        {"n": True},
        {"id_slot": 0},
        {"stream": True},
        {"model": "x"},
        {"messages": []},
        {"tools": []},
        {"stream_options": {}},
        {"max_tokens": 3, "n_predict": 4},
    ],
)
def test_a_models_parameters_follow_the_rules_of_an_agents(params: dict[str, object]) -> None:
    """Three answers would take three slots, and only one is counted."""
    with pytest.raises(InvalidSpec, match=rf"params\.{[*params][-1]}: "):
        WorkerSpec(engine=EngineKind.EMBEDDED, params=params)
    assert WorkerSpec(engine=EngineKind.EMBEDDED, params=dict.fromkeys(params)).most_answer == 3072


@pytest.mark.parametrize("name", ["start_s", "decode_stall_s", "busy_stall_s"])
@pytest.mark.parametrize("flag", [True, False])
def test_a_boolean_is_no_time(name: str, flag: bool) -> None:
    """It would be read as a second, or as none."""
    with pytest.raises(InvalidSpec, match=rf"timeouts\.{name}: {flag} is not a time in seconds"):
        WorkerSpec(engine=EngineKind.EMBEDDED, timeouts=WorkerTimeouts(**{name: flag}))


@pytest.mark.parametrize("bound", [True, 0, -1, 2.5, "many"])
def test_a_bound_that_is_no_number_is_refused(bound: object) -> None:
    """As slots and context are."""
    with pytest.raises(InvalidSpec, match=r"max_answer: .* is not a number from 1"):
        WorkerSpec(engine=EngineKind.EMBEDDED, max_answer=bound)  # type: ignore[arg-type]
