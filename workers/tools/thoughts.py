"""A model's thoughts in its text, if its engine has not kept them apart: one reader for all who read text. Pure.

Tags are those of DeepSeek, Qwen and most others (``<think>``), Magistral (``[THINK]``), Kimi (``◁think▷``) and gpt-oss
(the channel ``analysis``). A tag in quotation marks or code marks does not count.
"""

import re
from collections.abc import Iterator
from typing import Final

_TAG: Final = re.compile(
    r"</?(?:think(?:ing)?|thought|seed:think)\b[^<>]*>|\[/?THINK\]|◁/?think▷",
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
    for tag, step in _tags_in(text):
        (private if depth else public).append(text[at : tag.start()])
        at = tag.end()
        if depth + step < 0:
            private.append("".join(public))
            public = []
        depth = max(depth + step, 0)
    (private if depth else public).append(text[at:])
    return "".join(public), "\n\n".join(thought.strip() for thought in private if thought.strip())


def thought_spans(text: str) -> list[tuple[int, int]]:
    """Return the spans of an answer's thoughts, their tags included, in order."""
    if _TAG.search(text) is None and "<|channel|>" not in text:
        return []
    spans = [found.span() for found in _CHANNEL.finditer(text)] if "<|channel|>" in text else []
    depth = start = 0
    for tag, step in _tags_in(text):
        if depth + step < 0:
            spans = [(0, tag.end())]
        elif step and depth + step == 0:
            spans = [*spans, (start, tag.end())]
        elif not depth:
            start = tag.start()
        depth = max(depth + step, 0)
    return sorted([*spans, (start, len(text))] if depth else spans)


def without_thoughts(text: str) -> str:
    """Return an answer's public text; one without thoughts stays as it is."""
    public = split_thoughts(text)[0]
    return text if public == text else public.strip()


def _tags_in(text: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yield the tags, each with its step in depth: 1 begins a thought, -1 ends one, 0 does both."""
    for tag in _TAG.finditer(text):
        before = text[tag.start() - 1] if tag.start() else ""
        if before not in _QUOTES or not text.startswith(_QUOTES[before], tag.end()):
            yield tag, 0 if tag[0].endswith("/>") else -1 if tag[0][1] == "/" else 1
