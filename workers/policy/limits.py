"""Bounds of the operator's limits, checked when a configuration is read. Pure."""

from typing import Annotated, Any, ClassVar

from annotated_types import Gt

Seconds = Annotated[float, Gt(0)]


class Configured:
    """A dataclass that is a whole section of the configuration: no other keys, and no infinite numbers."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}
