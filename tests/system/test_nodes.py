"""Several nodes on one PostgreSQL: one queue, every job seen, watched, cancelled and finished through any of them."""

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tests.engines.adapters import write_gguf_adapter
from tests.harness.postgres import PostgresServer
from tests.harness.service import Document, Service, check_debate, debate, recorded, scripted_model, serving
from tests.harness.waiting import wait_for

LEASE_S = 3.0
Ports = Callable[[int], int]


@contextmanager
def nodes(folder: Path, ports: Ports, url: str, *models: Document) -> Iterator[list[Service]]:
    """Run a node for each entry of ``models``, all on one store."""
    store = {"url": url, "lease_s": LEASE_S}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                serving(folder / f"node-{number}", ports(1), each, {"drain_s": 1, "roots": [str(folder)]}, store=store)
            )
            for number, each in enumerate(models)
        ]


def turns_of(service: Service, job_id: str) -> list[Document]:
    result = service.get(f"/v1/jobs/{job_id}/result")
    return [turn for talk in result["conversations"] for turn in talk["turns"]]


def workers_at_work(service: Service) -> int:
    return sum(worker["slots"]["in_use"] for worker in service.get("/v1/workers")["workers"])


def test_work_is_shared_and_seen_through_any_node(tmp_path: Path, free_ports: Ports, postgres: PostgresServer) -> None:
    """A job is posted to one node, run by both, and read through the other.

    Each turn runs once, and prompts stay where they are cached.
    """
    flags: Document = {"interval": 0.01, "tokens": 10}
    models = [{"m": scripted_model(free_ports(1), **flags)} for _ in range(2)]
    with nodes(tmp_path, free_ports, postgres.new_database(), *models) as (first, second):
        job = first.post_job(debate(conversations=16, rounds=2))
        wait_for(lambda: workers_at_work(first) and workers_at_work(second), "both run turns")
        counted = second.get(f"/v1/jobs/{job}")["progress"]["turns"]
        assert counted["total"] == 96
        assert second.wait_ended(job)["state"] == "completed"
        for talk in second.get(f"/v1/jobs/{job}/result")["conversations"]:
            check_debate(talk, 2)
        events = [
            line for line in second.http.get(f"/v1/jobs/{job}/events").text.splitlines() if line.startswith("id: ")
        ]
        assert events == [f"id: {number}" for number in range(1, len(events) + 1)]
        seen = [json.loads(line) for line in first.http.get(f"/v1/jobs/{job}/result?format=jsonl").text.splitlines()]
        assert len(seen) == 16
        second.http.delete(f"/v1/jobs/{job}").raise_for_status()
        assert first.http.get(f"/v1/jobs/{job}").status_code == 404


def test_a_job_is_cancelled_through_another_node(tmp_path: Path, free_ports: Ports, postgres: PostgresServer) -> None:
    """The node that runs it gets a notice at once, or finds it at its next look."""
    models = [
        {"m": scripted_model(free_ports(1), tokens=100_000, interval=0.01)},
        {"other": scripted_model(free_ports(1))},
    ]
    with nodes(tmp_path, free_ports, postgres.new_database(), *models) as (runs, asks):
        job = asks.post_job(debate(conversations=3))
        wait_for(lambda: workers_at_work(runs) == 2, "it runs where its model is")
        wait_for(lambda: asks.get(f"/v1/jobs/{job}")["progress"]["turns"]["in_flight"] == 2, "the other node knows")
        asks.http.post(f"/v1/jobs/{job}/cancel").raise_for_status()
        assert asks.wait_ended(job)["state"] == "cancelled"
        wait_for(lambda: workers_at_work(runs) == 0, "its slots are free")


def test_a_conversation_moves_to_the_models_that_it_needs(
    tmp_path: Path, free_ports: Ports, postgres: PostgresServer
) -> None:
    """No node has both models, and every agent speaks."""
    models = [{name: scripted_model(free_ports(1))} for name in ("m", "other")]
    job = debate(conversations=3, rounds=2)
    job["agents"][1]["model"] = "other"
    with nodes(tmp_path, free_ports, postgres.new_database(), *models) as (first, second):
        ended = first.wait_ended(second.post_job(job))
        assert ended["state"] == "completed"
        spoken = Counter((turn["agent"], turn["worker"]) for turn in turns_of(first, ended["id"]))
        assert spoken == {("a", "m-0"): 6, ("b", "other-0"): 6, ("m", "m-0"): 6}


def test_the_work_of_a_killed_node_goes_on(tmp_path: Path, free_ports: Ports, postgres: PostgresServer) -> None:
    """Within its lease and five seconds, from the last finished turn."""
    flags: Document = {"interval": 0.05, "tokens": 10}
    models = [{"m": scripted_model(free_ports(1), **flags)} for _ in range(2)]
    with nodes(tmp_path, free_ports, postgres.new_database(), *models) as (killed, lives):
        job = lives.post_job(debate(conversations=8, rounds=3))
        wait_for(lambda: workers_at_work(killed) == 2, "the node to be killed has work")
        wait_for(lambda: lives.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"] >= 10, "some is done")
        killed.kill()
        at = time.monotonic()
        wait_for(lambda: "leave" in lives.log(), "its work is taken over", LEASE_S + 5)
        assert time.monotonic() - at < LEASE_S + 5
        assert lives.wait_ended(job, 60)["state"] == "completed"
        for talk in lives.get(f"/v1/jobs/{job}/result")["conversations"]:
            check_debate(talk, 3)


def test_a_node_that_counts_as_dead_writes_nothing(tmp_path: Path, free_ports: Ports, postgres: PostgresServer) -> None:
    """It is stopped past its lease and continued: its late results are refused; it starts over, and gets work again."""
    flags: Document = {"interval": 0.05, "tokens": 10}
    models = [{"m": scripted_model(free_ports(1), **flags)} for _ in range(2)]
    with nodes(tmp_path, free_ports, postgres.new_database(), *models) as (stopped, lives):
        job = lives.post_job(debate(conversations=8, rounds=3))
        wait_for(lambda: workers_at_work(stopped) == 2, "the node to be stopped has work")
        assert stopped.process is not None
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            wait_for(lambda: "leave" in lives.log(), "its work is taken over", LEASE_S + 5)
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        wait_for(lambda: "another node has taken over" in stopped.log(), "it learns of it")
        assert lives.wait_ended(job, 60)["state"] == "completed"
        for talk in stopped.get(f"/v1/jobs/{job}/result")["conversations"]:
            check_debate(talk, 3)
        again = stopped.post_job(debate(conversations=8))
        wait_for(lambda: workers_at_work(stopped) > 0, "it has work again")
        assert stopped.wait_ended(again)["state"] == "completed"


def test_a_node_that_is_stopped_leaves_its_work_at_once(
    tmp_path: Path, free_ports: Ports, postgres: PostgresServer
) -> None:
    """No lease has to end first; a turn that it cut off keeps its attempt in the transcript."""
    flags: Document = {"interval": 0.1, "tokens": 10}
    url = postgres.new_database()
    models = [{"m": scripted_model(free_ports(1), **flags)} for _ in range(2)]
    with nodes(tmp_path, free_ports, url, *models) as (stops, lives):
        job = lives.post_job(debate(conversations=6, rounds=2))
        wait_for(lambda: workers_at_work(stops) == 2, "the node to be stopped has work")
        assert stops.stop() == 0
        owners = postgres.execute("SELECT DISTINCT owner FROM conversations WHERE owner IS NOT NULL", database=url)
        assert len(owners) <= 1, "nothing is left to the lease"
        assert lives.wait_ended(job, 60)["state"] == "completed"
        for talk in lives.get(f"/v1/jobs/{job}/result")["conversations"]:
            check_debate(talk, 2)


def test_a_model_that_one_node_cannot_serve_goes_to_another(
    tmp_path: Path, free_ports: Ports, postgres: PostgresServer
) -> None:
    """Workers of the model have given up here, and another node has it.

    A model that no node has ends with the reason.
    """
    broken = {**scripted_model(free_ports(1), exit_at_once=3), "restart": {"failures": 1, "retry_s": None}}
    models = [{"m": broken, "only": broken | {"port": free_ports(1)}}, {"m": scripted_model(free_ports(1))}]
    store = {"url": postgres.new_database(), "lease_s": LEASE_S}
    with (
        serving(tmp_path / "a", free_ports(1), models[0], {"drain_s": 1}, ready=False, store=store) as gives_up,
        serving(tmp_path / "b", free_ports(1), models[1], {"drain_s": 1}, store=store),
    ):
        wait_for(lambda: gives_up.get("/v1/workers/only-0")["state"] == "failed", "it has given up")
        assert gives_up.wait_ended(gives_up.post_job(debate(conversations=2)))["state"] == "completed"
        hopeless = gives_up.wait_ended(gives_up.post_job(debate(model="only")))
        assert hopeless["state"] == "failed"
        (talk,) = gives_up.get(f"/v1/jobs/{hopeless['id']}/result")["conversations"]
        assert talk["reason"] == "engine_unreachable"


def test_a_turn_that_waits_for_a_missing_node_is_shown(
    tmp_path: Path, free_ports: Ports, postgres: PostgresServer
) -> None:
    """Its model was on a node that has gone: the status names the model, and the turn goes on when the node is back."""
    flags: Document = {"interval": 0.1, "tokens": 10}
    models = [{"m": scripted_model(free_ports(1))}, {"other": scripted_model(free_ports(1), **flags)}]
    job = debate(conversations=4, rounds=2)
    job["agents"][2]["model"] = "other"
    with nodes(tmp_path, free_ports, postgres.new_database(), *models) as (stays, goes):
        wait_for(lambda: stays.http.post("/v1/jobs", json=debate(model="other")).status_code == 202, "they know")
        job_id = stays.post_job(job)
        wait_for(lambda: stays.get(f"/v1/jobs/{job_id}")["progress"]["turns"]["completed"] > 0, "it runs")
        assert goes.stop() == 0

        def told() -> str:
            return str(stays.get("/v1/status")["unclaimed"].get("other", ""))

        wait_for(lambda: told().endswith("conversations: a node that has other"), "it is told")
        goes.start()
        assert stays.wait_ended(job_id, 60)["state"] == "completed"
        wait_for(lambda: told() == "", "nothing waits any more")


def test_no_name_in_a_path_harms_a_node(tmp_path: Path, free_ports: Ports, postgres: PostgresServer) -> None:
    """PostgreSQL takes no NUL; a request with one gets a 404, and all others are served."""
    model = {"m": scripted_model(free_ports(1))}
    with nodes(tmp_path, free_ports, postgres.new_database(), model) as (node,):
        for method, path in (("POST", "%00/cancel"), ("DELETE", "a%00"), ("GET", "%00"), ("GET", "a%00/events")):
            assert node.http.request(method, f"/v1/jobs/{path}").status_code == 404
        assert node.wait_ended(node.post_job(debate()))["state"] == "completed"


def test_an_adapter_of_one_node_is_known_to_all(tmp_path: Path, free_ports: Ports, postgres: PostgresServer) -> None:
    """Turns that need it go there; once the other node has loaded it too, both run them."""
    records = [tmp_path / f"record-{number}.jsonl" for number in range(2)]
    models = [{"m": {**scripted_model(free_ports(1), record=str(file)), "max_adapters": 2}} for file in records]
    poet = {"name": "poet", "path": str(write_gguf_adapter(tmp_path / "poet.gguf", 1))}
    job = debate(conversations=8, rounds=2)
    job["agents"][1]["model"] = "poet"

    def adapted(file: Path) -> int:
        """Count the requests for the adapter."""
        asked = (request.get("lora") or [{"scale": 0.0}] for request in recorded(file))
        return sum(each[0]["scale"] == 1.0 for each in asked)

    with nodes(tmp_path, free_ports, postgres.new_database(), *models) as (has, lacks):
        assert lacks.http.post("/v1/jobs", json=job).status_code == 422
        has.http.post("/v1/models/m/adapters", json=poet).raise_for_status()
        wait_for(lambda: lacks.http.post("/v1/jobs", json=job).status_code == 202, "the other node knows it")
        (posted,) = lacks.get("/v1/jobs")["jobs"]
        assert lacks.wait_ended(posted["id"])["state"] == "completed"
        assert [adapted(file) for file in records] == [16, 0]
        lacks.http.post("/v1/models/m/adapters", json=poet).raise_for_status()
        for _ in range(3):
            assert has.wait_ended(lacks.post_job({**job, "name": "again"}))["state"] == "completed"
        assert adapted(records[1]) > 0
        assert sum(adapted(file) for file in records) == 16 * 4


def test_a_caller_speaks_at_any_node(tmp_path: Path, free_ports: Ports, postgres: PostgresServer) -> None:
    """One of two simultaneous posts counts.

    The words reach whichever node has the model, and outlive the other node.
    """
    models = [{"m": scripted_model(free_ports(1))}, {"other": scripted_model(free_ports(1))}]
    agents = [
        {"id": "guest", "by": "caller"},
        {"id": "ann", "model": "m", "speak_after_within_round": ["guest"]},
        {"id": "bob", "model": "other", "speak_after_within_round": ["ann"]},
    ]
    names = [f"c{number}" for number in range(20)]
    posted = {"agents": agents, "rounds": 2, "conversations": [{"id": name, "prompt": "Talk."} for name in names]}
    with nodes(tmp_path, free_ports, postgres.new_database(), *models) as both:
        job_id = both[1].post_job(posted)
        for number in (0, 1):
            wait_for(lambda: len(both[0].get(f"/v1/jobs/{job_id}/awaited")["awaited"]) == 20, "all are awaited")
            places = [f"/v1/jobs/{job_id}/conversations/{name}/turns/guest/{number}" for name in names]
            with ThreadPoolExecutor(8) as pool:
                at_once = [(node, place) for place in places for node in both]
                answers = list(pool.map(lambda at: at[0].http.post(at[1], json={"text": "Hello."}), at_once))
            assert Counter(answer.status_code for answer in answers) == {201: 20, 200: 20}
        assert both[0].wait_ended(job_id, 60)["state"] == "completed"
        turns = turns_of(both[1], job_id)
    assert Counter((turn["agent"], turn["by"]) for turn in turns) == {
        ("guest", "caller"): 40,
        ("ann", "model"): 40,
        ("bob", "model"): 40,
    }


def test_a_caller_waits_for_no_node(tmp_path: Path, free_ports: Ports, postgres: PostgresServer) -> None:
    """Its turn is awaited at any remaining node; the time without a node does not count."""
    models = [{"m": scripted_model(free_ports(1))} for _ in range(2)]
    agents = [
        {"id": "guest", "by": "caller", "wait_s": 8.0, "otherwise": "Nothing."},
        {"id": "ann", "model": "m", "speak_after_within_round": ["guest"]},
    ]
    with nodes(tmp_path, free_ports, postgres.new_database(), *models) as (first, second):
        job_id = first.post_job({"agents": agents, "conversations": [{"id": "c", "prompt": "Talk."}]})
        wait_for(lambda: len(second.get("/v1/awaited")["awaited"]) == 1, "it is awaited")
        until = datetime.fromisoformat(second.get("/v1/awaited")["awaited"][0]["until"])
        first.kill()
        second.kill()
        wait_for(lambda: datetime.now(UTC) > until, "its time would be over", 20)
        second.start()
        place = f"/v1/jobs/{job_id}/conversations/c/turns/guest/0"
        assert second.http.post(place, json={"text": "Here."}).status_code == 201
        assert second.wait_ended(job_id)["state"] == "completed"
        first.start()


def test_forks_go_on_over_nodes_and_a_deleted_source(
    tmp_path: Path, free_ports: Ports, postgres: PostgresServer
) -> None:
    """Recorded on one node and forked on the other, which is killed; the source is deleted meanwhile.

    Memory windows stay as well.
    """
    models = [{"m": scripted_model(free_ports(1), chooses=True, interval=0.01)} for _ in range(2)]
    fields: Document = {"rounds": 12, "memory": {"keep": {"rounds": 3}, "summary": {"by": "self"}}}
    with nodes(tmp_path, free_ports, postgres.new_database(), *models) as (first, second):
        source = first.post_job({**debate(), **fields, "rounds": 6})
        first.wait_ended(source)
        begun = {"job": source, "conversation": "q0", "rounds": 4}
        heirs = [{"id": f"h{number}", "from": begun} for number in range(6)]
        fork = second.post_job({**debate(), **fields, "conversations": heirs})
        wait_for(lambda: first.get(f"/v1/jobs/{fork}")["progress"]["turns"]["completed"] > 10, "they go on")
        first.http.delete(f"/v1/jobs/{source}").raise_for_status()
        second.kill()
        assert first.wait_ended(fork)["state"] == "completed"
        talks = first.get(f"/v1/jobs/{fork}/result")["conversations"]
        said = [
            {(turn["agent"], turn["round"], turn["kind"]): (turn["text"], str(turn["memory"])) for turn in t["turns"]}
            for t in talks
        ]
        assert all(each == said[0] for each in said)
        spoken = [turn for turn in talks[0]["turns"] if turn["kind"] == "turn"]
        assert len(said[0]) == len(talks[0]["turns"]) > len(spoken) == 36
        inherited = [turn["round"] for turn in spoken if turn["inherited"]]
        assert sorted(inherited) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        second.start()
