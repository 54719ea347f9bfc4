"""Patterns that match without end cost their authors time, and no other key a slot or a judge.

Source: specification, "Ends" and "Answer validation".
"""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from tests.harness.service import Document, Service, recorded, run_command, scripted_model, serving
from tests.harness.waiting import wait_for

HELD = r"HELD=([^ \\\"]+)"
SLOW = "(?:(?:a|aa)+)+b{%d}$"  # on an answer of many a: beyond any limit
ANSWER = "a" * 200
TRIED = 5  # how often one condition may run out of time in a job before it is tried no more
KEYS = [
    {"name": name, "key": f"key-{name}", "scopes": ["read", "submit"]} for name in ("hostile", "honest")
]  # neither has the scope admin
Ports = Callable[[int], int]


def engine(port: int, folder: Path, slots: int) -> Document:
    """Return a model whose answers only a hostile pattern takes long to match; held if a prompt names a file."""
    return scripted_model(port, slots=slots, echo=f"({ANSWER})", hold=HELD, record=str(folder / "record"))


def job(name: str, held: Path | None = None, rounds: int = 1, **fields: object) -> Document:
    prompt = f"TOPIC={name} {ANSWER}" + (f" HELD={held} " if held is not None else "")
    agents = [{"id": "a", "model": "m", **({"validation": fields.pop("validation")} if "validation" in fields else {})}]
    return {"name": name, "agents": agents, "rounds": rounds, "conversations": [{"prompt": prompt}], **fields}


def matching(*numbers: int) -> list[Document]:
    return [{"agent": "a", "matches": SLOW % number} for number in numbers]


def post_as(service: Service, key: str, document: Document) -> str:
    return service.post_job(document, Authorization=f"Bearer key-{key}")


def asked(folder: Path) -> list[str]:
    """Return the topics that the engine was asked about, in order."""
    told = [json.dumps(request["messages"]) for request in recorded(folder / "record")]
    return [each.partition("TOPIC=")[2].partition(" ")[0] for each in told]


def ended_at(service: Service, job_id: str) -> datetime:
    return datetime.fromisoformat(service.wait_ended(job_id, 60.0)["finished_at"])


def test_a_slot_is_free_once_its_answer_is_complete(tmp_path: Path, free_ports: Ports) -> None:
    """Patterns are tried afterwards: the next request for the one slot begins during the trial."""
    with serving(tmp_path, free_ports(1), {"m": engine(free_ports(1), tmp_path, 1)}) as service:
        file = tmp_path / "go-on"
        slow = service.post_job(job("slow", file, until=matching(*range(4))))
        wait_for(lambda: asked(tmp_path) == ["slow"], "it is asked")
        plain = service.post_job(job("plain"))
        wait_for(lambda: service.get(f"/v1/jobs/{plain}")["progress"]["turns"]["ready"] == 1, "the other one waits")
        file.touch()
        judged_at = ended_at(service, slow)
        assert ended_at(service, plain) is not None
        (turn,) = service.get(f"/v1/jobs/{plain}/result")["conversations"][0]["turns"]
        assert datetime.fromisoformat(turn["started_at"]) < judged_at


@pytest.mark.system
def test_a_retry_goes_before_all_waiting_turns(tmp_path: Path, free_ports: Ports) -> None:
    """Its slot went to another turn while its answer was judged; the next free one is its own."""
    with serving(tmp_path, free_ports(1), {"m": engine(free_ports(1), tmp_path, 1)}) as service:
        first, second = tmp_path / "first", tmp_path / "second"
        validation = {"pattern": SLOW % 3, "retries": 1, "constrain": "off"}
        again = service.post_job(job("again", first, validation=validation))
        wait_for(lambda: asked(tmp_path) == ["again"], "it is asked")
        others = [service.post_job(job(f"other{number}", second)) for number in range(3)]
        wait_for(lambda: service.get(f"/v1/jobs/{others[-1]}")["progress"]["turns"]["ready"] == 1, "others wait")
        first.touch()
        wait_for(lambda: len(asked(tmp_path)) == 2, "the slot is used")
        if asked(tmp_path)[-1] == "other0":
            path = f"/v1/jobs/{again}"
            wait_for(lambda: service.get(path)["progress"]["turns"]["ready"] == 1, "its answer was rejected")
        second.touch()
        for job_id in (again, *others):
            service.wait_ended(job_id)
        assert asked(tmp_path)[:3] == ["again", "other0", "again"]


@pytest.mark.system
def test_judges_are_shared_by_keys(tmp_path: Path, free_ports: Ports) -> None:
    """A key with one answer to judge waits for those being judged, and not for another key's queue."""
    hostile, slots = 30, 31
    models = {"m": engine(free_ports(1), tmp_path, slots)}
    with serving(tmp_path, free_ports(1), models, {"keys": KEYS}) as service:
        theirs, ours = tmp_path / "theirs", tmp_path / "ours"
        posted = [
            post_as(service, "hostile", job(f"h{number}", theirs, until=matching(number))) for number in range(hostile)
        ]
        long = "|".join(f"v{number}[a-z]{{1,3}}" for number in range(300))  # quick, and too long for the loop
        honest = post_as(service, "honest", job("honest", ours, until=[{"agent": "a", "matches": long}]))
        wait_for(lambda: len(asked(tmp_path)) == slots, "all are asked")
        theirs.touch()
        headers = {"Authorization": "Bearer key-hostile"}

        def ends() -> list[datetime]:
            told = [service.http.get(f"/v1/jobs/{each}", headers=headers).json()["finished_at"] for each in posted]
            return [datetime.fromisoformat(each) for each in told if each is not None]

        wait_for(ends, "judges are at work")
        before = len(ends())
        ours.touch()
        headers_of_ours = {"Authorization": "Bearer key-honest"}

        def judged() -> object:
            return service.http.get(f"/v1/jobs/{honest}", headers=headers_of_ours).json()["finished_at"]

        wait_for(judged, "ours is judged")
        at = datetime.fromisoformat(str(judged()))
        wait_for(lambda: len(ends()) == hostile, "theirs are judged", 60.0)
        assert sum(each < at for each in ends()) - before <= hostile // 4


@pytest.mark.system
@pytest.mark.parametrize("where", ["until", "validation"])
def test_a_pattern_that_runs_out_of_time_is_given_up_in_its_job(tmp_path: Path, free_ports: Ports, where: str) -> None:
    """After some tries it counts as no match; the result names the pattern, and the turn from which on."""
    rounds = 4 * TRIED
    fields: Document = {"until": matching(3)}
    if where == "validation":  # a turn fails that is not valid, and this one is asked for again and again
        fields = {"validation": {"pattern": SLOW % 3, "retries": rounds - 1, "constrain": "off"}}
    with serving(tmp_path, free_ports(1), {"m": engine(free_ports(1), tmp_path, 1)}) as service:
        posted = job("slow", rounds=1 if where == "validation" else rounds, **fields)
        job_id = service.post_job(posted)
        ended = service.wait_ended(job_id, 60.0)
        (told,) = service.get(f"/v1/jobs/{job_id}/result")["conversations"]
        if where == "until":
            assert (ended["state"], len(told["turns"])) == ("completed", rounds)
            tried = service.log().count("takes too long")
        else:
            assert ended["state"] == "failed"
            details = [attempt["detail"] or "" for attempt in told["turns"][0]["attempts"]]
            tried = sum("did not end in time" in detail for detail in details)
        assert 1 <= tried <= TRIED
        (given_up,) = service.get(f"/v1/jobs/{job_id}/result")["given_up"]
        assert given_up["pattern"] == SLOW % 3
        assert given_up["path"] == ("until[0].matches" if where == "until" else "agents[0].validation.pattern")
        assert (given_up["since"]["conversation"], given_up["since"]["agent"]) == ("c0", "a")
        assert 0 <= given_up["since"]["round"] < TRIED
        assert ended["given_up"] == [given_up]
        assert service.get("/v1/jobs")["jobs"][0]["given_up"] == [given_up]
        url = service.url
        for words in (["result", job_id], ["result", job_id, "--format", "csv"], ["watch", job_id]):
            assert f"{given_up['path']}: ran out of time too often" in run_command(*words, ROUNDHOUSE_URL=url).stderr
        assert json.loads(run_command("result", job_id, "--json", ROUNDHOUSE_URL=url).stdout)["given_up"] == [given_up]
