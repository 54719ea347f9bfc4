"""The loaded state of a worker's engine: the version of its weights, and its adapters."""

from collections.abc import Mapping

from workers.requests.in_flight import InFlightRequest, InFlightRequests

LAUNCHED = 0  # version of the weights that an engine starts with, unless an update set another


class LoadedWeights:
    """The version of one engine's weights; written by the code that changes them.

    A request records the version that made its first token and the one that made its last.
    """

    def __init__(self, in_flight: InFlightRequests) -> None:
        self._in_flight = in_flight
        self.version = LAUNCHED
        self.incarnation = 0  # incarnation that has these weights

    def __repr__(self) -> str:
        return f"<LoadedWeights {self.version} of incarnation {self.incarnation}>"

    @property
    def scope(self) -> str:
        """The scope within which prefixes are shared: a cache never mixes versions."""
        return f"weights-{self.version}"

    def change(self, version: int, incarnation: int) -> None:
        """Set the version of the weights that the engine uses from now on."""
        for running in self._in_flight:
            if running.answer.first_token_at is not None:
                _begin(running, self.version)
            if running.answer.generation.tokens is not None:
                running.answer.generation.tokens.note_weights(self.version)
        self.version, self.incarnation = version, incarnation

    def note_end(self, running: InFlightRequest) -> None:
        """Record the version at a request's end, and at its beginning if it had no first token."""
        _begin(running, self.version)
        running.answer.last_version = self.version


class LoadedAdapters:
    """Names to paths: ``wanted`` for the next engine, ``loaded`` in the present one.

    The order of ``loaded`` is the order in which llama-server got them, and gives their numbers; ``numbers`` are vLLM's
    own and begin with one. An adapter that no job wants any more stays in the engine until its end, if it cannot be
    unloaded.
    """

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self.wanted = dict(adapters)
        self.loaded = dict(adapters)
        self.numbers: dict[str, int | None] = {}
        self._held: tuple[Mapping[str, str], Mapping[str, int | None]] | None = None

    def __repr__(self) -> str:
        return f"<LoadedAdapters {list(self.loaded)} wanted={list(self.wanted)}>"

    @property
    def missing(self) -> dict[str, str]:
        """The wanted adapters that the present engine lacks."""
        return {name: path for name, path in self.wanted.items() if self.loaded.get(name) != path}

    def adopt(self, loaded: Mapping[str, str], numbers: Mapping[str, int | None]) -> None:
        """Take over these adapters with a running engine, at the next incarnation."""
        self._held = loaded, numbers

    def begin_incarnation(self) -> None:
        """Begin an incarnation, which has all wanted adapters."""
        if self._held is not None:
            (loaded, numbers), self._held = self._held, None
            self.loaded, self.numbers = dict(loaded), dict(numbers)
            return
        self.loaded = dict(self.wanted)
        self.numbers = {name: place for place, name in enumerate(self.loaded, start=1)}

    def add(self, name: str, path: str, number: int | None) -> None:
        """Record an adapter that the engine has loaded."""
        self.loaded[name] = path
        self.numbers[name] = number

    def remove(self, name: str) -> None:
        """Forget an adapter that the engine has unloaded."""
        self.loaded.pop(name, None)
        self.numbers.pop(name, None)


def _begin(running: InFlightRequest, version: int) -> None:
    if running.answer.first_version is None:
        running.answer.first_version = version
