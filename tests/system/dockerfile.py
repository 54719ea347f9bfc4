"""Does what a Dockerfile says, step by step, in a plain root: what an image of it would hold."""

import json
import shlex
import shutil
from pathlib import Path

from tests.system.host import Host
from tests.system.root import Place

INSTRUCTIONS_OF_OTHERS = frozenset({"EXPOSE"})


class Image:
    """What the instructions have made: a place to run in, and what is to run there."""

    def __init__(self, root: Path, source: Path, host: Host) -> None:
        self.place = Place(root=root)
        self._source = source
        self._host = host
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        self.health: list[str] = []
        self.volumes: list[str] = []

    def build(self) -> None:
        """Carry out every instruction of the Dockerfile, in its order."""
        for word, rest in _instructions((self._source / "Dockerfile").read_text()):
            self._do(word, rest)

    def install(self, *packages: str) -> None:
        """Install packages of Debian as root, as a derived image would."""
        self._run(
            ["sh", "-c", f"apt-get update && apt-get install --yes --no-install-recommends {shlex.join(packages)}"]
        )

    def _do(self, word: str, rest: str) -> None:
        place = self.place
        match word:
            case "FROM":
                # The image has a Python of its own in /usr/local; here that is an environment of Debian's.
                self._run(["python3", "-m", "venv", "/usr/local"])
            case "WORKDIR":
                place.directory = str(Path(place.directory, rest))
                (place.root / place.directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(*shlex.split(rest))
            case "RUN":
                self._run(["/bin/sh", "-c", rest])
            case "USER":
                place.user = rest
            case "ENV":
                place.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            case _:
                self._note(word, rest)

    def _note(self, word: str, rest: str) -> None:
        """Keep what counts when the image runs."""
        match word:
            case "VOLUME":
                self.volumes += rest.split()
            case "HEALTHCHECK":
                self.health = json.loads(rest.partition("CMD ")[2])
            case "ENTRYPOINT":
                self.entrypoint = json.loads(rest)
            case "CMD":
                self.command = json.loads(rest)
            case _:
                assert word in INSTRUCTIONS_OF_OTHERS, f"unknown instruction {word}"

    def _run(self, argv: list[str]) -> None:
        self.place.run(argv, more=self._host.environment, binds=self._host.binds)

    def _copy(self, *words: str) -> None:
        *sources, place = words
        target = self.place.root / str(Path(self.place.directory, place)).lstrip("/")
        for source in (self._source / each for each in sources):
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
                continue
            to = target / source.name if place.endswith("/") else target
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to)
            to.chmod(0o644)


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in whole)]
