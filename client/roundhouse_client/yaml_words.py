"""YAML by the rules of version 1.2 where PyYAML's differ, limited to JSON's values.

``yes``, a date and ``12:30`` are text, ``1e3`` is a number, and lines end where editors end them. ``010`` is refused:
it is 8 in one version, 10 in the other, and may be meant as text.
"""

import math
import re
from collections.abc import Callable
from typing import Any, Final

import yaml
from typing_extensions import override

TAG: Final = "tag:yaml.org,2002:"
MOST_DIGITS: Final = 4300  # Python reads no more
SHOWN: Final = 60
_FLOAT: Final = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
# Patterns of scalars that are not text (the core schema), and their first characters.
_SCALARS: Final = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), "~nN"),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), "tTfF"),
    "int": (re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), "-+0123456789"),
    "float": (re.compile(rf"(?:{_FLOAT})\Z"), "-+.0123456789"),
}
_ZEROS: Final = re.compile(r"[-+]?0[0-9]+\Z")
_BREAKS: Final = "\x85\u2028\u2029"  # line breaks only in YAML 1.1


class WordsLoader(yaml.SafeLoader):
    """A safe YAML loader that keeps words as text and refuses repeated keys."""

    yaml_implicit_resolvers = {"<": [(TAG + "merge", re.compile(r"<<\Z"))]}  # noqa: RUF012 - PyYAML's own form

    def __init__(self, text: str) -> None:
        self._stands_for: dict[int, int] = {}
        if any(each in text for each in _BREAKS):
            unused = (chr(code) for code in range(0x10FFFD, 0xF0000, -1) if chr(code) not in text)
            taken = dict(zip(_BREAKS, unused, strict=False))
            text = text.translate({ord(each): stand for each, stand in taken.items()})
            self._stands_for = {ord(stand): ord(each) for each, stand in taken.items()}
        try:
            super().__init__(text)
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            at = yaml.Mark("", error.position, before.count("\n"), 0, None, 0)
            raise yaml.scanner.ScannerError(
                None, None, f"the character {error.character:#06x} is not allowed", at
            ) from error

    @override
    def scan_plain(self) -> yaml.ScalarToken:
        return self._as_written(super().scan_plain)

    @override
    def scan_block_scalar(self, style: str) -> yaml.ScalarToken:
        return self._as_written(super().scan_block_scalar, style)

    @override
    def scan_flow_scalar(self, style: str) -> yaml.ScalarToken:
        return self._as_written(super().scan_flow_scalar, style)

    @override
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if fault := kind_fault(node):
            raise yaml.constructor.ConstructorError(None, None, fault, node.start_mark)
        return super().construct_object(node, deep)

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            fault = key_fault(key) or (f"the key {key.value!r} stands there twice" if key.value in names else None)
            if fault:
                raise yaml.constructor.ConstructorError(None, None, fault, key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int:
        """Return the value of a whole number."""
        return int(node.value, 0)

    def construct_float(self, node: yaml.ScalarNode) -> float:
        """Return the value of another number."""
        return float(node.value)

    def construct_truth(self, node: yaml.ScalarNode) -> bool:
        """Return the value of ``true`` or ``false``."""
        return str(node.value).lower() == "true"

    def _as_written(self, scan: Callable[..., yaml.ScalarToken], *arguments: str) -> yaml.ScalarToken:
        """Return the token of a scan, with stand-ins replaced by the characters that they stand for."""
        begins_at = self.get_mark()
        try:
            token = scan(*arguments)
            # A character beyond U+FFFF may be escaped as two surrogates, as in JSON.
            token.value = token.value.encode("utf-16", "surrogatepass").decode("utf-16").translate(self._stands_for)
        except (UnicodeDecodeError, ValueError, OverflowError) as error:
            raise yaml.scanner.ScannerError(None, None, "an escape is no character", begins_at) from error
        return token


WordsLoader.add_constructor(TAG + "int", WordsLoader.construct_number)
WordsLoader.add_constructor(TAG + "float", WordsLoader.construct_float)
WordsLoader.add_constructor(TAG + "bool", WordsLoader.construct_truth)
for _kind, (_pattern, _first) in _SCALARS.items():
    WordsLoader.add_implicit_resolver(TAG + _kind, _pattern, [*_first, *([""] if _kind == "null" else [])])


def kind_fault(node: yaml.Node) -> str | None:
    """Return the fault of a node that is not a JSON value, or does not fit its tag; None without one."""
    kind = str(node.tag).removeprefix(TAG)
    if isinstance(node, yaml.ScalarNode):
        return None if kind == "str" else _scalar_fault(kind, str(node.value))
    return None if kind == ("map" if isinstance(node, yaml.MappingNode) else "seq") else f"JSON has no {kind}"


def _scalar_fault(kind: str, text: str) -> str | None:
    pattern, _ = _SCALARS.get(kind, (None, ""))
    fault = None
    if pattern is None or not pattern.match(text) or (kind == "float" and not _is_finite(text)):
        fault = f"JSON has no {kind} {text[:SHOWN]}".rstrip()
    elif _ZEROS.match(text):
        fault = f"{text[:SHOWN]} begins with a zero: put it in quotes if it is text, and write a number without"
    elif kind == "int" and len(text) > MOST_DIGITS:
        fault = f"a number has at most {MOST_DIGITS} digits"
    return fault


def _is_finite(text: str) -> bool:
    return not text.lower().endswith((".inf", ".nan")) and math.isfinite(float(text))


def key_fault(key: yaml.Node) -> str | None:
    """Return the fault of a key that is not text; None without one."""
    if key.tag == TAG + "merge":
        return "mappings are not merged (<<); write the keys out"
    if not isinstance(key, yaml.ScalarNode) or key.tag != TAG + "str":
        return "a key must be text; put it in quotes"
    return None
