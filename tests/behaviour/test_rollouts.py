"""Recorded tokens of real llama.cpp, from the turn to the row (specification, "Rollouts")."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from roundhouse_client import Client
from roundhouse_client.rollouts import REWARD, RolloutMissing, read_episodes, read_rows, trl_reward, trl_rollout_func
from tests.harness.service import Document, Service, serving
from tests.harness.waiting import wait_for

START_S = 60.0
RECORD = {"tokens": True, "logprobs": True}
CALLABLES = """
import os
import time

def length(transcript):
    return {"reward": len(transcript["turns"][-1]["text"]), "turns": len(transcript["turns"])}

async def later(transcript):
    return 2

def broken(transcript):
    raise RuntimeError("no such judge")

def slow(transcript):
    time.sleep(60)

def odd(transcript):
    return "much"

def flag(transcript):
    return True

def unfit(transcript):
    raise ValueError("boom")

def die(transcript):
    os._exit(3)

def leave(transcript):
    raise SystemExit(0)

def half(transcript):
    raise ValueError("\\ud800 half")

def named(transcript):
    return {"reward": 1, "\\ud800": 3}

class Slow(float):
    def __float__(self):
        time.sleep(60)

def lazy(transcript):
    return Slow(3)

def patient(transcript):
    time.sleep(1.2)
    return 1
"""


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from tests.harness.ports import find_ports  # noqa: PLC0415 - a module's fixture cannot take the function's

    folder = tmp_path_factory.mktemp("rollouts")
    (folder / "judges.py").write_text(CALLABLES)
    model = {"engine": "embedded", "model": str(tiny_model), "context": 4096, "slots": 2, "args": {"threads": 1}}
    port = find_ports(3)
    theirs = {"engine": "attached", "model": "tiny", "url": f"http://127.0.0.1:{port + 2}"}
    names = ["length", "later", "broken", "slow", "odd", "flag", "unfit", "die"]
    names += ["leave", "half", "named", "lazy", "patient"]
    rollouts = {"rewards": [f"judges:{name}" for name in names], "reward_s": 3}
    models = {"tiny": {**model, "port": port + 1}, "theirs": theirs}
    with serving(folder, port, models, ready=False, rollouts=rollouts) as running:
        wait_for(lambda: running.get("/v1/workers/tiny-0")["state"] == "ready", "the engine is ready", START_S)
        yield running


def job(*agents: str, **fields: Any) -> Document:  # noqa: ANN401 - parts of a document
    """Return a job of agents that write some tokens and whose tokens are recorded."""
    made = [
        {"id": name, "model": "tiny", "params": {"max_tokens": 6, "seed": 7, "temperature": 0.9}}
        for name in agents or ("a",)
    ]
    talks = [{"id": "c", "prompt": "Say something"}]
    return {"name": "recorded", "agents": made, "conversations": talks, "record": RECORD, **fields}


def rows(service: Service, job_id: str, **query: str | float | bool) -> list[Document]:
    answer = service.http.get(f"/v1/jobs/{job_id}/rollouts", params=query)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def post(service: Service, document: Document) -> list[Document]:
    return rows(service, service.post_job(document), partial=True)


def test_a_chain_is_the_tokens_that_the_engine_has_read_and_written(service: Service) -> None:
    """Over three rounds there is one row an agent: the engine's last prompt with its last answer."""
    job_id = service.post_job(job("a", "b", rounds=3))
    found = rows(service, job_id, partial=True)
    assert [(row["agent"], row["chain"], row["rounds"]) for row in found] == [("a", 0, [0, 2]), ("b", 0, [0, 2])]
    transcript = service.get(f"/v1/jobs/{job_id}/conversations/c")
    for row in found:
        usage = [turn["usage"] for turn in transcript["turns"] if turn["agent"] == row["agent"]][-1]
        tokens = [*row["prompt_ids"], *row["completion_ids"]]
        assert len(tokens) == usage["prompt_tokens"] + usage["completion_tokens"]
        lengths = {len(row[name]) for name in ("completion_ids", "mask", "logprobs", "versions")}
        assert len(lengths) == 1
        written = [turn["usage"]["completion_tokens"] for turn in transcript["turns"] if turn["agent"] == row["agent"]]
        assert sum(row["mask"]) == sum(written)
        assert all(value is None for value, mask in zip(row["logprobs"], row["mask"], strict=True) if not mask)
        assert row["params"][0]["seed"] == 7
    recorded = [turn["recorded"] for turn in transcript["turns"]]
    assert {each["tokens"] for each in recorded} <= set(range(1, 7))
    assert "chain" not in recorded[0]


def test_rows_come_once_and_a_reader_goes_on_after_the_last(service: Service) -> None:
    """In the order in which conversations ended; a row is the same whenever it is read."""
    talks = [{"id": f"c{number}", "prompt": f"Say {number}"} for number in range(5)]
    job_id = service.post_job(job(conversations=talks))
    found = rows(service, job_id, partial=True)
    assert sorted(row["conversation"] for row in found) == [talk["id"] for talk in talks]
    numbers = [row["number"] for row in found]
    assert numbers == sorted(set(numbers))
    assert rows(service, job_id, partial=True, after=numbers[1]) == found[2:]
    assert rows(service, job_id, partial=True, after=numbers[-1]) == []
    assert rows(service, job_id, partial=True, wait_s=0) == found
    whole = [row for row in found if not row["partial"]]
    assert rows(service, job_id) == whole


def test_a_reader_without_patience_gets_all_that_can_be_read(service: Service) -> None:
    """However many conversations have ended since the last one."""
    talks = [{"id": f"c{number}", "prompt": "Say it"} for number in range(70)]
    document = job(conversations=talks)
    document["agents"][0]["params"] = {"max_tokens": 1}
    job_id = service.post_job(document)
    service.wait_ended(job_id)
    assert len(rows(service, job_id, partial=True, wait_s=0)) == len(talks)


def test_an_agent_may_record_on_its_own(service: Service) -> None:
    """Without logprobs there are none; an agent that does not record has no row."""
    document = job("a", "b", record=None)
    document["agents"][1]["record"] = {"tokens": True}
    (row,) = post(service, document)
    assert (row["agent"], row["logprobs"], row["partial"]) == ("b", None, [])
    document = job("a", "b")
    document["agents"][0]["record"] = {"tokens": False}
    assert [row["agent"] for row in post(service, document)] == ["b"]


def test_a_prompt_that_rewrites_the_past_begins_a_chain(service: Service) -> None:
    """A memory that cuts the first rounds leaves a chain for what was said before, and one for each later prompt."""
    found = post(service, job("a", "b", rounds=4, memory={"keep": {"rounds": 1}}))
    of_a = [row for row in found if row["agent"] == "a"]
    assert len(of_a) > 1
    assert [row["chain"] for row in of_a] == list(range(len(of_a)))
    assert [row["rounds"][0] for row in of_a] == sorted({row["rounds"][0] for row in of_a})
    assert sum(sum(row["mask"]) for row in of_a) == sum(6 for _ in range(4))


@pytest.mark.parametrize(
    ("source", "reward", "error", "metrics"),
    [
        ({"python": "judges:length"}, None, None, {"turns": 1.0}),
        ({"python": "judges:later"}, 2.0, None, {}),
        ({"python": "judges:broken"}, None, "RuntimeError: no such judge", {}),
        ({"python": "judges:slow"}, None, "it took longer than reward_s = 3 s", {}),
        ({"python": "judges:odd"}, None, "reward: 'much' is no finite number", {}),
        ({"python": "judges:flag"}, None, "reward: 'True' is no finite number", {}),
        ({"python": "judges:unfit"}, None, "ValueError: boom", {}),
        ({"python": "judges:die"}, None, "the processes for this check have died or cannot be started", {}),
        ({"agent": "a", "pattern": "zzz(\\d+)"}, None, "the last words of 'a' do not match zzz(\\d+)", {}),
    ],
)
def test_a_reward_comes_from_its_source(
    service: Service, source: Document, reward: float | None, error: str | None, metrics: Document
) -> None:
    """A callable gets the transcript, in a process of its own; a failure leaves no reward, and says why."""
    job_id = service.post_job(job(reward=source))
    (row,) = rows(service, job_id, partial=True)
    if source == {"python": "judges:length"}:
        reward = float(len(service.get(f"/v1/jobs/{job_id}/conversations/c")["turns"][-1]["text"]))
    assert (row["reward"], row["reward_error"], row["metrics"]) == (reward, error, metrics)


def reward(service: Service, job_id: str, **fields: object) -> httpx.Response:
    return service.http.post(f"/v1/jobs/{job_id}/rewards", json={"conversation": "c", **fields})


@pytest.mark.parametrize(
    ("name", "reward", "words"),
    [("leave", None, "SystemExit"), ("half", None, "? half"), ("named", 1.0, None), ("lazy", None, "reward_s")],
)
def test_no_callable_harms_the_service(service: Service, name: str, reward: float | None, words: str | None) -> None:
    """Neither by its end nor by what it returns: the rows are there, and so is the service."""
    (row,) = post(service, job(reward={"python": f"judges:{name}"}))
    assert row["reward"] == reward
    assert (words or "") in (row["reward_error"] or "")
    assert (words is None) == (row["reward_error"] is None)
    assert service.get("/healthz")


def test_each_callable_has_its_own_time(service: Service) -> None:
    """Those that wait for the processes of others lose none of it."""
    talks = [{"id": f"c{number}", "prompt": "x"} for number in range(8)]
    found = post(service, job(conversations=talks, reward={"python": "judges:patient"}))
    assert [row["reward"] for row in found] == [1.0] * 8


def test_a_posted_reward_is_there_once(service: Service) -> None:
    """The same again is no error, another is refused; an agent's own comes before the conversation's."""
    job_id = service.post_job(job("a", "b"))
    assert reward(service, job_id, reward=0.5, metrics={"m": 1}).status_code == 201
    assert reward(service, job_id, reward=0.5, metrics={"m": 1}).status_code == 200
    refused = reward(service, job_id, reward=0.6)
    assert (refused.status_code, refused.json()["code"]) == (409, "reward_conflict")
    assert reward(service, job_id, reward=-1, agent="b").status_code == 201
    given = {row["agent"]: row["reward"] for row in rows(service, job_id, partial=True)}
    assert given == {"a": 0.5, "b": -1.0}
    for wrong in ({"conversation": "d", "reward": 1}, {"agent": "x", "reward": 1}, {"reward": "1"}, {}):
        answer = service.http.post(f"/v1/jobs/{job_id}/rewards", json={"conversation": "c", **wrong})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_reward"), answer.text
    assert reward(service, "job-none", reward=1).status_code == 404


def test_a_posted_reward_comes_before_a_source_that_fails(service: Service) -> None:
    """What a source could not give, a caller may still give."""
    job_id = service.post_job(job(reward={"python": "judges:broken"}))
    (row,) = rows(service, job_id, partial=True)
    assert row["reward_error"] is not None
    assert reward(service, job_id, reward=3).status_code == 201
    (row,) = rows(service, job_id, partial=True)
    assert (row["reward"], row["reward_error"]) == (3.0, None)


def test_a_group_is_alike_conversations_with_seeds_of_their_own(service: Service) -> None:
    """The stored document has each of them, and can be posted again as it is."""
    job_id = service.post_job(job(group={"samples": 3}))
    found = rows(service, job_id, partial=True)
    assert sorted((row["group"], row["sample"], row["conversation"]) for row in found) == [
        ("c", number, f"c.{number}") for number in range(3)
    ]
    assert {row["sample"]: row["params"][0]["seed"] for row in found} == {0: 7, 1: 8, 2: 9}
    assert len({tuple(row["prompt_ids"]) for row in found}) == 1
    document = service.get(f"/v1/jobs/{job_id}/document")
    assert "group" not in document
    again = post(service, document)
    assert {row["sample"]: row["completion_ids"] for row in again} == {
        row["sample"]: row["completion_ids"] for row in found
    }


def test_a_group_is_delivered_together(service: Service) -> None:
    """A sample that has ended waits for the others of its group."""
    document = job(group={"samples": 2})
    document["agents"].append({"id": "you", "by": "caller", "speak_after_within_round": ["a"]})
    job_id = service.post_job(document)

    def say(number: int) -> bool:
        path = f"/v1/jobs/{job_id}/conversations/c.{number}/turns/you/0"
        return service.http.post(path, json={"text": "yes"}).is_success

    wait_for(lambda: say(0), "the first sample waits for its caller")
    wait_for(
        lambda: service.get(f"/v1/jobs/{job_id}/conversations/c.0")["state"] == "completed", "the first one has ended"
    )
    assert rows(service, job_id, partial=True, wait_s=0) == []
    wait_for(lambda: say(1), "the second one waits too")
    assert {row["sample"] for row in rows(service, job_id, partial=True)} == {0, 1}


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"record": {"logprobs": True}}, "record", "logprobs stand beside tokens"),
        ({"record": None, "reward": {"python": "judges:length"}}, "reward", "there are no rollouts"),
        ({"record": None, "max_staleness": 1}, "max_staleness", "there are no rollouts"),
        ({"on_stale": "end"}, "on_stale", "wants max_staleness"),
        ({"reward": {"python": "os:getcwd"}}, "reward.python", "unknown callable of rollouts.rewards"),
        ({"reward": {"agent": "z", "pattern": "x"}}, "reward.agent", "unknown agent"),
        ({"reward": {"tool": "grade"}}, "reward.tool", "unknown tool"),
        ({"reward": {"agent": "a"}}, "reward", "agent and pattern stand together"),
        ({"reward": {"tool": "x", "python": "y"}}, "reward", "one of tool, agent and python"),
        ({"reward": {"agent": "a", "pattern": "("}}, "reward", "pattern"),
        ({"group": {"samples": 0}}, "group.samples", "at least 1"),
        ({"group": {"samples": 1000}, "conversations": [{"prompt": "x"}] * 11}, "group.samples", "10000"),
        (
            {"group": {"samples": 1000}, "conversations": [{"prompt": "x" * 20_000}]},
            "group.samples",
            "limits.body_bytes",
        ),
        (
            {"agents": [{"id": "a", "model": "theirs"}]},
            "record",
            "'theirs' cannot be recorded: an attached server does not say which tokens it reads and writes",
        ),
        ({"agents": [{"id": "a", "model": "tiny", "params": {"n": 2}}]}, "agents[0].params.n", "one answer"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(service: Service, change: Document, path: str, words: str) -> None:
    """With the place of the fault."""
    answer = service.http.post("/v1/jobs", json={**job(), **change})
    assert answer.status_code == 422, answer.text
    faults = {fault["path"]: fault["message"] for fault in answer.json()["errors"]}
    assert words in faults.get(path, ""), faults


@pytest.mark.parametrize(
    ("name", "value"), [("post_sampling_probs", True), ("prompt_logprobs", 1), ("include_reasoning", False)]
)
def test_parameters_that_change_what_is_recorded_are_refused(service: Service, name: str, value: object) -> None:
    """They would make every row partial, or fail each turn."""
    document = job()
    document["agents"][0]["params"][name] = value
    answer = service.http.post("/v1/jobs", json=document)
    assert answer.status_code == 422
    assert [each["path"] for each in answer.json()["errors"]] == [f"agents[0].params.{name}"]


def test_a_job_without_a_record_has_no_rollouts(service: Service) -> None:
    """An empty list would hide that a word was forgotten."""
    job_id = service.post_job(job(record=None))
    for answer in (service.http.get(f"/v1/jobs/{job_id}/rollouts"), reward(service, job_id, reward=1)):
        assert (answer.status_code, answer.json()["code"]) == (409, "nothing_recorded")
    assert service.http.get(f"/v1/jobs/{job_id}/rollouts", params={"form": "table"}).status_code == 400


def test_an_heir_has_rows_of_its_own_turns(service: Service) -> None:
    """What it has inherited is context that its model has read."""
    source = service.post_job(job("a", "b", rounds=2))
    service.wait_ended(source)
    fork = job("a", "b", rounds=3, conversations=[{"id": "h", "from": {"job": source, "conversation": "c"}}])
    found = post(service, fork)
    assert [(row["agent"], row["rounds"]) for row in found] == [("a", [2, 2]), ("b", [2, 2])]
    before = {row["agent"]: row for row in rows(service, source, partial=True)}
    for row in found:
        earlier = before[row["agent"]]
        assert row["prompt_ids"][: len(earlier["prompt_ids"])] == earlier["prompt_ids"]
        assert sum(row["mask"]) == len(row["mask"]) == 6


def test_an_episode_has_the_tokens_of_the_rows(service: Service) -> None:
    """A trace for each chain: its nodes are the messages as they were sent, and hold the tokens that each adds."""
    job_id = service.post_job(job("a", "b", rounds=2, reward={"agent": "b", "pattern": "(?s).*(?=x)|^"}))
    found = rows(service, job_id, partial=True)
    (episode,) = rows(service, job_id, partial=True, form="episode")
    assert (episode["number"], episode["env"]["name"], episode["group"]["id"]) == (
        found[-1]["number"],
        "recorded",
        f"{job_id}/c",
    )
    for row, trace in zip(found, episode["traces"], strict=True):
        nodes = trace["nodes"]
        assert [id_ for node in nodes for id_ in node["token_ids"]] == [*row["prompt_ids"], *row["completion_ids"]]
        masks = [mask for node in nodes for mask in node["mask"]]
        assert masks == [*[False] * len(row["prompt_ids"]), *map(bool, row["mask"])]
        assert [node["parent"] for node in nodes] == [None, *range(len(nodes) - 1)]
        assert [node["message"]["role"] for node in nodes][:3] == ["system", "user", "assistant"]
        assert [call["node"] for call in trace["calls"]] == [at for at, node in enumerate(nodes) if node.get("sampled")]
        assert trace["agent"] == {"config": {}, "name": row["agent"], "trainable": row["agent"] != "b"}
        assert trace["ok"] is (not row["partial"] and row["reward_error"] is None)
    turns = service.get(f"/v1/jobs/{job_id}/conversations/c")["turns"]
    said = [node["message"]["content"] for node in episode["traces"][0]["nodes"] if node.get("sampled")]
    assert said == [turn["text"] for turn in turns if turn["agent"] == "a"]


def test_rows_of_a_conversation_that_failed_say_so(service: Service) -> None:
    """The turns before are rows all the same; an episode of them is not one that a trainer reads."""
    document = job("a", "b")
    document["agents"][1] |= {
        "speak_after_within_round": ["a"],
        "validation": {"pattern": "QQQQ", "retries": 0, "constrain": "off"},
    }
    job_id = service.post_job(document)
    (row,) = rows(service, job_id, partial=True)
    assert (row["agent"], row["state"], row["samples"]) == ("a", "failed", 1)
    (episode,) = rows(service, job_id, partial=True, form="episode")
    (trace,) = episode["traces"]
    assert (episode["ok"], trace["ok"], trace["is_completed"], trace["stop_condition"]) == (
        False,
        False,
        False,
        "error",
    )
    assert trace["errors"][0]["type"] == "ConversationNotCompleted"


def test_parameters_that_the_record_overrides_are_not_shown(service: Service) -> None:
    """They were not sent as the author wrote them."""
    document = job()
    document["agents"][0]["params"] = {"max_tokens": 3, "logprobs": False, "return_tokens": False}
    (row,) = post(service, document)
    assert row["params"] == [{"max_tokens": 3}]
    assert None not in row["logprobs"] or row["partial"]


def test_tokens_and_rewards_go_with_their_job(service: Service) -> None:
    """A deleted job leaves nothing that could be read or written."""
    job_id = service.post_job(job())
    assert rows(service, job_id, partial=True)
    assert reward(service, job_id, reward=1).status_code == 201
    service.wait_ended(job_id)
    assert service.http.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert service.http.get(f"/v1/jobs/{job_id}/rollouts").status_code == 404
    assert reward(service, job_id, reward=1).status_code == 404


def test_recorded_turns_are_counted(service: Service) -> None:
    """Metrics show what was recorded, and what became of rows."""
    post(service, job())
    text = service.http.get("/metrics").text
    assert 'roundhouse_recorded_turns_total{record="whole"}' in text
    assert 'roundhouse_recorded_turns_total{record="dropped"} 0.0' in text
    assert 'roundhouse_rollout_rows_total{outcome="delivered"}' in text


def test_the_client_reads_both_forms(service: Service) -> None:
    """The same rows whether they are streamed or read from a file."""
    with Client(service.url) as client:
        job_id = client.post_job(job("a", "b")).id
        streamed = list(client.read_rollouts(job_id, partial=True))
        assert [row.agent for row in streamed] == ["a", "b"]
        answer = service.http.get(f"/v1/jobs/{job_id}/rollouts", params={"partial": True})
        assert list(read_rows(answer.text.splitlines())) == streamed
        episodes = list(client.read_episodes(job_id, partial=True))
        answer = service.http.get(f"/v1/jobs/{job_id}/rollouts", params={"partial": True, "form": "episode"})
        assert list(read_episodes(answer.text.splitlines())) == episodes
        assert client.post_reward(job_id, "c", 1.0, metrics={"m": 2.0}).metrics == {"m": 2.0}


def test_a_rollout_function_for_trl_gives_a_row_a_prompt(service: Service) -> None:
    """In the order of the prompts, which TRL has repeated itself."""
    with Client(service.url) as client:
        document: dict[str, Any] = job(reward={"python": "judges:length"})
        del document["conversations"]
        seen: list[object] = []
        roll = trl_rollout_func(document, client=client, before=seen.append)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say one"}]
        found = roll(["Say one", "Say one", messages], "trainer")
        assert seen == ["trainer"]
        assert found.keys() == {"prompt_ids", "completion_ids", "logprobs", "env_mask", REWARD}
        assert [len(each) for each in found["completion_ids"]] == [len(each) for each in found["logprobs"]] == [6, 6, 6]
        assert found["prompt_ids"][0] == found["prompt_ids"][1] != found["prompt_ids"][2]
        assert trl_reward(**found, completions=["x"]) == found[REWARD]
        with pytest.raises(RolloutMissing, match="a row has no reward"):
            trl_reward(**{REWARD: [None]})
        for wrong in ({**document, "record": None}, {**document, "agents": [*document["agents"], {"id": "z"}]}):
            with pytest.raises(ValueError, match=r"record|agent"):
                trl_rollout_func(wrong, client=client)
        with pytest.raises(ValueError, match="one of the user"):
            roll([[{"role": "assistant", "content": "x"}]], None)


def test_rows_outlive_the_service(tiny_model: Path, tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """A kill between two rounds: the chain goes on with the tokens that are stored."""
    port = free_ports(2)
    model = {"engine": "embedded", "model": str(tiny_model), "port": port + 1, "context": 4096, "args": {"threads": 1}}
    document = job("a", rounds=3)
    document["agents"].append({"id": "you", "by": "caller", "speak_after_within_round": ["a"]})
    with serving(tmp_path, port, {"tiny": model}, limit_s=START_S) as service:
        job_id = service.post_job(document)

        def say(number: int) -> None:
            path = f"/v1/jobs/{job_id}/conversations/c/turns/you/{number}"
            wait_for(lambda: service.http.post(path, json={"text": "go on"}).is_success, "it waits for its caller")

        say(0)
        service.kill()
        service.start(limit_s=START_S)
        say(1)
        say(2)
        (row,) = rows(service, job_id, partial=True)
        assert (row["rounds"], sum(row["mask"])) == ([0, 2], 18)
