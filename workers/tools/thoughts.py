"""A model's thoughts in its text, if its engine has not kept them apart: one reader for all who read text. Pure.

Tags are those of DeepSeek, Qwen and most others (``<think>``), Magistral (``[THINK]``), Kimi (``◁think▷``) and gpt-oss
(the channel ``analysis``). A tag in quotation marks or code marks does not count.
"""

import re
from collections.abc import Iterator
from typing import Final

_TAG: Final = re.compile(
    r"<(?P<end>/?)(?:think(?:ing)?|thought|seed:think)\b[^<>]*>"
    r"|\[(?P<end_of_bracket>/?)THINK\]"
    r"|◁(?P<end_of_triangle>/?)think▷",
    re.IGNORECASE,
)
_CHANNEL: Final = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis[^<]*<\|message\|>(?P<thought>.*?)(?:<\|end\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_FINAL: Final = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>final[^<]*<\|message\|>|<\|return\|>")
_QUOTES: Final = {"`": "`", '"': '"', "'": "'", "“": "”", "«": "»"}


def split_thoughts(text: str) -> tuple[str, str]:
    """Return an answer's public text and its thoughts, joined by blank lines.

    A thought may hold another one. An end without a beginning ends a thought that the chat template had begun: all text
    before it was thought. A beginning without an end is a model that was cut off: the rest is thought.
    """
    if _TAG.search(text) is None and "<|channel|>" not in text:
        return text, ""
    public: list[str] = []
    private: list[str] = []
    if "<|channel|>" in text:
        private += [found["thought"] for found in _CHANNEL.finditer(text)]
        text = _FINAL.sub("", _CHANNEL.sub("", text))
    depth = at = 0
    for tag in _tags_in(text):
        piece, at = text[at : tag.start()], tag.end()
        if tag[0].endswith("/>"):  # begins and ends in itself
            (private if depth else public).append(piece)
        elif not (tag["end"] or tag["end_of_bracket"] or tag["end_of_triangle"]):
            (private if depth else public).append(piece)
            depth += 1
        elif depth:
            private.append(piece)
            depth -= 1
        else:
            private += ["".join((*public, piece))]
            public = []
    (private if depth else public).append(text[at:])
    return "".join(public), "\n\n".join(thought.strip() for thought in private if thought.strip())


def thought_spans(text: str) -> list[tuple[int, int]]:
    """Return the spans of an answer's thoughts, their tags included, in order."""
    if _TAG.search(text) is None and "<|channel|>" not in text:
        return []
    spans = [found.span() for found in _CHANNEL.finditer(text)] if "<|channel|>" in text else []
    depth = start = 0
    for tag in _tags_in(text):
        is_end = tag["end"] or tag["end_of_bracket"] or tag["end_of_triangle"]
        if tag[0].endswith("/>"):
            continue
        if not is_end:
            start = tag.start() if not depth else start
            depth += 1
        elif depth > 1:
            depth -= 1
        else:  # without a beginning all text before it was thought
            spans = [*spans, (start, tag.end())] if depth else [(0, tag.end())]
            depth = 0
    return sorted([*spans, (start, len(text))] if depth else spans)


def without_thoughts(text: str) -> str:
    """Return an answer's public text; one without thoughts stays as it is."""
    public = split_thoughts(text)[0]
    return text if public == text else public.strip()


def _tags_in(text: str) -> Iterator[re.Match[str]]:
    for tag in _TAG.finditer(text):
        before = text[tag.start() - 1] if tag.start() else ""
        if before not in _QUOTES or not text.startswith(_QUOTES[before], tag.end()):
            yield tag
