"""House rules that no linter knows, checked over the tracked source files; part of ``make lint``.

``tools/ceilings.toml`` holds what is still over a rule: large classes, comments that begin as fragments, and words of
an idiom of our own. None of its numbers may grow; ``python tools/house_rules.py --lower`` lowers them to what is there.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = ("roundhouse", "service", "workers", "transport", "client")
APART: Final = "client"  # a separate distribution, which may repeat names
MAX_LINES: Final = 400
# Central files that are still being divided: a limit must not choose where. The last is copied as one.
UNLIMITED: Final = {
    *("service/scheduling/scheduler.py", "service/scheduling/core/decide.py"),
    "workers/supervised.py",
    "service/cli/engine_probe.py",
}
MOST_FILES: Final = 8  # files in a folder without a contract of layers in pyproject.toml
NO_NAMES: Final = {"utils", "util", "helpers", "common", "manager", "misc"}
SAME_STEMS: Final = {"api", "launch", "dialects"}  # folders whose files may share names with others
MOST_ALIKE: Final = 6  # classes that may share a method's name: beyond, a search cannot tell them apart
PLAIN: Final = frozenset(
    {"run", "close", "add", "start", "stop", "get", "remove", "clear", "open", "post", "parse", "describe"}
)
MOST_LINES: Final = 250  # lines of a class
MOST_METHODS: Final = 25
FRAGMENT: Final = re.compile(r"#:? *(of|that|for which|by which)\b", re.IGNORECASE)
IDIOM: Final = ("told", "nobody", "anew")
CEILINGS: Final = ROOT / "tools" / "ceilings.toml"
EMPTY: Final = (
    "Note that",
    "Return what",
    "What ",
    "Who ",
    "Whoever ",
    "Whatever ",
    "Where ",
    "How ",
)  # beginnings of docstrings without a noun of the field as subject
Counts = dict[str, dict[str, Any]]
# Programs, and the files beside them that they import by their bare names.
STDLIB_ONLY: Final = (
    "workers/process/guardian.py",
    "workers/process/engine_output.py",
    "workers/process/lifelines.py",
    "service/cli/engine_probe.py",
)
# Absolute paths of a machine, and hosts of package indexes; written so that this file does not match itself.
FOREIGN: Final = re.compile(r"(?:^|[^\w.])/(?:work|farm|home|root)/|p[y]pi\.org|p[y]thonhosted|registry\.n[p]mjs")


def main() -> None:
    """Print every fault; exit with 1 if there is any."""
    tracked = _tracked()
    counts, ceilings = counts_of(tracked), tomllib.loads(CEILINGS.read_text())
    if "--lower" in sys.argv:
        ceilings = lowered(counts, ceilings)
        CEILINGS.write_text(_written(ceilings))
    each = (fault for path in tracked for fault in _check(path))
    faults = sorted([*each, *_check_names(tracked), *_check_layers(tracked), *excesses(counts, ceilings)])
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
                is_beside = f"{name.parent}/{module.rpartition('.')[2]}.py" in STDLIB_ONLY
                if not is_beside and module.partition(".")[0] not in sys.stdlib_module_names:
                    yield f"{name}:{node.lineno}: imports {module}, which is not of the standard library"


def _check_names(tracked: Iterable[Path]) -> Iterator[str]:
    """Keep names findable: a public class name is unique in a distribution, and a module's stem in a part."""
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


def _check_layers(tracked: Iterable[Path]) -> Iterator[str]:
    """Imports inside a folder of more than a few files point one way, as import-linter checks."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = {name for each in contracts if each.get("exhaustive") for name in each.get("containers", ())}
    folders = Counter(path.relative_to(ROOT).parent for path in tracked if path.suffix == ".py")
    for folder, count in folders.items():
        is_ours = folder.parts[:1] and folder.parts[0] in SOURCE
        is_layered = ".".join(folder.parts).removeprefix("client.") in layered
        if is_ours and count > MOST_FILES and not is_layered:
            yield f"{folder}: {count} files and no contract of layers in pyproject.toml"


def counts_of(paths: Iterable[Path]) -> Counts:
    """Count what may only shrink: large classes with their lines and methods, fragments by folder, words by place."""
    classes: dict[str, list[int]] = {}
    fragments: Counter[str] = Counter()
    words = {word: {"docs": 0, "source": 0, "tests": 0} for word in IDIOM}
    for path in paths:
        top = path.relative_to(ROOT).parts[0]
        is_page = path.suffix == ".md" and path.name != "CHANGELOG.md"
        is_script = path.suffix == ".js" and "static" in path.parts
        if not (path.suffix == ".py" or is_page or is_script):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            fragments[top] += count_fragments(text)
        if top in SOURCE and path.suffix == ".py":
            classes |= large_classes(text)
        place = "docs" if is_page else "source" if top in SOURCE else "tests"
        names = "\n".join(re.findall(r"def (test_\w+)", text)) if place == "tests" and top == "tests" else ""
        for word in IDIOM:
            seen = names if place == "tests" else text
            words[word][place] += len(re.findall(rf"(?<![a-z]){word}(?![a-z])", seen, re.IGNORECASE))
    return {"classes": classes, "fragments": dict(fragments), **words}


def large_classes(text: str) -> dict[str, list[int]]:
    """Return the classes of a module with more lines or methods than there should be, with both numbers."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
            if lines > MOST_LINES or methods > MOST_METHODS:
                found[node.name] = [lines, methods]
    return found


def count_fragments(text: str) -> int:
    """Count the comments that begin with a preposition; a line that goes on with a comment above it begins none."""
    count, last_line = 0, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, is_alone = token.start[0], not token.line[: token.start[1]].strip()
            goes_on = is_alone and line == last_line + 1
            count += bool(FRAGMENT.match(token.string)) and not goes_on
            last_line = line if is_alone else -1
    return count


def excesses(counts: Counts, ceilings: Counts) -> Iterator[str]:
    """Yield what is over its ceiling, and large classes of the list that are large no longer."""
    for name, now in counts["classes"].items():
        most = ceilings["classes"].get(name, [MOST_LINES, MOST_METHODS])
        if now[0] > max(most[0], MOST_LINES) or now[1] > max(most[1], MOST_METHODS):
            yield f"class {name}: {now[0]} lines and {now[1]} methods; {most[0]} and {most[1]} at most"
    for name in ceilings["classes"].keys() - counts["classes"].keys():
        yield f"class {name} is large no longer: take it off with tools/house_rules.py --lower"
    for section in ("fragments", *IDIOM):
        for place, count in counts[section].items():
            most = ceilings[section].get(place, 0)
            if count > most:
                what = "comments begin with of, that, for which or by which" if section == "fragments" else section
                yield f"{place}: {count} times {what!r}; {most} at most"


def lowered(counts: Counts, ceilings: Counts) -> Counts:
    """Return ceilings that are nowhere above the counts, and nowhere higher than before."""
    classes = {
        name: [min(pair) for pair in zip(most, counts["classes"][name], strict=True)]
        for name, most in ceilings["classes"].items()
        if name in counts["classes"]
    }
    others = {
        section: {place: min(most, counts[section].get(place, 0)) for place, most in ceilings[section].items()}
        for section in ("fragments", *IDIOM)
    }
    return {"classes": classes, **others}


def _written(ceilings: Counts) -> str:
    parts = [f"[{section}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for section, each in ceilings.items()]
    return "# What may only shrink (tools/house_rules.py). Of a class: its lines and its methods.\n" + "\n".join(parts)


def _check_docstrings(name: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            told = ast.get_docstring(node) or ""
            if told.startswith(EMPTY):
                yield f"{name}:{getattr(node, 'lineno', 1)}: {told.partition('.')[0]!r} names nothing of the field"


def _check_methods(names: Iterable[Path]) -> Iterator[str]:
    """Refuse method names that too many classes share: a verb needs its noun unless the class is the noun."""
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
