"""Which weights a worker's engine has, and which of them each of its requests was written with."""

from workers.requests.in_flight import Flight, Flights

LAUNCHED = 0  # the version of the weights that an engine is started with, where nobody has said otherwise


class HeldWeights:
    """The version of one engine's weights; written by whoever changes them.

    A request begins with the version that its first token was made with, and ends with that of its last.
    """

    def __init__(self, flights: Flights) -> None:
        self._flights = flights
        self.version = LAUNCHED
        self.incarnation = 0  # of the engine that has them

    def __repr__(self) -> str:
        """State the version."""
        return f"<HeldWeights {self.version} of incarnation {self.incarnation}>"

    @property
    def scope(self) -> str:
        """What prefixes are shared within: a cache never mixes versions."""
        return f"weights-{self.version}"

    def change(self, version: int, incarnation: int) -> None:
        """Take the fact that the engine has other weights from here on."""
        for flight in self._flights:
            if flight.answer.first_token_at is not None:
                _begin(flight, self.version)
        self.version, self.incarnation = version, incarnation

    def note_end(self, flight: Flight) -> None:
        """Take the end of a request; one that another incarnation has begun had its weights."""
        _begin(flight, self.version)
        flight.answer.last_version = self.version


def _begin(flight: Flight, version: int) -> None:
    if flight.answer.first_version is None:
        flight.answer.first_version = version
