"""Carries out a Dockerfile, stage by stage and step by step, in plain roots: the results are what an image holds."""

import json
import shlex
import shutil
import string
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.system.host import Host
from tests.system.root import Place

INSTRUCTIONS_OF_OTHERS = frozenset({"EXPOSE"})
COPY_LIMIT_S = 300.0


class Image:
    """The result of the instructions: a root, and the program to run in it.

    ``unpack`` makes the root of a base image: it gets the base's name and an empty folder. ``arguments`` are the
    build's arguments.
    """

    def __init__(
        self,
        folder: Path,
        source: Path,
        unpack: Callable[[str, Path], None],
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._source = source
        self._unpack = unpack
        self._host = Host(folder)
        self._given = dict(arguments or {})
        self._arguments: dict[str, str] = {}
        self._stages: dict[str, Place] = {}
        self.place = Place(root=folder)
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        self.health: list[str] = []
        self.volumes: list[str] = []

    def build(self) -> None:
        """Carry out every instruction of the Dockerfile in order."""
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
            case "ARG":
                name, _, default = rest.partition("=")
                self._arguments[name] = self._given.get(name, default)
            case "FROM":
                self._begin_stage(*string.Template(rest).substitute(self._arguments).split())
            case "WORKDIR":
                place.directory = str(Path(place.directory, rest))
                (place.root / place.directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(shlex.split(rest))
            case "RUN":
                self._run(["/bin/sh", "-c", rest])
            case "USER":
                place.user = rest.partition(":")[0]
            case "ENV":
                pairs = string.Template(rest).substitute(place.environment)
                place.environment |= dict(pair.split("=", 1) for pair in shlex.split(pairs))
            case _:
                self._note(word, rest)

    def _begin_stage(self, base: str, as_: str, name: str) -> None:
        assert as_.upper() == "AS", f"the stage on {base} has no name"
        root = self._folder / name
        if base in self._stages:
            earlier = self._stages[base]
            _copy_tree(earlier.root, root)
            self.place = Place(
                root=root, user=earlier.user, directory=earlier.directory, environment=dict(earlier.environment)
            )
        else:
            root.mkdir()
            self._unpack(base, root)
            self.place = Place(root=root)
            if base.startswith("python:"):
                # The image has a Python of its own in /usr/local; here it is an environment of Debian's.
                self._run(["python3", "-m", "venv", "/usr/local"])
        self._stages[name] = self.place

    def _note(self, word: str, rest: str) -> None:
        """Keep the instructions that count when the image runs."""
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
        self.place.run(argv, more=self._host.environment | self._arguments, binds=self._host.binds)

    def _copy(self, words: Sequence[str]) -> None:
        *sources, place = (word for word in words if not word.startswith("--"))
        options = [word for word in words if word.startswith("--")]
        target = self.place.root / str(Path(self.place.directory, place)).lstrip("/")
        if options:
            (option,) = options
            stage = self._stages[option.removeprefix("--from=")]
            (built,) = sources
            _copy_tree(stage.root / built.lstrip("/"), target)
            return
        for source in (self._source / each for each in sources):
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
                continue
            to = target / source.name if place.endswith("/") else target
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to)
            to.chmod(0o644)


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a folder unchanged, with owners and modes."""
    command = ["cp", "-a", "--reflink=auto", str(source), str(target)]  # cp is that of coreutils
    subprocess.run(command, check=True, timeout=COPY_LIMIT_S)


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in whole)]
