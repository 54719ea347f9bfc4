"""A second answer is joined to a stream that broke off, in each form, wherever it broke off."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from transport.dialects.frame_parts import COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH
from transport.dialects.openai import CHAT_PATH
from transport.request import BegunAnswer
from workers.requests.answer_begins import again
from workers.requests.halves import GoingOn, HalfAnswer
from workers.requests.sent import HeldFrames, SentStream
from workers.requests.splice import Splice

Frame = dict[str, Any]
NOTHING = HalfAnswer()
DETAILS, CACHED = "prompt_tokens_details", "cache_read_input_tokens"


def chat(delta: Frame, finish: str | None = None) -> Frame:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call(arguments: str, name: str | None = None, **more: object) -> Frame:
    function = {"arguments": arguments} if name is None else {"arguments": arguments, "name": name}
    return chat({"tool_calls": [{"index": 0, **more, "function": function}]})


def block(index: int, kind: str, field: str, pieces: list[str], **opened: object) -> list[Frame]:
    start = {"type": "content_block_start", "index": index, "content_block": {"type": kind, **opened}}
    name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[field]
    said = [{"type": field, name: piece} for piece in pieces]
    deltas = [{"type": "content_block_delta", "index": index, "delta": delta} for delta in said]
    return [start, *deltas, {"type": "content_block_stop", "index": index}]


def messages(answer_id: str, call_id: str) -> list[Frame]:
    """Anthropic's own example of a stream with a thought, words and a call."""
    tool: Frame = {"id": call_id, "name": "get_weather", "input": {}}
    usage = {"input_tokens": 472, "output_tokens": 2}
    return [
        {"type": "message_start", "message": {"id": answer_id, "role": "assistant", "content": [], "usage": usage}},
        *block(0, "thinking", "thinking_delta", ["Let me", " look."], thinking=""),
        *block(1, "text", "text_delta", ["Okay", ",", " let", "'s", " check"], text=""),
        *block(2, "tool_use", "input_json_delta", ["", '{"location":', ' "San', " Francisc", 'o"}'], **tool),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 89}},
        {"type": "message_stop"},
    ]


def responses(answer_id: str, item_id: str, call_id: str) -> list[Frame]:
    """A stream of words and a call, as vLLM sends it."""
    made = {"id": answer_id, "object": "response", "status": "in_progress"}
    text, part = "The moon is", {"type": "output_text", "annotations": [], "text": ""}
    message = {"id": item_id, "type": "message", "role": "assistant", "content": []}
    called = {"id": f"fc_{call_id}", "call_id": call_id, "type": "function_call", "name": "look", "arguments": ""}
    at = {"item_id": item_id, "output_index": 0, "content_index": 0}
    asked = {"item_id": f"fc_{call_id}", "output_index": 1}
    whole = [{**message, "content": [{**part, "text": text}]}, {**called, "arguments": '{"at": 1}'}]
    frames: list[Frame] = [
        {"type": "response.created", "response": made},
        {"type": "response.in_progress", "response": made},
        {"type": "response.output_item.added", "output_index": 0, "item": message},
        {"type": "response.content_part.added", **at, "part": part},
        *({"type": "response.output_text.delta", **at, "delta": piece} for piece in ("The", " moon", " is")),
        {"type": "response.output_text.done", **at, "text": text},
        {"type": "response.content_part.done", **at, "part": {**part, "text": text}},
        {"type": "response.output_item.done", "output_index": 0, "item": whole[0]},
        {"type": "response.output_item.added", "output_index": 1, "item": called},
        *({"type": "response.function_call_arguments.delta", **asked, "delta": piece} for piece in ('{"at"', ": 1}")),
        {"type": "response.function_call_arguments.done", **asked, "arguments": '{"at": 1}'},
        {"type": "response.output_item.done", "output_index": 1, "item": whole[1]},
        {"type": "response.completed", "response": {**made, "status": "completed", "output": whole}},
    ]
    return [{**frame, "sequence_number": number} for number, frame in enumerate(frames)]


def chats(answer_id: str, call_id: str) -> list[Frame]:
    frames = [
        chat({"role": "assistant", "content": ""}),
        *(chat({"reasoning_content": piece}) for piece in ("Let me", " look.")),
        *(chat({"content": piece}) for piece in ("Okay", ",", " let")),
        call("", id=call_id, type="function", name="look"),
        *(call(piece) for piece in ('{"at"', ": ", "1}")),
        chat({}, "tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}},
    ]
    return [{"id": answer_id, "created": len(answer_id), **frame} for frame in frames]


def completions(answer_id: str) -> list[Frame]:
    frames: list[Frame] = [{"choices": [{"index": 0, "text": piece}]} for piece in ("Once", " upon", " a")]
    frames.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    return [{"id": answer_id, **frame} for frame in frames]


STREAMS = {
    CHAT_PATH: (chats("1", "c1"), chats("22", "c2")),
    COMPLETIONS_PATH: (completions("1"), completions("2")),
    MESSAGES_PATH: (messages("msg_1", "toolu_1"), messages("msg_2", "toolu_2")),
    RESPONSES_PATH: (responses("resp_1", "msg_1", "c1"), responses("resp_2", "msg_2", "c2")),
}
NAMES = {'"id": "1", "created": 1': '"id": "22", "created": 2', "toolu_1": "toolu_2", "resp_1": "resp_2"}
NAMES |= {'"c1"': '"c2"', '"fc_c1"': '"fc_c2"', '"id": "1", "choices"': '"id": "2", "choices"', "msg_1": "msg_2"}
BREAKS = [(path, at) for path, (first, _) in STREAMS.items() for at in range(len(first))]


def encoded(frames: list[Frame]) -> bytes:
    def kind(frame: Frame) -> bytes:
        return b"event: %b\n" % frame["type"].encode() if "type" in frame else b""

    return b"".join(kind(frame) + b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames)


def decoded(sent: bytes) -> list[Frame]:
    lines = sent.splitlines()
    for kind, data in pairwise(lines):
        if kind.startswith(b"event: "):
            assert json.loads(data[6:])["type"] == kind[7:].decode()
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


class Client:
    """What a client of a stream has received."""

    def __init__(self, path: str, frames: list[Frame]) -> None:
        self.sent = SentStream(path)
        self.bytes = b""
        self.pass_frames("text/event-stream", encoded(frames))
        self.sent.catch_up()
        assert self.sent.fault is None

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        assert content_type == "text/event-stream"
        self.bytes += frames
        self.sent.add(frames)

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        raise AssertionError((status, content_type, body))

    def join(self, frames: list[Frame], going_on: GoingOn) -> Splice:
        splice = Splice(self, self.sent, going_on)
        for frame in frames:
            splice.pass_frames("text/event-stream", encoded([frame]))
        return splice


@pytest.mark.parametrize("is_handed_over", [False, True], ids=["the same program", "the next program"])
@pytest.mark.parametrize(("path", "at"), BREAKS)
def test_an_answer_that_is_written_again_goes_on_after_any_frame(path: str, at: int, *, is_handed_over: bool) -> None:
    """The client has the first stream, frame for frame, with the names that the first server made up."""
    first, second = STREAMS[path]
    client = Client(path, first[:at])
    if is_handed_over:
        document = msgspec.json.encode(client.sent.hand_over())
        client.sent = SentStream(path)
        client.sent.take_over(msgspec.json.decode(document, type=HeldFrames))
    assert not client.join(second, again(NOTHING)).has_strayed
    received = json.dumps(decoded(client.bytes))
    for ours, others in NAMES.items():
        assert not (ours in received and others in received), "each block has one name"
        received = received.replace(others, ours)
    got = [each for each in json.loads(received) if not is_empty(each)]
    assert got == [each for each in first if not is_empty(each)]
    client.sent.catch_up()
    assert client.sent.words == Client(path, first).sent.words
    assert client.sent.closed == Client(path, first).sent.closed


def is_empty(frame: Frame) -> bool:
    """A piece without words may be dropped."""
    return frame.get("delta") == {"type": "input_json_delta", "partial_json": ""}


@pytest.mark.parametrize(("path", "at"), BREAKS)
def test_pieces_of_other_sizes_are_joined(path: str, at: int) -> None:
    """Servers send several tokens in a frame when their client is slow; the words are the same."""
    first, second = STREAMS[path]
    client = Client(path, first[:at])
    whole = Client(path, first).sent.words
    assert not client.join(merged(second), again(NOTHING)).has_strayed
    client.sent.catch_up()
    assert client.sent.words == whole


def merged(frames: list[Frame]) -> list[Frame]:
    """Join each two neighbouring pieces of chats and blocks."""
    kept: list[Frame] = []
    for frame in frames:
        before = kept[-1] if kept else {}
        if frame.get("type") == before.get("type") == "content_block_delta":
            field = next(name for name in frame["delta"] if name != "type")
            delta = {**frame["delta"], field: before["delta"][field] + frame["delta"][field]}
            kept[-1] = {**frame, "delta": delta}
        elif isinstance(frame.get("delta"), str) and frame["type"] == before["type"]:
            kept[-1] = {**frame, "delta": before["delta"] + frame["delta"]}
        else:
            kept.append(frame)
    return kept


@pytest.mark.parametrize("path", STREAMS)
def test_no_word_of_another_answer_is_passed(path: str) -> None:
    """Once they differ nothing more is passed, and the engine is stopped."""
    first, second = STREAMS[path]
    at = len(first) - 2
    client = Client(path, first[:at])
    before, stops = client.bytes, []
    altered = json.loads(json.dumps(second).replace("upon", "atop").replace("Okay", "Well").replace("moon", "mood"))
    splice = Splice(client, client.sent, again(NOTHING))
    splice.stop = lambda: stops.append(True)
    for frame in altered:
        splice.pass_frames("text/event-stream", encoded([frame]))
    assert splice.has_strayed
    assert stops
    assert client.bytes == before


@pytest.mark.parametrize(
    ("path", "shorter"),
    [
        (CHAT_PATH, [chat({"content": "Okay"}), chat({}, "stop")]),
        (CHAT_PATH, [call("", id="c2", name="listen")]),
        (CHAT_PATH, [chat({"audio": {"data": "x"}})]),
        (CHAT_PATH, [*chats("2", "c2")[:3], chat({"content": "Okay, let us"})]),
        (MESSAGES_PATH, [block(0, "text", "text_delta", ["Hm"], text="")[0]]),
        (MESSAGES_PATH, [*block(0, "thinking", "thinking_delta", ["Let"], thinking="")]),
        (RESPONSES_PATH, [{"type": "response.failed", "response": {}}]),
    ],
    ids=[
        "it ends too soon",
        "another call",
        "an unknown part",
        "more words before a call",
        "another block",
        "a shorter block",
        "a failure",
    ],
)
def test_an_answer_of_another_form_strays(path: str, shorter: list[Frame]) -> None:
    """Nothing is guessed: what cannot be compared is not joined."""
    first, _ = STREAMS[path]
    client = Client(path, first[:-2])
    before = client.bytes
    assert client.join(shorter, again(NOTHING)).has_strayed
    assert client.bytes == before


@pytest.mark.parametrize(
    ("path", "opened", "end"),
    [
        (CHAT_PATH, [chat({"content": "So"}), call("", id="c1", name="look")], [chat({}, "stop")]),
        (CHAT_PATH, [chat({"content": "So"}), call("", id="c1", name="look")], [chat({"content": " be it"})]),
        (
            MESSAGES_PATH,
            [messages("1", "")[0], *block(0, "tool_use", "input_json_delta", [], id="t", name="look")[:1]],
            messages("2", "")[-2:],
        ),
    ],
)
def test_a_call_of_which_only_the_name_was_sent_is_not_dropped(
    path: str, opened: list[Frame], end: list[Frame]
) -> None:
    """Its client would wait for the rest, or take it for a whole one."""
    client = Client(path, opened)
    before = client.bytes
    said = [chat({"content": "So"})] if path == CHAT_PATH else []
    assert client.join([*said, *end], again(NOTHING)).has_strayed
    assert client.bytes == before


@pytest.mark.parametrize("data", [b'data:{"choices": []}', b"data: x", b'data: {"choices": []}\ndata: {}'], ids=repr)
def test_frames_are_read_as_the_format_allows_or_not_joined(data: bytes) -> None:
    """The blank after the colon is optional; what is no document is never passed unread."""
    client = Client(CHAT_PATH, [chat({"content": "So"})])
    splice = client.join([chat({"content": "So"})], again(NOTHING))
    splice.pass_frames("text/event-stream", b'data:{"choices":[{"index":0,"delta":{"content":" it"}}]}\n\n')
    assert decoded(client.bytes)[-1]["choices"][0]["delta"] == {"content": " it"}
    before = client.bytes
    splice.pass_frames("text/event-stream", data + b"\n\n")
    assert splice.has_strayed == (data != b'data:{"choices": []}')
    assert client.bytes == before or not splice.has_strayed


def test_nothing_is_joined_to_an_error_of_the_engine() -> None:
    """It is the last event of a stream; clients stop there."""
    client = Client(CHAT_PATH, [chat({"content": "So"})])
    client.pass_frames("text/event-stream", encoded([{"error": {"message": "Compute error."}}]))
    client.sent.catch_up()
    assert client.sent.fault is not None


@pytest.mark.parametrize(
    ("path", "account", "shown"),
    [
        (
            CHAT_PATH,
            {
                "choices": [],
                "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}},
            },
            {"prompt_tokens": 7, "completion_tokens": 5, DETAILS: {"cached_tokens": 7}},
        ),
        (
            MESSAGES_PATH,
            {
                "type": "message_delta",
                "delta": {},
                "usage": {"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 3},
            },
            {"input_tokens": 0, CACHED: 7, "output_tokens": 5},
        ),
    ],
)
def test_no_more_of_a_prompt_is_cached_than_it_has(path: str, account: Frame, shown: Frame) -> None:
    """The engine that goes on may have the half in its cache, which is no part of the prompt."""
    opening = [chat({"content": "So"})] if path == CHAT_PATH else messages("1", "")[:1]
    client = Client(path, opening)
    begun = BegunAnswer(text="So" if path == CHAT_PATH else "")
    client.join([*opening[path == CHAT_PATH :], account], GoingOn(begun=begun, tokens=2, echoes=False))
    assert decoded(client.bytes)[-1]["usage"] == shown


@pytest.mark.parametrize("repeats", [True, False])
def test_a_block_goes_on_from_its_words(*, repeats: bool) -> None:
    """An engine that was given the beginning repeats it, or writes only the rest; the account is that of one answer."""
    text = block(0, "text", "text_delta", ["Okay", ",", " let", "'s"], text="")
    opening = messages("msg_1", "")[0]
    client = Client(MESSAGES_PATH, [opening, *text[:3]])
    rest = block(0, "text", "text_delta", ["Okay, let", "'s"] if repeats else [" let", "'s"], text="")
    end = [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}]
    begun = BegunAnswer(text="Okay,")
    splice = client.join([opening, *rest, *end], GoingOn(begun=begun, tokens=2, echoes=repeats))
    assert not splice.has_strayed
    client.sent.catch_up()
    assert client.sent.words == {("block", 0, "text"): "Okay, let's"}
    kinds = [frame["type"] for frame in decoded(client.bytes)]
    assert [kinds.count(kind) for kind in ("message_start", "content_block_start", "content_block_stop")] == [1, 1, 1]
    assert decoded(client.bytes)[-1]["usage"] == {"output_tokens": 4}


def test_words_with_their_probabilities_are_not_cut() -> None:
    """A frame of two tokens of which the client has one would give it the first one's probability again."""
    client = Client(COMPLETIONS_PATH, [{"choices": [{"index": 0, "text": "Once", "logprobs": {"tokens": ["Once"]}}]}])
    joint = {"choices": [{"index": 0, "text": "Once upon", "logprobs": {"tokens": ["Once", " upon"]}}]}
    assert client.join([joint], again(NOTHING)).has_strayed


def test_a_long_stream_is_read_as_it_comes() -> None:
    """Its frames are not kept."""
    client = Client(CHAT_PATH, [])
    for _ in range(40):
        client.pass_frames("text/event-stream", encoded([chat({"content": "x" * 200})] * 200))
        assert client.sent.unread_bytes <= 600_000
    client.sent.catch_up()
    assert client.sent.words == {("content",): "x" * 200 * 8000}
