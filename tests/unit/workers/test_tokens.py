"""Whether the record of an answer's tokens is whole (specification, "Recorded tokens")."""

from collections.abc import Sequence

import pytest

from transport.events import PromptRendered, TokensWritten, Usage
from workers.requests.tokens import Lacking, RecordedTokens, TokenRecord, holds, is_text_of, logprobs_mode


def record(*events: TokensWritten, prompt: Sequence[int] | None = (1, 2)) -> TokenRecord:
    made = TokenRecord()
    if prompt is not None:
        made.add(PromptRendered([*prompt]))
    for event in events:
        made.add(event)
    return made


def recorded(
    made: TokenRecord, usage: Usage | None = None, *, is_text: bool = True, version: int | None = 3
) -> RecordedTokens:
    usage = usage or Usage(2, len(made.ids), 0)
    return made.recorded(usage, is_text=is_text, has_logprobs=True, version=version, reason="stop", params={})


HELLO = TokensWritten([7, 8], [-0.1, -0.2], ["hel", "lo"])


def test_a_whole_record_lacks_nothing() -> None:
    """Ids, logprobs and the version that wrote them."""
    found = recorded(record(HELLO, TokensWritten([9], [-0.3], ["!"])))
    assert (found.prompt, found.ids, found.logprobs) == ([1, 2], [7, 8, 9], [-0.1, -0.2, -0.3])
    assert (found.partial, found.versions) == ((), [(3, 0, 3)])


@pytest.mark.parametrize(
    ("made", "usage", "is_text", "lacking"),
    [
        (record(HELLO, prompt=None), None, True, Lacking.PROMPT),
        (record(HELLO), Usage(3, 2, 0), True, Lacking.PROMPT),
        (record(HELLO), Usage(2, 3, 0), True, Lacking.IDS),
        (record(HELLO), None, False, Lacking.IDS),
        (record(TokensWritten([7], None, [])), None, True, Lacking.LOGPROBS),
        (record(TokensWritten([7, 8], [None, -1.0], [])), None, True, Lacking.LOGPROBS),
    ],
)
def test_what_is_not_whole_is_named(made: TokenRecord, usage: Usage | None, is_text: bool, lacking: Lacking) -> None:
    """By the counts of the engine, and by the text."""
    assert recorded(made, usage, is_text=is_text).partial == (lacking,)


def test_versions_are_spans_of_the_tokens_that_they_wrote() -> None:
    """A change before the first token leaves none of the old one's."""
    made = record(HELLO)
    made.note_weights(1)
    made.add(TokensWritten([9], [-0.3], ["!"]))
    assert recorded(made, version=2).versions == [(1, 0, 2), (2, 2, 3)]
    fresh = record()
    fresh.note_weights(1)
    fresh.add(HELLO)
    assert recorded(fresh, version=2).versions == [(2, 0, 2)]
    assert recorded(fresh, version=None).versions == []


@pytest.mark.parametrize(
    ("texts", "text", "stops", "reason", "is_it"),
    [
        (["a", "b"], "ab", (), "length", True),
        (["a", "b", "<|end|>"], "ab", (), "stop", True),
        (["a", "b", "<|end|>"], "ab", (), "length", False),
        (["a", "b", "."], "a", ("b.",), "stop", True),
        (["a", "b", "."], "a", (), "stop", False),
        (["a", "b", "c"], "a", (), "stop", False),
        ([" a", "b"], "ab", (), "stop", True),
        (["a", "\ufffd"], "a", (), "length", True),
        ([], "", (), "stop", True),
        (["a"], "b", (), "stop", False),
    ],
)
def test_ids_decode_to_the_text(texts: list[str], text: str, stops: Sequence[str], reason: str, is_it: bool) -> None:
    """An end, a stop word and half a character may follow; nothing else may."""
    assert is_text_of("".join(texts), "".join(texts[:-1]), text, stops, reason) is is_it
    made = record(TokensWritten([*range(len(texts))], None, texts))
    assert made.decodes_to(text, stops, reason) is is_it


def test_without_the_texts_of_all_tokens_the_engine_is_asked() -> None:
    """One frame without them is enough."""
    made = record(HELLO, TokensWritten([9], None, []))
    assert not made.decodes_to("hello", (), "stop")


def test_thoughts_and_calls_stand_in_the_decoded_ids_in_order() -> None:
    """The server has taken them out of the text."""
    decoded = '<think>so</think>\nyes <tool_call>{"name": "look"}</tool_call>'
    assert holds(decoded, ["so", "yes"])
    assert not holds(decoded, ["yes", "so"])
    assert not holds(decoded, ["no"])


def test_the_mode_of_logprobs_is_the_engines() -> None:
    """VLLM has a flag for it, in either spelling."""
    assert logprobs_mode({}) == "raw"
    assert logprobs_mode({"logprobs-mode": "processed_logprobs"}) == "processed"
    assert logprobs_mode({"logprobs_mode": "raw_logits"}) == "raw_logits"
