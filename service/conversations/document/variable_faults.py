"""The faults of a job's variables: malformed names, names without a value, and choices that values spoil."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from service.conversations.document.spec import (
    AgentSpec,
    CastSpec,
    ConditionSpec,
    ConversationSpec,
    JobSpec,
    ValidationSpec,
)
from service.conversations.job.validation import Validation, folded
from service.conversations.job.variables import NAME, RESERVED, fill, names_in, written
from service.errors import Fault
from workers.offload.pool import QUICK_S
from workers.tools.schemas import cut

LIKE: Final = 0.6  # ratio of likeness from which a name counts as a misspelling


def variable_faults(spec: JobSpec) -> Iterator[Fault]:
    """Yield malformed names of variables, and names in a conversation's texts without a value."""
    common = {"system": spec.system, **_texts_of_ends("until", spec.until)}
    for number, agent in enumerate(spec.agents):
        common |= _texts_of(f"agents[{number}]", agent)
    wanted = _places_of_names(common)
    for index, given in enumerate(spec.conversations):
        if given.variables is None:
            continue
        path = f"conversations[{index}].variables"
        for name in given.variables:
            if not re.fullmatch(NAME, name):
                yield Fault(path=f"{path}.{name}", message="a name is letters, digits and _, and begins with no digit")
            elif name in RESERVED:
                yield Fault(path=f"{path}.{name}", message=f"${name} is a name of Roundhouse's own words")
        texts, replaced = _own_texts(spec, given, f"conversations[{index}]")
        own = _places_of_names(texts)
        for name in sorted((own.keys() | wanted.keys()) - given.variables.keys()):
            common_places = (each for each in wanted.get(name, ()) if not each.startswith(replaced))
            places = [*own.get(name, ()), *common_places]
            if places:
                message = f"{name!r} is not given, which {', '.join(places)} names"
                yield Fault(path=path, message=f"{message}; {_hint(name, given.variables)}")
        yield from _choice_faults(spec, given, path)
        values = {name: written(value) for name, value in given.variables.items()}
        if given.prompt is not None and given.prompt.strip() and not fill(given.prompt, values).strip():
            yield Fault(path=f"conversations[{index}].prompt", message="is blank with these variables")


def _own_texts(spec: JobSpec, given: ConversationSpec, place: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return a conversation's own texts by place, and the prefixes of the places that they replace."""
    texts = {f"{place}.prompt": given.prompt or "", **_texts_of_ends(f"{place}.until", given.until or ())}
    numbers = {agent.id: number for number, agent in enumerate(spec.agents)}
    replaced = ["until["] if given.until is not None else []
    for name, cast in given.agents.items():
        texts |= _texts_of(f"{place}.agents.{name}", cast)
        if name in numbers:
            replaced += [
                f"agents[{numbers[name]}].{key}" for key in ("system", "validation") if key in cast.model_fields_set
            ]
    return texts, tuple(replaced)


def _hint(name: str, given: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(given), n=1, cutoff=LIKE)
    if near:
        return f"did you mean ${near[0]}?"
    return "it is filled in prompts alone" if name in RESERVED else "a dollar that is none of a name is $$"


def _choice_faults(spec: JobSpec, given: ConversationSpec, path: str) -> Iterator[Fault]:
    """Yield the agents whose choices are blank or repeated once filled in."""
    values = {name: written(value) for name, value in (given.variables or {}).items()}
    for agent in spec.agents:
        cast = given.agents.get(agent.id)
        validation = (agent if cast is None else cast.applied_to(agent)).validation
        choices = [fill(choice, values) for choice in (validation.choices if validation is not None else None) or ()]
        filled = [folded(choice) for choice in choices]
        if not all(filled) or len(set(filled)) < len(filled):
            message = f"with these the choices of {agent.id!r} are not distinct words: {cut(', '.join(filled))}"
            yield Fault(path=path, message=message)
        elif agent.otherwise is not None and validation is not None:
            words = fill(agent.otherwise, values)
            fault = fault_of_words(validation, tuple(choices), words)
            if fault is not None:
                yield Fault(path=path, message=f"with these {agent.id!r} says {cut(words)} otherwise: {fault}")


def fault_of_words(given: ValidationSpec, choices: tuple[str, ...], words: str) -> str | None:
    """Return the fault of a caller's words, if it is found within ``QUICK_S``."""
    validation = Validation(retries=0, choices=choices, pattern=given.pattern, json_schema=given.json_schema)
    try:
        return validation.fault_of_words(words, QUICK_S)
    except TimeoutError:
        return None  # judged when the words are said


def _texts_of(place: str, agent: AgentSpec | CastSpec) -> dict[str, str]:
    """Return the texts of an agent that variables may fill, by place."""
    choices = (agent.validation.choices if agent.validation is not None else None) or ()
    texts = {f"{place}.system": agent.system}
    texts |= {f"{place}.validation.choices[{number}]": choice for number, choice in enumerate(choices)}
    if isinstance(agent, AgentSpec):
        texts |= {f"{place}.role": agent.role, f"{place}.otherwise": agent.otherwise or ""}
    return texts


def _texts_of_ends(place: str, until: Iterable[ConditionSpec]) -> dict[str, str]:
    return {
        f"{place}[{number}].says[{position}]": words
        for number, condition in enumerate(until)
        for position, words in enumerate(condition.says or ())
    }


def _places_of_names(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return, for each name, the places of the texts that use it."""
    places: dict[str, list[str]] = {}
    for place, text in texts.items():
        for name in dict.fromkeys(names_in(text)) if "$" in text else ():
            places.setdefault(name, []).append(place)
    return places
