"""Bounds of the limits that operators give, checked where a configuration is read. Pure."""

from typing import Annotated, Any, ClassVar

from annotated_types import Gt

Seconds = Annotated[float, Gt(0)]


class Configured:
    """A dataclass that is a section of the configuration as it stands: no other keys, and no endless numbers."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}
