"""House rules that no linter knows, checked over the tracked source files; part of ``make lint``."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = ("service", "workers", "transport", "client")
APART: Final = "client"  # a distribution of its own, whose names are its callers' own words
MAX_LINES: Final = 400
# Who holds the threads of a whole folder is being carved: a limit must not choose where it is cut.
UNLIMITED: Final = {
    *("service/scheduling/scheduler.py", "service/scheduling/core/decide.py"),
    "workers/supervised.py",
}
NO_NAMES: Final = {"utils", "util", "helpers", "common", "manager", "misc"}
SAME_STEMS: Final = {"api", "launch", "dialects"}  # folders whose files are named after what they speak for
MOST_ALIKE: Final = 6  # classes whose public methods have one name: of more, neither a reader nor a search knows which
PLAIN: Final = frozenset(
    {"run", "close", "add", "start", "stop", "get", "remove", "clear", "open", "post", "parse", "describe"}
)
EMPTY: Final = (
    "Note that",
    "Return what",
    "What ",
    "Who ",
    "Whoever ",
    "Whatever ",
    "Where ",
    "How ",
)  # beginnings of docstrings whose subject is no noun of the field
STDLIB_ONLY: Final = ("workers/process/guardian.py",)
# Absolute paths of a machine, and hosts of package indexes; written so that this file does not match itself.
FOREIGN: Final = re.compile(r"(?:^|[^\w.])/(?:work|farm|home|root)/|p[y]pi\.org|p[y]thonhosted|registry\.n[p]mjs")


def main() -> None:
    """Print every fault; exit with 1 if there is any."""
    tracked = _tracked()
    faults = sorted([*(fault for path in tracked for fault in _check(path)), *_check_names(tracked)])
    for fault in faults:
        print(fault)
    print(f"house rules: {len(faults)} faults")
    sys.exit(1 if faults else 0)


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def _check(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if FOREIGN.search(line):
            yield f"{name}:{number}: names a path of one machine, or a package index"
    if path.suffix != ".py":
        return
    if name.parts[0] in SOURCE:
        yield from _check_source(name, text)
    if name.parts[0] == "tests":
        yield from _check_tests(name, ast.parse(text))


def _check_source(name: Path, text: str) -> Iterator[str]:
    if len(text.splitlines()) > MAX_LINES and str(name) not in UNLIMITED:
        yield f"{name}: {len(text.splitlines())} lines are more than {MAX_LINES}: a room that wants a wall"
    if name.stem in NO_NAMES:
        yield f"{name}: a name that says nothing about the domain"
    tree = ast.parse(text)
    yield from _check_docstrings(name, tree)
    if name.stem != "__init__" and ast.get_docstring(tree) is None:
        yield f"{name}: the module says nothing about what it owns"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _check_dataclass(name, node)
        if str(name) in STDLIB_ONLY and isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."]
            for module in modules:
                if module.partition(".")[0] not in sys.stdlib_module_names:
                    yield f"{name}:{node.lineno}: imports {module}, which is not of the standard library"


def _check_names(tracked: Iterable[Path]) -> Iterator[str]:
    """A search leads home: a public class name exists once in a distribution, and a module's stem once in a part."""
    names = [path.relative_to(ROOT) for path in tracked if path.suffix == ".py"]
    names = [name for name in names if name.parts[0] in SOURCE and name.stem != "__init__"]
    classes: dict[tuple[bool, str], list[str]] = {}
    for name in names:
        for node in ast.parse((ROOT / name).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault((name.parts[0] == APART, node.name), []).append(f"{name}:{node.lineno}")
    for (_, called), places in classes.items():
        if len(places) > 1:
            yield f"{places[0]}: class {called} is also in {', '.join(places[1:])}"
    yield from _check_methods(names)
    stems: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if not SAME_STEMS & set(name.parts):
            stems.setdefault((name.parts[0], name.stem), []).append(str(name))
    for same in stems.values():
        if len(same) > 1:
            yield f"{same[0]}: the same module name as {', '.join(same[1:])}"


def _check_docstrings(name: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            told = ast.get_docstring(node) or ""
            if told.startswith(EMPTY):
                yield f"{name}:{getattr(node, 'lineno', 1)}: {told.partition('.')[0]!r} names nothing of the field"


def _check_methods(names: Iterable[Path]) -> Iterator[str]:
    """A method is a verb, with its noun where the class is not the noun."""
    methods: dict[str, list[str]] = {}
    for name in names:
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(each):
                        methods.setdefault(each.name, []).append(node.name)
    for method, classes in methods.items():
        if len(classes) > MOST_ALIKE and method not in PLAIN and not method.startswith("_"):
            yield f"{method} is a method of {len(classes)} classes: {', '.join(sorted(classes))}"


def _is_property(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    told = [ast.unparse(each) for each in method.decorator_list]
    return any(each in ("property", "cached_property") or each.endswith(".setter") for each in told)


def _check_dataclass(name: Path, node: ast.ClassDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if not ast.unparse(called).endswith("dataclass"):
            continue
        keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
        given = {key.arg for key in keywords if isinstance(key.value, ast.Constant) and key.value.value is True}
        missing = {"frozen", "kw_only", "slots"} - given
        if missing:
            yield f"{name}:{node.lineno}: dataclass {node.name} is not {' and '.join(sorted(missing))}"


def _check_tests(name: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            if node.name.startswith("test_") and not ast.get_docstring(node):
                yield f"{name}:{node.lineno}: {node.name} does not say what it requires"
        elif (
            "programs" not in name.parts
            and name.stem != "virtual"
            and isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(".sleep")
        ):
            yield f"{name}:{node.lineno}: sleeps; wait for the condition instead"


if __name__ == "__main__":
    main()
