"""Jobs, conversations, scheduling, storage, configuration, the HTTP API and the terminal."""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """Look up the version when it is first read: most programs do not need it."""
    if name == "__version__":
        from workers.distribution import own_version  # noqa: PLC0415 - see above

        return own_version()
    raise AttributeError(name)
