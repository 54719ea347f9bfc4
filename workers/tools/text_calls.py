"""Calls that models write as text, in the forms that their chat templates teach them. Pure.

Hermes and Qwen: ``<tool_call>JSON</tool_call>``, and ``<function=NAME>`` with parameters in tags. Mistral:
``[TOOL_CALLS]`` before a list, or before ``NAME[ARGS]JSON``. Llama: ``<|python_tag|>`` before JSON with ``parameters``,
``<function=NAME>JSON</function>``, and as a whole answer JSON or ``[NAME(KEY=VALUE)]``.

A call counts if it is the whole text, or stands within such marks. In a thought, a fence, code marks, a quotation, a
result, ``<answer>`` or ``<observation>`` it is text about a call. Its arguments are taken as written.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

_QUOTED: Final = (
    r"(?P<quoted>(?P<fence>`{3,}|~{3,}).*?(?:(?P=fence)|\Z)|`[^`\n]+`|^[ \t]*>[^\n]*|<!--.*?(?:-->|\Z)"
    r"|<(?P<around>answer|speak|observation|tool_response|tool_result)\b[^<>]*>.*?(?:</(?P=around)>|\Z))"
)
_MARKED: Final = re.compile(
    _QUOTED + r"|(?P<call><tool_call>(?P<hermes>.*?)(?P<end>(?:</tool_call>|\Z))"
    r"|<function=(?P<name>[^<>\s]+)>(?P<function>.*?)(?P<end_of_function>(?:</function>|\Z))"
    r"|(?P<mark>\[TOOL_CALLS\]|<\|python_tag\|>|<\|python_start\|>))",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_REQUEST: Final = re.compile(
    _QUOTED + r"|(?P<call><tool_request\b(?P<attributes>[^<>]*)>(?P<arguments>.*?)(?P<end>(?:</tool_request>|\Z)))",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_PARAMETER: Final = re.compile(r"<parameter=(?P<key>[^<>\s]+)>\n?(?P<value>.*?)(?:\n?</parameter>|\Z)", re.DOTALL)
_FUNCTION: Final = re.compile(r"<function=(?P<name>[^<>\s]+)>(?P<function>.*)(?:</function>|\Z)", re.DOTALL)
_NAMED: Final = re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?(?=\{)")
_NAME: Final = re.compile(r"""\bname\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_FENCE: Final = re.compile(r"\A```(?:json)?[^\S\n]*\n(?P<body>.*)\n```\Z", re.DOTALL)
_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|python_end|>", "</s>")
_QUOTES: Final = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»"}  # noqa: RUF001 - quotation marks
_GAP: Final = re.compile(r"[ \t\r\n;,]*")
# Beginnings of calls: the above, and those of DeepSeek, Kimi, Granite, MiniMax, gpt-oss, Gemma and GLM.
_LIKE: Final = re.compile(
    r"<tool_call>|<function=|\[TOOL_CALLS\]|<\|python_(?:tag|start)\|>|<tool_request\b[^<>]*>|<[|｜]tool"  # noqa: RUF001
    r"|<minimax:tool_call>|\bto=functions\.|```tool_code",
    re.IGNORECASE,
)
MOST_CALLS: Final = 1000
MOST_CHARS: Final = 1024 * 1024  # longest text that is searched for calls: the search holds the event loop
MOST_PYTHON_CHARS: Final = 16 * 1024
Written = tuple[str, str]  # a name, and arguments as written
Spans = Sequence[tuple[int, int]]


class CallsInWords(msgspec.Struct, frozen=True):
    """The calls of a message, and the text beside them; ``is_open``: the last call has no end mark."""

    calls: list[Written]
    beside: str = ""
    is_open: bool = False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_read = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode


def requests_in(text: str, thoughts: Spans) -> CallsInWords:
    """Return the calls of agent markup, ``<tool_request name="T">ARGS</tool_request>``."""

    def read(found: re.Match[str]) -> tuple[list[Written], int, bool]:
        named = _NAME.search(found["attributes"])
        name = (named[1] or named[2] or "") if named else ""
        return [(name, found["arguments"].strip())], found.end(), not found["end"]

    return _calls_by(_REQUEST, read, text, thoughts)


def marked_calls_in(text: str, thoughts: Spans) -> CallsInWords:
    """Return the calls within a model's own marks; marks inside a JSON text are quoted, and no calls."""
    if _documents_in(text.strip()) is not None:
        return CallsInWords([], text)

    def read(found: re.Match[str]) -> tuple[list[Written], int, bool]:
        if found["mark"] is not None:
            calls, end = _behind_mark(text, found.end())
            return calls, end, False
        if found["hermes"] is not None:
            return _hermes_calls(found["hermes"].strip()), found.end(), not found["end"]
        return _function_call(found["name"], found["function"]), found.end(), not found["end_of_function"]

    return _calls_by(_MARKED, read, text, thoughts)


def _calls_by(
    pattern: re.Pattern[str],
    read: Callable[[re.Match[str]], tuple[list[Written], int, bool]],
    text: str,
    thoughts: Spans,
) -> CallsInWords:
    calls: list[Written] = []
    beside: list[str] = []
    at, is_open = 0, False
    left = iter(thoughts)
    thought = next(left, None)
    while len(calls) < MOST_CALLS and (found := pattern.search(text, at)) is not None:
        while thought is not None and thought[1] <= found.start():
            thought = next(left, None)
        if thought is not None and thought[0] <= found.start():
            beside.append(text[at : thought[1]])
            at = thought[1]
            continue
        new, end, has_no_end = ([], found.end(), False) if found["quoted"] is not None else read(found)
        if not new or _is_in_quotes(text, found.start(), end):
            beside.append(text[at:end])
        else:
            beside.append(text[at : found.start()])
            calls += new
            is_open = has_no_end
        at = end
    beside.append(text[at:])
    return CallsInWords(calls, without_ends("".join(beside)), is_open) if calls else CallsInWords([], text)


def whole_calls_in(text: str, thoughts: Spans, names: Collection[str]) -> CallsInWords:
    """Return the calls of a text that consists only of calls; ``names`` are the available tools.

    Thoughts may precede them. A fence may only enclose the form that the prompt describes (``tool_calls``).
    """
    at = 0
    for start, end in thoughts:
        if text[at:start].strip():
            break
        at = end
    for body in dict.fromkeys((without_ends(text), without_ends(text[at:]))):
        calls = _whole_calls(body, names)
        if calls:
            return CallsInWords(calls)
    return CallsInWords([], text)


def _whole_calls(body: str, names: Collection[str]) -> list[Written]:
    fenced = _FENCE.match(body)
    documents = _documents_in(fenced["body"].strip() if fenced else body)
    if documents is None:
        return [] if fenced else _python_calls_in(body, names)
    is_announced = [isinstance(each, Mapping) and isinstance(each.get("tool_calls"), list) for each in documents]
    if fenced and not all(is_announced):
        return []
    calls: list[Written] = []
    for document, announced in zip(documents, is_announced, strict=True):
        found = list(_entries(document["tool_calls"] if announced else document, None if announced else names))
        if not found:
            return []
        calls += found
    return calls


def looks_like_call(words: str, names: Collection[str]) -> bool:
    """Whether a text may be meant as a call, in a form that is read or in that of another model."""
    if len(words) > MOST_CHARS:
        return False
    fenced = _FENCE.match(words.strip())
    return _LIKE.search(words) is not None or (fenced is not None and bool(_whole_calls(fenced["body"].strip(), names)))


def without_ends(text: str) -> str:
    """Return a text without surrounding blanks and the marks that end a model's turn."""
    text = text.strip()
    while (end := next((each for each in _ENDS if text.endswith(each)), None)) is not None:
        text = text.removesuffix(end).rstrip()
    return text


def _is_in_quotes(words: str, start: int, end: int) -> bool:
    before = words[start - 1] if start else ""
    return before in _QUOTES and words.startswith(_QUOTES[before], end)


def _hermes_calls(body: str) -> list[Written]:
    """Return the calls between two marks: JSON, or a function with its parameters in tags."""
    documents = _documents_in(body)
    if documents is not None:
        return [call for each in documents for call in _entries(each, None)]
    whole = _FUNCTION.fullmatch(body)
    return _function_call(whole["name"], whole["function"]) if whole is not None else []


def _behind_mark(text: str, at: int) -> tuple[list[Written], int]:
    """Return the calls after a mark without an end of its own, and where they end."""
    calls: list[Written] = []
    while len(calls) < MOST_CALLS:
        start = _past_gap(text, at)
        named = _NAMED.match(text, start)
        try:
            value, end = _read(text, named.end() if named else start)
        except (ValueError, RecursionError):
            break
        found = [(named["name"], json.dumps(value))] if named else list(_entries(value, None))
        if not found:
            break
        calls += found
        at = end
    behind = _past_gap(text, at)
    return calls, next((behind + len(each) for each in _ENDS if text.startswith(each, behind)), at)


def _past_gap(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    return at if gap is None else gap.end()


def _function_call(name: str, body: str) -> list[Written]:
    parameters = {each["key"]: _plain_value(each["value"]) for each in _PARAMETER.finditer(body)}
    if parameters or not body.strip():
        return [(name, json.dumps(parameters))]
    documents = _documents_in(body.strip())
    return [(name, json.dumps(documents[0]))] if documents and isinstance(documents[0], dict) else []


def _plain_value(text: str) -> object:
    """Return a parameter's value: parsed if it is JSON, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _documents_in(body: str) -> list[Any] | None:
    """Return the JSON values that make up a text, one or several; None if it holds anything else."""
    documents: list[Any] = []
    at = 0
    while at < len(body) and len(documents) < MOST_CALLS:
        try:
            value, at = _read(body, at)
        except (ValueError, RecursionError):
            return None
        documents.append(value)
        at = _past_gap(body, at)
    return documents or None


def _entries(document: object, names: Collection[str] | None) -> Iterator[Written]:
    """Yield name and arguments of each call; unannounced ones must be of ``names``, with arguments."""
    for entry in document if isinstance(document, list) else [document]:
        call = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if isinstance(call, str) and isinstance(entry, Mapping):  # {"function": NAME, "parameters": …}
            call = {**entry, "name": call}
        name = call.get("name") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(name, str):
            continue
        given = next((key for key in ("arguments", "parameters") if key in call), None)
        if names is None or (name in names and given is not None):
            arguments = call[given] if given is not None else {}
            yield name, arguments if isinstance(arguments, str) else json.dumps(arguments)


def _python_calls_in(body: str, names: Collection[str]) -> list[Written]:
    """Return the calls of a text that is a list such as ``[add(a=1), find(q="x")]``."""
    if not (body.startswith("[") and body.endswith(")]")) or len(body) > MOST_PYTHON_CHARS:
        return []
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    calls: list[Written] = []
    for call in tree.elts if isinstance(tree, ast.List) else ():
        if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) not in names:
            return []
        try:
            values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords if each.arg}
            calls.append((ast.unparse(call.func), json.dumps(values)))
        except (ValueError, TypeError, RecursionError):
            return []
    return calls
