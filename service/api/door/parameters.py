"""Refusal of query parameters and headers of ours that a route does not know: ignoring them would mislead silently.

A route knows what it declares. Paths of other APIs allow any query, since their clients send more.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from service.api.errors.forms import SERVED, is_of_surface
from service.errors import InvalidParameter
from service.formats.faults import unknown

PREFIX: Final = "x-roundhouse-"
OF_RELAYED: Final = (
    "X-Roundhouse-Priority",
    "X-Roundhouse-Wait-S",
    "X-Roundhouse-Deadline-S",
    "X-Roundhouse-Continue",
)
OF_NODES: Final = "x-roundhouse-passed"  # between the nodes of a cluster, which check it where they read it


def check_parameters(request: Request) -> None:
    """Check that a request gives no parameter or header twice, or that its route does not read.

    Raises:
        InvalidParameter: with all of these.
    """
    path = request.scope["path"]
    faults = list(_header_faults(request, is_relayed=path in SERVED))
    route = request.scope["route"]
    if isinstance(route, APIRoute) and not is_of_surface(path) and request.scope["query_string"]:
        given = Counter(name for name, _ in request.query_params.multi_items())
        faults += _query_faults(given, dict(_query_of(route.dependant)))
    if faults:
        raise InvalidParameter("; ".join(faults))


def _header_faults(request: Request, *, is_relayed: bool) -> Iterator[str]:
    ours = [name for raw, _ in request.headers.raw if (name := raw.decode("latin-1")).startswith(PREFIX)]
    known = {name.lower(): name for name in OF_RELAYED}
    for name, count in Counter(ours).items():
        if name == OF_NODES and is_relayed:
            continue
        if name not in known:
            yield unknown("header", _as_written(name), OF_RELAYED)
        elif not is_relayed:
            yield f"{known[name]}: only for relayed requests; a job's priority is in its document"
        elif count > 1 and len(set(request.headers.getlist(name))) > 1:
            yield f"{known[name]}: is given twice with different values"


def _query_faults(given: Mapping[str, int], known: Mapping[str, bool]) -> Iterator[str]:
    for name, count in given.items():
        if name not in known:
            yield unknown("query parameter", name[:100], known)
        elif count > 1 and not known[name]:
            yield f"{name}: is given {count} times"


def _query_of(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    """Yield the query parameters that a route declares, each with whether it may be repeated."""
    for field in dependant.query_params:
        yield field.alias, "list" in str(field.field_info.annotation)
    for needed in dependant.dependencies:
        yield from _query_of(needed)


def _as_written(name: str) -> str:
    return name[:100].title()
