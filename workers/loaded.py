"""The loaded state of a worker's engine: the version of its weights, and its adapters."""

from collections.abc import Mapping

from workers.requests.in_flight import InFlightRequest, InFlightRequests

LAUNCHED = 0  # the version of the weights that an engine is started with, where no update has said otherwise


class LoadedWeights:
    """The version of one engine's weights; written by what changes them.

    A request begins with the version that its first token was made with, and ends with that of its last.
    """

    def __init__(self, in_flight: InFlightRequests) -> None:
        self._in_flight = in_flight
        self.version = LAUNCHED
        self.incarnation = 0  # of the engine that has them

    def __repr__(self) -> str:
        return f"<LoadedWeights {self.version} of incarnation {self.incarnation}>"

    @property
    def scope(self) -> str:
        """The scope within which prefixes are shared: a cache never mixes versions."""
        return f"weights-{self.version}"

    def change(self, version: int, incarnation: int) -> None:
        """Set the version of the weights that the engine has from here on."""
        for running in self._in_flight:
            if running.answer.first_token_at is not None:
                _begin(running, self.version)
        self.version, self.incarnation = version, incarnation

    def note_end(self, running: InFlightRequest) -> None:
        """Take the end of a request; one that another incarnation has begun had its weights."""
        _begin(running, self.version)
        running.answer.last_version = self.version


class LoadedAdapters:
    """Names to paths: ``wanted`` is what the next engine is started with, ``loaded`` what the present one has.

    The order of ``loaded`` is that in which llama-server was given them, and numbers them; ``numbers`` are vLLM's own,
    which begin with one. What an engine has and no job wants any more stays there until the engine's end, if it cannot
    be unloaded.
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
        """The adapters that the present engine has yet to be given."""
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
