"""Token ids and logprobs as real engines give them (specification, "Recorded tokens")."""

import json
from pathlib import Path
from typing import Any

import pytest

from transport.dialects.llama_server import LLAMA_SERVER
from transport.dialects.recording import OF_LLAMA, OF_VLLM
from transport.dialects.vllm import VLLM
from transport.errors import MalformedFrame
from transport.events import Event, Finished, PromptRendered, TextDelta, TokensWritten, Usage
from transport.request import ChatRequest, Message, TokenDetail
from transport.stream import ChatStream

DATA = Path(__file__).parents[2] / "data" / "recording"
ASKED = ChatRequest(model="m", messages=(Message(role="user", content="hi"),), params={"seed": 3})


def of_kind(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_vllm_streams_ids_with_their_logprobs() -> None:
    """The prompt's ids come once; a frame of several tokens has the logprob of each."""
    stream = ChatStream(readers=OF_VLLM)
    events = stream.feed((DATA / "vllm.sse").read_bytes())
    assert stream.is_complete
    (prompt,) = of_kind(events, PromptRendered)
    assert (prompt.ids[:3], len(prompt.ids)) == ([91, 117, 115], 23)
    written = of_kind(events, TokensWritten)
    assert [each.ids for each in written] == [[121], [40, 70, 121]]
    assert [each.texts for each in written] == [["y"], ["(", "F", "y"]]
    assert written[1].logprobs == [-0.8756404519081116, -0.8425338864326477, -2.5557241439819336]
    assert "".join(event.text for event in of_kind(events, TextDelta)) == "y(Fy"


def test_llama_cpp_gives_all_ids_of_a_whole_answer() -> None:
    """In plain English each token has its logprob."""
    events: list[Event] = []
    assert OF_LLAMA.decode_whole((DATA / "llama-plain.json").read_bytes(), events)
    (written,) = of_kind(events, TokensWritten)
    usage = of_kind(events, Usage)[0]
    assert len(written.ids) == usage.completion_tokens == 12
    assert "".join(written.texts) == of_kind(events, TextDelta)[0].text
    assert None not in written.logprobs
    assert of_kind(events, Finished)[0].reason == "length"


def test_a_token_that_only_begins_a_character_has_no_logprob() -> None:
    """llama.cpp leaves its entry out; the others stand at their tokens."""
    events: list[Event] = []
    OF_LLAMA.decode_whole((DATA / "llama-characters.json").read_bytes(), events)
    (written,) = of_kind(events, TokensWritten)
    document = json.loads((DATA / "llama-characters.json").read_text())
    entries = document["choices"][0]["logprobs"]["content"]
    assert written.ids == document["__verbose"]["tokens"]
    known = [(id_, value) for id_, value in zip(written.ids, written.logprobs, strict=True) if value is not None]
    assert known == [(entry["id"], entry["logprob"]) for entry in entries]
    assert len(known) < len(written.ids)
    assert written.texts == []


@pytest.mark.parametrize(
    ("ids", "entries", "values"),
    [
        ([1, 2, 1], [1], [None, None, None]),  # it could be either
        ([1, 2, 1], [1, 1], [-1.0, None, -1.0]),
        ([1, 2, 3], [2], [None, -1.0, None]),
        ([1, 2], [3], [None, None]),
    ],
)
def test_an_entry_counts_where_it_can_only_stand_once(
    ids: list[int], entries: list[int], values: list[float | None]
) -> None:
    """A logprob at the wrong token would be trained on."""
    events: list[Event] = []
    content = [{"id": each, "logprob": -1.0, "token": "x"} for each in entries]
    choice = {"message": {"content": "xx"}, "finish_reason": "stop", "logprobs": {"content": content}}
    document = {"choices": [choice], "__verbose": {"tokens": ids}}
    OF_LLAMA.decode_whole(json.dumps(document).encode(), events)
    assert of_kind(events, TokensWritten)[0].logprobs == values


@pytest.mark.parametrize("ids", [[-1], [2**32], [1, -5]])
def test_what_is_no_token_id_is_refused(ids: list[int]) -> None:
    """An engine that sends one is judged as one that sends no answer."""
    frame = {"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": ids}]}
    with pytest.raises(MalformedFrame):
        OF_VLLM.decode(json.dumps(frame).encode(), [])
    whole = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "__verbose": {"tokens": ids}}
    with pytest.raises(MalformedFrame):
        OF_LLAMA.decode_whole(json.dumps(whole).encode(), [])


def test_logprobs_are_only_asked_for_where_they_are_recorded() -> None:
    """A request that does not record has no field more."""
    for dialect, fields in ((VLLM, {"return_token_ids"}), (LLAMA_SERVER, {"verbose", "return_tokens"})):
        plain, ids, both = (
            json.loads(dialect.encode(ChatRequest(model="m", messages=ASKED.messages, records=detail)))
            for detail in (None, TokenDetail.IDS, TokenDetail.LOGPROBS)
        )
        assert ids.keys() - plain.keys() == fields
        assert "logprobs" in both.keys() - ids.keys()
        assert not {"logprobs", "top_logprobs"} & ids.keys()
    assert json.loads(LLAMA_SERVER.encode(ChatRequest(model="m", messages=ASKED.messages)))["stream"] is True


def test_a_recorded_answer_has_a_frame_for_each_token() -> None:
    """In a larger one, a change of weights would count for tokens that the old ones wrote."""
    for detail, interval in ((None, 16), (TokenDetail.IDS, None)):
        asked = ChatRequest(model="m", messages=ASKED.messages, is_watched=False, records=detail)
        assert json.loads(VLLM.encode(asked)).get("stream_interval") == interval


async def test_a_prompt_is_tokenized_as_it_was_rendered() -> None:
    """With llama.cpp's own questions, since it reports the prompt's tokens decoded."""
    asked: list[tuple[str, Any]] = []

    async def post(path: str, body: bytes) -> bytes:
        asked.append((path, json.loads(body)))
        return b'{"prompt": "[user] hi"}' if path == "/apply-template" else b'{"tokens": [1, 5, 6]}'

    render, tokenize = OF_LLAMA.render, OF_LLAMA.tokenize
    assert render is not None
    assert tokenize is not None
    assert await tokenize(post, await render(post, b'{"messages": []}')) == [1, 5, 6]
    text = {"content": "[user] hi", "add_special": True, "parse_special": True}
    assert asked == [("/apply-template", {"messages": []}), ("/tokenize", text)]

    async def broken(path: str, body: bytes) -> bytes:  # noqa: ARG001 - as above
        return b"[]"

    with pytest.raises(MalformedFrame):
        await render(broken, b"{}")
    with pytest.raises(MalformedFrame):
        await tokenize(broken, "x")
