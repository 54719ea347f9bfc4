"""Weights that change while two real vLLM workers talk: from checkpoints, and from a trainer over gloo."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations, cycle, takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.checkpoint import write_checkpoint
from tests.harness.service import Document, Service, serving
from tests.harness.waiting import is_alive, wait_for

ROOT = Path(__file__).parent.parent.parent
START_S = 150.0
VERSIONS = 5
SLOTS = 16
PROMPTS = [f"Question {number}?" for number in range(8)]
CUE = "You are a. It is your turn, in round 1 of 1."  # with a shorter prompt noise says less that tells versions apart
GREEDY: Document = {"temperature": 0, "ignore_eos": True}
BUCKETS = {1: 64 * 1024 * 1024, 3: 40_000, 5: 1}  # all in one, some in each, each alone
SEEDS = (0, 37, 31, 5, 36, 18)  # their answers begin differently, and with little doubt
HEAD = 6  # characters that are compared
SURE = 0.5  # by how much a character's logit leads that is the same in any batch


def vllm_model(python: str, checkpoint: Path, port: int, **changes: object) -> Document:
    return {
        "engine": "vllm",
        "model": str(checkpoint),
        "command": [python, "-m", "vllm.entrypoints.openai.api_server"],
        "args": {"enforce_eager": True, "dtype": "bfloat16"},
        "env": {
            "VLLM_CPU_KVCACHE_SPACE": 1,
            "HF_HUB_OFFLINE": 1,
            "OMP_NUM_THREADS": 1,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        "replicas": 2,
        **({"port": port} if changes.get("socket_dir") is False else {}),
        "slots": SLOTS,
        "context": 4096,
        "bios": {"enabled": False},
        "repetition": {"lines": None},
        "restart": {"initial_s": 0.1, "max_s": 0.2, "failures": 50},
        "weights": {"pause_s": 20, "start_s": 20, "receive_s": 30, "finish_s": 20, "resume_s": 20, "init_s": 60},
        **changes,
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("weights")
    return [write_checkpoint(folder / str(seed), seed, is_tied=True) for seed in SEEDS]


@pytest.fixture(scope="module")
def service(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: list[Path],
    free_ports: Callable[[int], int],
) -> Iterator[Service]:
    python = request.getfixturevalue("vllm_python")
    models = {"policy": vllm_model(python, checkpoints[0], free_ports(2))}
    server = {"roots": [str(tmp_path_factory.getbasetemp())]}
    with serving(tmp_path_factory.mktemp("service"), free_ports(1), models, server, ready=False) as running:
        wait_in_rotation(running)
        yield running


def weights_of(service: Service) -> Any:  # noqa: ANN401 - JSON of the service
    return service.get("/v1/models/policy/weights")


def wait_in_rotation(service: Service) -> None:
    """Return when both workers take traffic with the model's version."""

    def are_there() -> bool:
        told = weights_of(service)
        return all(each["in_rotation"] and each["version"] == told["version"] for each in told["workers"])

    wait_for(are_there, "both workers are in rotation", START_S)


def update(service: Service, checkpoint: Path, **fields: object) -> Document:
    body = {"checkpoint": str(checkpoint), **fields}
    answer = service.http.post("/v1/models/policy/weights/update", json=body, timeout=120)
    told: Document = answer.json()
    return told


@contextmanager
def trainer(service: Service, python: str) -> Iterator[Callable[..., Document]]:
    """Run a trainer's process; the returned function sends it a line, and returns its answer."""
    process = subprocess.Popen(
        [python, "-P", str(ROOT / "tests" / "engines" / "trainer.py"), service.url, "policy"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "client")},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def tell(**fields: object) -> Document:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(fields) + "\n")
        process.stdin.flush()
        told: Document = json.loads(process.stdout.readline())
        return told

    tell.process = process  # type: ignore[attr-defined]
    try:
        assert json.loads(process.stdout.readline()) == {"state": "here"}
        yield tell
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def say(service: Service, prompts: list[str], tokens: int, **conversation: object) -> list[Document]:
    """Hold a conversation of one turn for each prompt; return the turns."""
    job = post(service, prompts, tokens, **conversation)
    assert service.wait_ended(job, 120)["state"] == "completed"
    return turns_of(service, job)


def document_of(prompts: list[str], tokens: int, **conversation: object) -> Document:
    agents = [{"id": "a", "model": "policy", "params": {**GREEDY, "max_tokens": tokens}}]
    talks = [{"prompt": prompt, **conversation} for prompt in prompts]
    return {"agents": agents, "rounds": 1, "conversations": talks, "prompts": {"cue": CUE}}


def post(service: Service, prompts: list[str], tokens: int, **conversation: object) -> str:
    return service.post_job(document_of(prompts, tokens, **conversation))


def messages_of(prompts: list[str]) -> list[list[Document]]:
    """Return the messages that an engine gets for each of these conversations: the prompt, and the cue."""
    return [[{"role": "user", "content": f"{prompt}\n\n{CUE}"}] for prompt in prompts]


def wait_full(service: Service) -> None:
    """Return when every slot is in use.

    A job of several waves reaches that again and again, one of a single wave once.
    """
    wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"] == 2 * SLOTS, "every slot talks")


def wait_completed(service: Service, job: str, turns: int) -> None:
    """Return when this many more turns of a job have ended, among them all that began with the present weights."""

    def completed() -> int:
        return int(service.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"])

    expected = completed() + turns
    wait_for(lambda: completed() >= expected, "turns end", START_S)


def has_begun(service: Service, job: str) -> bool:
    """Return whether every conversation of a job has said something."""
    talks = (service.get(f"/v1/jobs/{job}/conversations/c{number}") for number in range(len(PROMPTS)))
    return all(any(turn["text"] for turn in talk["turns"]) for talk in talks)


def turns_of(service: Service, job: str) -> list[Document]:
    return [talk["turns"][0] for talk in service.get(f"/v1/jobs/{job}/result")["conversations"]]


@pytest.fixture(scope="module")
def spoken(vllm_python: str, checkpoints: list[Path]) -> dict[Path, list[str]]:
    return spoken_by(vllm_python, checkpoints)


def spoken_by(vllm_python: str, checkpoints: list[Path]) -> dict[Path, list[str]]:
    """Return how each checkpoint's answer to each prompt begins, as far as that is sure, by another program than vLLM.

    What an engine says of itself shows no weights that all engines have wrongly: a head that is tied to the embedding,
    and was left as it was, did so.
    """
    program, told = str(ROOT / "tests" / "engines" / "reference.py"), {}
    for checkpoint in checkpoints:
        asked = json.dumps({"checkpoint": str(checkpoint), "prompts": messages_of(PROMPTS), "tokens": HEAD})
        ended = subprocess.run(
            [vllm_python, "-P", program], input=asked, capture_output=True, text=True, timeout=120, check=True
        )
        told[checkpoint] = [_sure(answer) for answer in json.loads(ended.stdout)]
    for one, other in combinations(checkpoints, 2):
        pairs = [
            (a, b) for a, b in zip(told[one], told[other], strict=True) if not (a.startswith(b) or b.startswith(a))
        ]
        assert len(pairs) >= len(PROMPTS) / 2, (told[one], told[other])
    return told


def _sure(answer: list[tuple[str, float]]) -> str:
    """Return the characters before the first one that bfloat16 and a batch of another size may decide otherwise."""
    return "".join(character for character, _ in takewhile(lambda each: each[1] > SURE, answer))


def agrees(turns: list[Document], expected: list[str]) -> None:
    """Return whether every turn begins as its prompt's answer does; prompts repeat."""
    for turn, begin in zip(turns, cycle(expected), strict=False):
        assert turn["text"].startswith(begin), (turn, begin)


def test_five_updates_in_mid_generation(
    service: Service, checkpoints: list[Path], spoken: dict[Path, list[str]], vllm_python: str
) -> None:
    """32 conversations in flight: no turn is lost, and each was made with the weights that it names."""
    assert update(service, checkpoints[0])["state"] == "completed"
    agrees(say(service, PROMPTS, HEAD), spoken[checkpoints[0]])
    before = weights_of(service)["version"]
    made_of = {before: checkpoints[0]}
    prompts = PROMPTS * 96
    paused: list[float] = []
    with trainer(service, vllm_python) as tell:
        job = post(service, prompts, tokens=150)
        for number in range(1, VERSIONS + 1):
            wait_completed(service, job, 2 * SLOTS * 2)
            wait_full(service)
            checkpoint, version = checkpoints[number], before + number
            if number % 2:
                told = tell(checkpoint=str(checkpoint), version=version, bucket_bytes=BUCKETS[number])
            else:
                told = update(service, checkpoint, version=version)
            assert (told["state"], told["version"]) == ("completed", version), told
            made_of[version] = checkpoint
            paused += [worker["paused_s"] for worker in told["workers"]]
            print(f"\nweights {version}: paused {paused[-2:]} s, {told['phase_s']}")
    assert service.wait_ended(job, 180)["state"] == "completed"
    turns = turns_of(service, job)
    assert [turn["state"] for turn in turns] == ["completed"] * len(prompts)
    for turn, prompt in zip(turns, prompts, strict=True):
        began, ended = turn["weight_version"], turn["weight_version_end"]
        expected = spoken[made_of[began]][PROMPTS.index(prompt)]
        assert len(turn["text"]) == 150
        assert turn["text"].startswith(expected[:1]), turn
        assert began <= ended, turn
        if began == ended:
            assert turn["text"].startswith(expected), turn
    spans = Counter((turn["weight_version"], turn["weight_version_end"]) for turn in turns)
    assert any(began != ended for began, ended in spans)
    assert {ended for _, ended in spans} >= set(range(before + 1, before + VERSIONS + 1))
    print(f"turns by version of first and last token: {sorted(spans.items())}")


def test_weights_that_are_served_already_are_not_sent(
    service: Service, checkpoints: list[Path], vllm_python: str
) -> None:
    """A trainer that starts from the engines' checkpoint declares it; a wrong claim is refused."""
    update(service, checkpoints[0])
    version = weights_of(service)["version"]
    with trainer(service, vllm_python) as tell:
        assert tell(checkpoint=str(checkpoints[0]), version=version - 1, served=True)["code"] == "version_differs"
        assert tell(checkpoint=str(checkpoints[0]), version=version, served=True)["state"] == "skipped"
        assert weights_of(service)["version"] == version
        sent = tell(checkpoint=str(checkpoints[1]), version=version + 1)
        assert (sent["state"], sent["version"]) == ("completed", version + 1)


def test_vllm_has_what_the_trainers_end_of_nccl_asks_for(vllm_python: str) -> None:
    """Without a GPU stand-ins play its classes; this test checks that their signatures match."""
    program = """
import inspect
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
place = dict(host="127.0.0.1", port=1, rank=0, world_size=2, store_timeout=1)
inspect.signature(StatelessProcessGroup.create).bind(**place)
inspect.signature(PyNcclCommunicator).bind("group", device="cuda:0")
inspect.signature(PyNcclCommunicator.broadcast).bind("self", "tensor", src=0, stream="stream")
print("bound")
"""
    ended = subprocess.run([vllm_python, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.endswith("bound\n"), ended.stderr


def test_a_trainer_and_an_engine_agree_where_tensors_lie(vllm_python: str) -> None:
    """The code exists twice, since the engine's part imports nothing of ours.

    2000 lists of tensors, buckets of any size.
    """
    program = str(ROOT / "tests" / "engines" / "buckets.py")
    ended = subprocess.run([vllm_python, "-P", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "2000\n"), ended.stderr


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_an_update_that_waits_or_ends_running_turns(service: Service, checkpoints: list[Path], mode: str) -> None:
    """Every turn has one version then; an interrupted turn is asked again, and keeps its attempts."""
    wait_in_rotation(service)
    job = post(service, PROMPTS * 24, tokens=300)
    wait_full(service)
    told = update(service, checkpoints[1], mode=mode)
    assert told["state"] == "completed"
    assert service.wait_ended(job, 120)["state"] == "completed"
    turns = turns_of(service, job)
    assert all(turn["weight_version"] == turn["weight_version_end"] for turn in turns)
    reasons = Counter(attempt["reason"] for turn in turns for attempt in turn["attempts"])
    assert (reasons["weights_changed"] > 0) is (mode == "abort")


def test_an_answer_goes_on_over_an_update_if_its_job_allows_it(service: Service, checkpoints: list[Path]) -> None:
    """The record names both versions and the place of the break; each answer has all its tokens, once."""
    wait_in_rotation(service)
    over = {"continuation": {"over_weights": True}}
    pinned = service.http.post("/v1/jobs", json={**document_of(PROMPTS, 10, weights="pinned"), **over})
    assert (pinned.status_code, "over_weights" in pinned.text) == (422, True)
    job = service.post_job({**document_of(PROMPTS * 8, 300), **over})
    wait_full(service)
    wait_for(lambda: has_begun(service, job), "they talk", START_S)
    assert update(service, checkpoints[3], mode="abort")["state"] == "completed"
    assert service.wait_ended(job, 120)["state"] == "completed"
    turns = turns_of(service, job)
    mixed = [turn for turn in turns if turn["weight_version"] != turn["weight_version_end"]]
    assert mixed
    for turn in mixed:
        (broken,) = turn["continued"]
        assert broken["because"] == "weights_changed"
        assert 0 < broken["at_tokens"] < 300
        assert turn["text"].startswith(turn["attempts"][0]["text"][:HEAD])
    assert {turn["usage"]["completion_tokens"] for turn in turns} == {300}


def test_a_pinned_conversation_gets_one_version_or_fails(service: Service, checkpoints: list[Path]) -> None:
    """It fails with a clear reason, alone; an answer that was complete before the update is kept."""
    wait_in_rotation(service)
    say(service, PROMPTS * 4, HEAD)  # a new engine's first prompt takes seconds, in which the other's turns go on
    version = weights_of(service)["version"]
    free = post(service, PROMPTS, tokens=400)
    pinned = post(service, PROMPTS, tokens=3900, weights="pinned")
    wait_for(lambda: has_begun(service, pinned), "all that are pinned talk", START_S)
    assert update(service, checkpoints[2])["state"] == "completed"
    assert service.wait_ended(free, 120)["state"] == "completed"
    service.wait_ended(pinned, 120)
    turns = turns_of(service, pinned)
    whole = [turn for turn in turns if turn["state"] == "completed"]
    assert {(turn["weight_version"], turn["weight_version_end"]) for turn in whole} <= {(version, version)}
    assert {turn["reason"] for turn in turns if turn not in whole} == {"weights_changed"}
    turns = say(service, PROMPTS, HEAD, weights="pinned")
    assert {turn["state"] for turn in turns} == {"completed"}


def test_an_impossible_update_is_refused_before_anything_is_touched(service: Service, checkpoints: list[Path]) -> None:
    """A checkpoint that an engine cannot read would break all of them at once."""
    wait_in_rotation(service)
    cut = write_checkpoint(checkpoints[0].parent / "cut", 9)
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    version = weights_of(service)["version"]
    tensors = [{"name": "lm_head.weight", "dtype": "bfloat16", "shape": [512, 64]}]
    for body, code in (
        ({"checkpoint": str(cut)}, "invalid_update"),
        ({"checkpoint": "/nowhere"}, "invalid_update"),
        ({"checkpoint": str(checkpoints[1]), "version": version}, "version_not_newer"),
        ({"tensors": tensors}, "invalid_update"),
        ({}, "invalid_update"),
        ({"checkpoint": str(checkpoints[1]), "mdoe": "keep"}, "invalid_update"),
    ):
        answer = service.http.post("/v1/models/policy/weights/update", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409 if "version" in code else 422, code), answer.text
    assert service.http.get("/v1/models/none/weights").json()["code"] == "model_not_found"
    assert weights_of(service)["version"] == version
    assert all(worker["incarnation"] == 1 for worker in weights_of(service)["workers"])


def test_a_trainer_that_dies_in_mid_broadcast(
    service: Service, checkpoints: list[Path], spoken: dict[Path, list[str]], vllm_python: str
) -> None:
    """The update ends with an error that names the trainer; both workers keep their weights."""
    wait_in_rotation(service)
    assert update(service, checkpoints[3])["state"] == "completed"
    version = weights_of(service)["version"]
    with trainer(service, vllm_python) as tell:
        assert tell(checkpoint=str(checkpoints[4]), version=version + 1, mute=True)["state"] == "mute"
        stages = [worker["stage"] for worker in weights_of(service)["update"]["workers"]]
        assert stages == ["receiving", "receiving"]
        tell.process.kill()  # type: ignore[attr-defined]
        wait_for(lambda: weights_of(service)["update"]["state"] != "running", "the update ends", 30)
    told = weights_of(service)
    assert (told["update"]["state"], told["version"]) == ("failed", version)
    assert "trainer (rank 0)" in told["update"]["error"]
    wait_in_rotation(service)
    agrees(say(service, PROMPTS, HEAD), spoken[checkpoints[3]])
    assert {worker["incarnation"] for worker in weights_of(service)["workers"]} == {1}
    with trainer(service, vllm_python) as tell:  # another trainer forms the group again
        assert tell(checkpoint=str(checkpoints[4]), version=version + 1)["state"] == "completed"
    agrees(say(service, PROMPTS, HEAD), spoken[checkpoints[4]])


def test_a_worker_that_is_killed_while_it_receives(
    service: Service, checkpoints: list[Path], spoken: dict[Path, list[str]], vllm_python: str
) -> None:
    """It is named; the other one serves; the killed one returns with the model's version."""
    wait_in_rotation(service)
    version = weights_of(service)["version"]
    victim = service.get("/v1/workers/policy-1")
    with trainer(service, vllm_python) as tell:
        assert tell(checkpoint=str(checkpoints[5]), version=version + 1, mute=True)["state"] == "mute"
        os.kill(victim["pid"], signal.SIGKILL)
        wait_for(lambda: weights_of(service)["update"]["state"] != "running", "the update ends", 30)
    told = weights_of(service)["update"]
    assert (told["state"], "policy-1" in told["error"]) == ("failed", True), told
    assert {turn["worker"] for turn in say(service, PROMPTS, HEAD)} == {"policy-0"}
    wait_in_rotation(service)
    told = weights_of(service)
    assert [(each["version"], each["incarnation"]) for each in told["workers"]] == [(version, 1), (version, 2)]
    turns = say(service, PROMPTS * 4, HEAD)
    assert {turn["worker"] for turn in turns} == {"policy-0", "policy-1"}
    agrees(turns, spoken[checkpoints[4]])


def test_a_failed_broadcast_is_repeated(
    service: Service, checkpoints: list[Path], spoken: dict[Path, list[str]], vllm_python: str
) -> None:
    """A worker dies while it receives: the next attempt reaches the other, and the new worker gets its weights."""
    wait_in_rotation(service)
    version = weights_of(service)["version"]
    victim = service.get("/v1/workers/policy-1")
    with trainer(service, vllm_python) as tell:
        assert tell(checkpoint=str(checkpoints[3]), version=version + 1, breaks=True)["state"] == "begun"
        os.kill(victim["pid"], signal.SIGKILL)
        wait_for(lambda: weights_of(service)["update"]["state"] == "failed", "the update ends", 30)
        told = tell()
    assert (told["state"], told["version"]) == ("completed", version + 1), told
    wait_in_rotation(service)
    turns = say(service, PROMPTS * 4, HEAD)
    assert {turn["worker"] for turn in turns} == {"policy-0", "policy-1"}
    agrees(turns, spoken[checkpoints[3]])


def test_a_killed_server_leaves_nothing_and_is_ready_again(service: Service, request: pytest.FixtureRequest) -> None:
    """EngineCore and workers never outlive their API server: within a second, twenty times over in a soak."""
    times = 20 if request.config.getoption("--soak") else 2
    wait_in_rotation(service)
    gone_s: list[float] = []
    ready_s: list[float] = []
    for _ in range(times):
        worker = service.get("/v1/workers/policy-1")
        tree = psutil.Process(worker["pid"]).children(recursive=True)
        names = {child.name() for child in tree}
        assert names >= {"policy-1::EngineCore", "policy-1::Worker"}, names
        killed_at = time.monotonic()
        os.kill(worker["pid"], signal.SIGKILL)
        gone_s.append(wait_for(lambda: not any(is_alive(child.pid) for child in tree), "its tree is gone", 1.0))  # noqa: B023
        wait_for(lambda: service.get("/v1/workers/policy-1")["incarnation"] > worker["incarnation"], "another starts")  # noqa: B023
        wait_in_rotation(service)
        ready_s.append(time.monotonic() - killed_at)
    print(f"\ngone after {max(gone_s):.3f} s at most; in rotation again after {sorted(ready_s)} s")


def test_a_front_without_its_engine_is_found_dead(service: Service) -> None:
    """VLLM's API server answers for five seconds without its engine core, and then ends with status 0."""
    wait_in_rotation(service)
    job = post(service, PROMPTS * 24, tokens=300)
    wait_full(service)
    worker = service.get("/v1/workers/policy-0")
    tree = psutil.Process(worker["pid"]).children(recursive=True)
    core = next(child for child in tree if "EngineC" in child.name())
    core.kill()
    found_s = wait_for(  # the server looks every five seconds, and shuts down in Python beside three engines' work
        lambda: service.get("/v1/workers/policy-0")["incarnation"] > worker["incarnation"], "it is found", 60
    )
    print(f"\nfound dead after {found_s:.2f} s")
    assert service.wait_ended(job, 120)["state"] == "completed"
    wait_for(lambda: not any(is_alive(child.pid) for child in tree), "nothing of the dead engine is left")
    wait_in_rotation(service)


def test_a_restart_of_the_service_brings_its_workers_to_the_version(
    service: Service, checkpoints: list[Path], spoken: dict[Path, list[str]]
) -> None:
    """Versions only rise, and an engine starts with the checkpoint on the disk."""
    wait_in_rotation(service)
    assert update(service, checkpoints[2])["state"] == "completed"
    version = weights_of(service)["version"]
    service.kill()
    service.start(ready=False)
    wait_in_rotation(service)
    assert weights_of(service)["version"] == version
    turns = say(service, PROMPTS, HEAD)
    agrees(turns, spoken[checkpoints[2]])
    assert {turn["weight_version"] for turn in turns} == {version}


def test_the_example_teaches_the_engines_a_sentence(
    service: Service, checkpoints: list[Path], vllm_python: str
) -> None:
    """examples/train.py, as a user runs it."""
    wait_in_rotation(service)
    argv = [vllm_python, "-P", str(ROOT / "examples" / "train.py"), "--url", service.url, "--model", "policy"]
    ended = subprocess.run(
        [*argv, "--checkpoint", str(checkpoints[0])],
        env={**os.environ, "PYTHONPATH": str(ROOT / "client"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1].endswith("'A roundhouse.'"), ended.stdout
    print(f"\n{ended.stdout}")
