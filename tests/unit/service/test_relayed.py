"""How the service reads a client's request and recognises the client's program (specification, "Front door")."""

import json

import pytest

from service.api.errors.forms import ClientError, error_of_failure
from service.api.openai.envelope import CHUNK, Envelope, open_envelope
from service.conversations.job.job import JobId, TurnKey
from service.errors import BodyMalformed
from service.scheduling.core.queue.affinity import CacheLocation
from service.scheduling.keeping.request import RelayFailure
from service.scheduling.keeping.requests import AnsweredProgram, Programs
from workers.outcome import FailureReason
from workers.requests.relay import Renaming

CHAT = "/v1/chat/completions"
SAID = (("system", "S"), ("user", "Hi"), ("assistant", "A"), ("user", "M"))
SYSTEM, HI, ANSWER, MORE = ({"role": role, "content": text} for role, text in SAID)


class Kept:
    """A passage that keeps its stream."""

    def __init__(self) -> None:
        self.frames = b""

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        assert content_type == "text/event-stream"
        self.frames += frames

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        raise AssertionError((status, content_type, body))


def envelope(session: str | None = None, path: str = CHAT, **body: object) -> Envelope:
    return open_envelope(json.dumps({"model": "m", **body}).encode(), path, session)


def answered(worker: str) -> AnsweredProgram:
    return AnsweredProgram(TurnKey(JobId("r"), "0", "request", 0), CacheLocation(worker=worker), 0.0)


def found(earlier: Envelope, later: Envelope) -> bool:
    """Whether the later request is known to extend the earlier one."""
    programs = Programs()
    programs.note(earlier.marks[0], answered("w"))
    return programs.find(later.marks) is not None


def test_the_envelope_holds_what_routing_needs() -> None:
    """The model, whether the answer streams, and the slots and tokens it takes."""
    read = envelope(stream=True, n=3, max_tokens=9, max_completion_tokens=7, messages=[HI], logit_bias={"1": 2})
    assert (read.model, read.is_streamed, read.answers, read.most_tokens) == ("m", True, 3, 7)
    assert read.chars == len(json.dumps([HI]))
    several = envelope(path="/v1/completions", prompt=["a", "b"], n=2)
    assert several.answers == 4
    assert envelope(path="/v1/completions", prompt=[1, 2, 3]).answers == 1  # one prompt, as tokens


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"{", b'{"n": "two"}', b'{"n": -1}', b'{"model": 7}'])
def test_a_request_that_cannot_be_routed_is_refused(body: bytes) -> None:
    """Everything else is for the engine to judge."""
    with pytest.raises(BodyMalformed):
        open_envelope(body, CHAT, None)


def test_a_picture_is_not_counted_as_words() -> None:
    """Megabytes of base64 would count as a prompt that fits no cache."""
    url = "data:image/png;base64," + "QUJD" * 500_000
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    assert envelope(messages=[{"role": "user", "content": parts}]).chars < 5000


def test_a_longer_conversation_is_the_same_program() -> None:
    """It matches by whole earlier messages; a changed message ends the match."""
    first = envelope(messages=[SYSTEM, HI])
    assert found(first, envelope(messages=[SYSTEM, HI, ANSWER, MORE]))
    assert found(first, first)
    assert not found(first, envelope(messages=[SYSTEM, MORE, ANSWER, HI]))
    assert not found(first, envelope(messages=[SYSTEM]))
    assert not found(first, envelope(messages=[SYSTEM, HI, ANSWER], model="other"))
    assert not found(first, envelope(messages=[SYSTEM, HI, ANSWER], tools=[{}]))


def test_a_longer_text_is_the_same_program() -> None:
    """It matches up to the last whole chunk of the earlier text."""
    text = "".join(f"sentence {number}. " for number in range(200))
    first = envelope(path="/v1/completions", prompt=text)
    assert found(first, envelope(path="/v1/completions", prompt=text + " And more."))
    assert not found(first, envelope(path="/v1/completions", prompt="X" + text))
    assert envelope(path="/v1/completions", prompt="x" * (CHUNK // 2)).marks == ()


def test_a_named_program_needs_nothing_in_common() -> None:
    """The session's name counts first, then the key of the cache."""
    assert found(envelope("s1", messages=[HI]), envelope("s1", messages=[MORE]))
    assert not found(envelope("s1", messages=[HI]), envelope("s2", messages=[HI]))
    key = {"prompt_cache_key": "s1"}
    assert found(envelope(messages=[HI], **key), envelope(messages=[MORE], **key))
    assert not found(envelope(messages=[HI], **key), envelope("s1", messages=[HI]))


def test_a_session_name_belongs_to_its_key_and_words_to_every_key() -> None:
    """Clients of two keys may use the same name for their programs, and begin with the same words."""
    body = json.dumps({"model": "m", "messages": [HI]}).encode()
    for session, is_shared in (("1", False), (None, True)):
        ours, theirs = (open_envelope(body, CHAT, session, owner) for owner in ("alice", "bob"))
        assert found(ours, theirs) is is_shared


def test_the_longest_common_prompt_wins() -> None:
    """Of several earlier requests, the one with the longest common part is taken."""
    programs = Programs()
    for worker, messages in (("short", [SYSTEM, HI]), ("long", [SYSTEM, HI, ANSWER, MORE])):
        programs.note(envelope(messages=messages).marks[0], answered(worker))
    assert programs.find(envelope(messages=[SYSTEM, HI, ANSWER, MORE, ANSWER]).marks) == answered("long")


def test_only_the_newest_programs_are_remembered() -> None:
    """Memory is bounded; a program that is asked for again stays."""
    programs = Programs(most=2)
    for mark in (b"a", b"b"):
        programs.note(mark, answered(mark.decode()))
    assert programs.find([b"a"]) is not None
    programs.note(b"c", answered("c"))
    assert (programs.find([b"b"]), programs.find([b"a"])) == (None, answered("a"))


@pytest.mark.parametrize("reason", sorted(set(FailureReason) | {"queue_timeout"}))
def test_every_reason_has_its_answer(reason: str) -> None:
    """The answer has each surface's form, and never a success status."""
    error = error_of_failure(RelayFailure(reason=reason, detail="d"))
    assert 400 <= error.status < 600
    assert error.document(CHAT) == {
        "error": {
            "message": f"{reason}: d",
            "type": "invalid_request_error" if error.status < 500 else "server_error",
            "param": None,
            "code": reason,
        }
    }
    assert error.document("/v1/messages")["type"] == "error"
    for path in (CHAT, "/v1/responses", "/v1/messages"):
        assert error.event(path).endswith(b"\n\n")


def test_advice_on_retries_is_always_given() -> None:
    """Stock clients retry unless a header forbids it."""
    again = ClientError(status=503, code="c", message="m", after_s=5).response(CHAT, {})
    never = ClientError(status=500, code="c", message="m").response(CHAT, {})
    assert again.headers["retry-after"] == "5"
    assert "x-should-retry" not in again.headers
    assert never.headers["x-should-retry"] == "false"


def test_a_models_name_is_translated_wherever_the_stream_is_cut() -> None:
    """It is translated only as the value of its key."""
    frames = b'data: {"model":"base","choices":[{"text":"\\"model\\":\\"base\\""}]}\n\ndata: {"model": "base"}\n\n'
    wanted = frames.replace(b'"model":"base"', b'"model":"poet"').replace(b'"model": "base"', b'"model": "poet"')
    for size in (1, 5, 17, len(frames)):
        kept = Kept()
        renaming = Renaming(kept, "base", "poet")
        for at in range(0, len(frames), size):
            renaming.pass_frames("text/event-stream", frames[at : at + size])
        renaming.flush()
        assert kept.frames == wanted
