"""A client's body as the turn of a job: stored with its conversation, asked after a kill, and its answer kept whole."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from service.config.schema import Config
from service.config.workers import worker_specs
from service.conversations.job.client_request import PostedRequest, WholeAnswer
from service.conversations.job.job import JobId
from service.errors import IdempotencyConflict, InvalidJob
from service.node.node import Node, open_node
from service.scheduling.asking import posted
from service.scheduling.asking.posted import PostedAsking
from service.store import conversation_rows
from tests.harness.processes import running_program
from tests.harness.quiet_node import on_node
from tests.harness.service import Document, recorded, scripted_model, serving
from tests.harness.waiting import LIMIT_S, wait_for, wait_until
from workers.notifier import Notifier

PATH = "/v1/chat/completions"
REPLAY = Path(__file__).parents[1] / "harness" / "programs" / "replay.py"
BODY = b'{"model": "m", "max_tokens": 5,  "messages": [{"role": "user", "content": "Tell of \\u00fcber GATE"}]}'
DOCUMENT: Document = {"agents": [{"id": "request", "model": "m"}], "conversations": [{"id": "0", "prompt": PATH}]}
POSTS = """
import json, sys
from pathlib import Path
import anyio
from service.config.source import load_config
from service.config.workers import worker_specs
from service.conversations.job.client_request import PostedRequest
from service.node.node import open_node

DOCUMENT = json.loads(sys.argv.pop())

async def main(file, state, body, form):
    config, folder = load_config(Path(file)), Path(state)
    specs = worker_specs(config, Path(file).parent, folder)
    async with open_node(config, specs, folder) as node, anyio.create_task_group() as tasks:
        await node.intake.claim_first()
        tasks.start_soon(node.intake.run)
        request = PostedRequest(path="/v1/chat/completions", body=body.encode(), name="m", model="m",
                                is_streamed=form == "streamed")
        stored, _ = await node.door.post(DOCUMENT, posted={"0": request})
        print(stored.id, flush=True)
        await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:])
"""


@pytest.mark.system
@pytest.mark.parametrize("form", ["whole", "streamed"])
def test_a_recorded_body_is_asked_again_after_a_kill_and_its_answer_can_be_read(
    tmp_path: Path, free_ports: Callable[[int], int], form: str
) -> None:
    """The engine receives the same bytes before and after it; the record has its answer and the words in it."""
    gate, record = tmp_path / "gate", tmp_path / "record.jsonl"
    body = BODY.replace(b"GATE", str(gate).encode())
    if form == "streamed":
        body = body.replace(b'"max_tokens"', b'"stream": true, "max_tokens"')
    model = scripted_model(free_ports(1), slots=1, hold=r"/[\w/.-]+/gate", record=str(record))
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        service.kill()
        arguments = [str(service.config), str(tmp_path / "state"), body.decode(), form, json.dumps(DOCUMENT)]
        with running_program([sys.executable, "-c", POSTS, *arguments], stdout=-1, text=True, cwd=tmp_path) as program:
            assert program.stdout is not None
            job = program.stdout.readline().strip()
            wait_for(lambda: len(recorded(record)) == 1, "the engine has the request")
        gate.touch()
        service.start()
        assert service.wait_ended(job)["state"] == "completed"
        service.kill()
        service.start()
        (conversation,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
        (turn,) = conversation["turns"]
        assert len(recorded(record)) == 2
    answer = turn["answer"]
    assert (turn["state"], answer["status"], bool(turn["text"])) == ("completed", 200, True)
    assert turn["usage"]["completion_tokens"]
    if form == "whole":
        assert json.loads(answer["body"])["choices"][0]["message"]["content"] == turn["text"]
        assert turn["finish_reason"] == json.loads(answer["body"])["choices"][0]["finish_reason"]
    else:
        frames = [json.loads(line[6:]) for line in answer["body"].splitlines() if line.startswith("data: {")]
        pieces = [choice["delta"].get("content") or "" for frame in frames for choice in frame["choices"]]
        assert "".join(pieces) == turn["text"]
        assert answer["body"].rstrip().endswith("data: [DONE]")
    first, second = recorded(record)
    assert first["messages"] == second["messages"] == json.loads(body)["messages"]


def test_a_recorded_body_belongs_to_its_idempotency_key() -> None:
    """The same document with another body is another post, and each body is stored byte for byte."""

    async def scenario(node: Node, _: object) -> tuple[bool, bytes]:
        def post(body: bytes) -> dict[str, PostedRequest]:
            return {"0": PostedRequest(path=PATH, body=body, name="m0", model="m0", chars=3)}

        document = {**DOCUMENT, "agents": [{"id": "request", "model": "m0"}]}
        stored, is_new = await node.door.post(document, "k", posted=post(BODY))
        again, is_again_new = await node.door.post(document, "k", posted=post(BODY))
        assert (is_new, is_again_new, again.id) == (True, False, stored.id)
        with pytest.raises(IdempotencyConflict):
            await node.door.post(document, "k", posted=post(BODY + b" "))
        kept = await node.store.read(conversation_rows.posted, JobId(stored.id), ["0"])
        return kept["0"].chars == 3, kept["0"].body

    assert on_node(scenario) == (True, BODY)


def test_no_fork_begins_with_a_posted_turn() -> None:
    """Its heir would be asked with the label in the document, and not with the client's messages."""

    async def scenario(node: Node, _: object) -> list[str]:
        request = PostedRequest(path=PATH, body=BODY, name="m0", model="m0")
        agents = [{"id": "request", "model": "m0"}]
        stored, _ = await node.door.post({**DOCUMENT, "agents": agents}, posted={"0": request})
        source = {"job": stored.id, "conversation": "0"}
        with pytest.raises(InvalidJob) as refused:
            await node.door.post({"agents": agents, "conversations": [{"from": source, "rounds": 2}]})
        return [fault.path for fault in refused.value.faults]

    assert on_node(scenario) == ["conversations[0].from"]


REQUEST = PostedRequest(path=PATH, body=BODY, name="m0", model="m0")
PLAIN: Document = {"id": "request", "model": "m0"}


@pytest.mark.parametrize(
    "changed",
    [
        {"rounds": 2},
        {"system": "Be brief."},
        {"agents": [PLAIN, {"id": "other", "model": "m0"}]},
        {"agents": [{**PLAIN, "system": "Be brief."}]},
        {"agents": [{**PLAIN, "params": {"temperature": 0}}]},
        {"agents": [{**PLAIN, "validation": {"choices": ["yes", "no"]}}]},
        {"agents": [{**PLAIN, "memory": {"keep": "auto"}}]},
        {"conversations": [{"id": "0", "prompt": PATH, "until": [{"says": "no"}]}]},
        {"conversations": [{"id": "other", "prompt": PATH}]},
        {"conversations": [{"id": "0", "prompt": PATH, "variables": {"tone": "dry"}}]},
        {"agents": [{**PLAIN, "role": "expert"}]},
        {"view": "shared"},
        {"mode": "free", "prompt_at": "queue"},
        {"prompts": {"cue": "Now $role."}},
        {"continuation": "off"},
    ],
    ids=lambda changed: str(changed)[:60],
)
def test_what_a_body_makes_void_is_refused(changed: Document) -> None:
    """The body is all that the engine is asked with: an option beside it would be read and ignored."""

    async def scenario(node: Node, _: object) -> None:
        with pytest.raises(InvalidJob):
            await node.door.post({**DOCUMENT, "agents": [PLAIN], **changed}, posted={"0": REQUEST})

    on_node(scenario)


@pytest.mark.parametrize("changed", [{"priority": 5}, {"wait_s": 1.0}, {"model": "m1"}, {"adapter": "small"}], ids=str)
def test_a_body_whose_job_says_otherwise_is_refused(changed: Document) -> None:
    """A recorded turn has the model and the place in the queue that its document gives it."""

    async def scenario(node: Node, _: object) -> None:
        with pytest.raises(InvalidJob):
            await node.door.post({**DOCUMENT, "agents": [PLAIN]}, posted={"0": replace(REQUEST, **changed)})

    on_node(scenario)


def asking() -> PostedAsking:
    return PostedAsking(JobId("j"), REQUEST, Notifier())


def test_a_stream_that_is_kept_is_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that never ends holds no more than one answer's bound; the next attempt begins afresh."""
    monkeypatch.setattr(posted, "MAX_BODY_BYTES", 10)
    subject = asking()
    for _ in range(1000):
        subject.pass_frames("text/event-stream", b"data")
    assert subject.is_too_large
    kept = subject.take_stream()
    assert kept is not None
    assert len(kept.body) <= 10
    subject.forget_answer()
    assert (subject.is_too_large, subject.take_stream()) == (False, None)
    subject.pass_frames("text/event-stream", b"data")
    assert subject.take_stream() == WholeAnswer(status=200, content_type="text/event-stream", body=b"data")


@pytest.mark.parametrize(
    ("body", "findings"),
    [
        ({"choices": [{"message": {"content": "Yes."}, "finish_reason": "stop"}]}, []),
        ({"choices": [{"message": {"content": "Yes."}}]}, ["no_finish_reason"]),
        ({"choices": [{"message": {"content": "Ye"}, "finish_reason": "length"}]}, ["cut_off"]),
        ({"choices": [{"message": {"content": ""}, "finish_reason": "stop"}]}, ["nothing_said"]),
    ],
    ids=["whole", "no reason", "cut off", "empty"],
)
def test_a_half_or_empty_answer_to_a_body_is_marked(
    tmp_path: Path, free_ports: Callable[[int], int], body: Document, findings: list[str]
) -> None:
    """The engine's answer is kept as it is; what it lacks is a finding of its turn."""
    answers, port = tmp_path / "answers", free_ports(1)
    answers.write_text(json.dumps({"over": {"status": 200, "body": json.dumps(body)}}))
    command = [sys.executable, "-I", "-S", REPLAY, "--port", port, "--answers", answers]
    config = Config.model_validate({"models": {"m0": {"engine": "attached", "url": f"http://127.0.0.1:{port}/v1"}}})

    async def main() -> Document:
        specs = worker_specs(config, tmp_path, tmp_path / "state")
        async with open_node(config, specs, tmp_path / "state") as node:
            await wait_until(lambda: node.scheduler.free("m0"), "the server is ready")
            request = replace(REQUEST, body=BODY.replace(b"Tell of", b"<over>"))
            stored, _ = await node.door.post({**DOCUMENT, "agents": [PLAIN]}, posted={"0": request})
            await node.jobs.wait_ended(stored.id, LIMIT_S)
            transcript = await node.jobs.transcript(stored.id, "0")
            await node.shut_down(0.0, anyio.Event())
        turns = transcript["turns"]
        assert isinstance(turns, list)
        return dict(turns[0])

    with running_program(command):
        turn = anyio.run(main)
    assert (turn["state"], list(turn["findings"])) == ("completed", findings)
    assert json.loads(turn["answer"]["body"]) == body
