"""An adapter that was loaded while the service ran, and what is kept of those that were unloaded. Pure."""

from msgspec import Struct


class Adapter(Struct, frozen=True, kw_only=True):
    """One version of an adapter; ``digest`` is that of its files, ``size`` in bytes, ``source`` where it came from."""

    name: str
    digest: str
    size: int
    source: str
    loaded_at: str


class StoredAdapters(Struct, frozen=True, kw_only=True):
    """What a model has by name, and which digest each name stood for that it has no more: a name means one version.

    ``model`` is what they were loaded on.
    """

    model: str | None = None
    adapters: tuple[Adapter, ...] = ()
    past: dict[str, str] = {}
