"""The store that a released version leaves behind: ``python -m tests.harness.release_store 1.0.0`` writes it once.

Later versions are tried on the files in ``tests/data/stores``; a file that is there is never written again.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import anyio
import psycopg
from msgspec.structs import replace

from service.config.schema import StoreConfig
from service.conversations.job.client_request import PostedRequest
from service.conversations.job.job import JobId, TurnKey
from service.conversations.job.states import TurnState
from service.conversations.record.transcript import Attempt, Charges, UnfinishedTurn
from service.node.database_choice import open_database
from service.store.databases.sqlite import FILE_NAME
from service.store.records import GivenUp, ToolCallEnded, ToolCallStarted, TurnRequeued
from service.store.store import Store, open_store
from tests.harness.ports import find_ports
from tests.harness.postgres import PostgresServer
from tests.harness.service import Document, Service, debate, scripted_model, serving
from tests.harness.stored import new
from tests.harness.waiting import wait_for

FOLDER = Path(__file__).parents[1] / "data" / "stores"
GUEST: Document = {"id": "guest", "by": "caller"}
HOOKS: Document = {"hosts": ["127.0.0.1"]}
LEFT = "left"  # turns at work when their node ended go on
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "Hello"}]}'


def model_of() -> Document:
    """Return the model of such a store; its engine waits for a file that a prompt names."""
    return scripted_model(find_ports(1), slots=2, hold=r"/[\w/.-]+/gate")


@contextmanager
def service_over(folder: Path, url: str) -> Iterator[Service]:
    """Run a service on a store for a block."""
    with serving(folder, find_ports(1), {"m": model_of()}, store={"url": url}, webhooks=HOOKS) as service:
        yield service


def write(version: str) -> None:
    """Write both stores of this version, each with the results of its jobs."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = _live(folder / "sqlite", "sqlite")
        with closing(PostgresServer(folder / "server")) as server:
            url = server.new_database()
            of_postgres = _live(folder / "postgres", url)
            dump = server.dump(url)
        file = folder / "sqlite" / "state" / FILE_NAME
        kept = folder / "kept.db"
        subprocess.run([sys.executable, "-c", VACUUM, str(file), str(kept)], check=True)
        (FOLDER / f"{version}.db.gz").write_bytes(gzip.compress(kept.read_bytes(), mtime=0))
        (FOLDER / f"{version}.sql.gz").write_bytes(gzip.compress(dump.encode(), mtime=0))
        kept_results = {"sqlite": results, "postgres": of_postgres}
        (FOLDER / f"{version}.json").write_text(json.dumps(kept_results, indent=1, sort_keys=True) + "\n")


VACUUM = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('VACUUM INTO ?', (sys.argv[2],))"


def _live(folder: Path, url: str) -> Document:
    """Run jobs on a store, stop amid two turns, and return the results of the jobs."""
    with service_over(folder, url) as service:
        memory = {"keep": {"rounds": 1}, "summary": {"max_tokens": 5}}
        cast = [{**each, "memory": memory} for each in debate()["agents"]]
        hook: Document = {"url": "http://127.0.0.1:9/hook"}
        jobs = {"debate": service.post_job(debate(rounds=3, agents=cast, metadata={"of": "é"}, webhook=hook))}
        service.wait_ended(jobs["debate"])
        source = {"job": jobs["debate"], "conversation": "q0"}
        heir = debate(rounds=4, name="heir", conversations=0)
        jobs["heir"] = service.post_job({**heir, "conversations": [{"id": "q0", "from": source}]})
        service.wait_ended(jobs["heir"])
        cast = [GUEST, {"id": "a", "model": "m"}]
        asked: Document = {"agents": cast, "conversations": [{"id": "q0", "prompt": "Talk."}]}
        jobs["caller"] = service.post_job({"name": "caller", **asked})
        path = f"/v1/jobs/{jobs['caller']}/conversations/q0/turns/guest/0"
        wait_for(lambda: service.get(f"/v1/jobs/{jobs['caller']}/awaited")["awaited"], "the guest is waited for")
        service.http.post(path, json={"text": "Words."}).raise_for_status()
        service.wait_ended(jobs["caller"])
        waits = service.post_job({"name": "waits", **asked})
        wait_for(lambda: service.get(f"/v1/jobs/{waits}/awaited")["awaited"], "another guest is waited for")
        talks = [{"id": "q0", "prompt": "Go."}, {"id": "q1", "prompt": "On."}]
        cast = [{"id": "a", "model": "m", "system": str(folder / "gate")}]
        left = service.post_job({"name": LEFT, "agents": cast, "conversations": talks})
        wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 2, "both run")
        results = {name: service.get(f"/v1/jobs/{job}/result") for name, job in jobs.items()}
        assert service.stop() == 0
    anyio.run(_write_rarer, folder / "state", url, JobId(left))
    return {"results": results, "waits": waits, "left": left}


async def _write_rarer(state: Path, url: str, left: JobId) -> None:
    """Write facts that need tools and broken engines, for the turns that were at work."""
    with open_database(StoreConfig(url=url), state, ["m"]) as database, open_store(database) as store:
        await store.claim(["m"], None)
        now, key = datetime.now(UTC), TurnKey(left, "q0", "a", 0)
        died = Attempt(
            outcome=TurnState.FAILED, reason="engine_died", detail="SIGKILL", text="ha", worker="m-0", incarnation=1,
            started_at=now, finished_at=now,
        )  # fmt: skip
        so_far = UnfinishedTurn(
            key=key, attempts=(died,), rejected=(("no", "is not a choice"),), charges=Charges(deaths=1), queued_at=now,
            started_at=now,
        )  # fmt: skip
        call = ToolCallStarted(key=key, call="c", number=0, name="add", arguments="{}", policy="repeat", at=now)
        facts = (
            TurnRequeued(key=key, so_far=so_far, worker="m-0", reason="engine_died", detail="SIGKILL", at=now),
            call,
            ToolCallEnded(key=key, call="c", outcome="3", at=now),
            replace(call, call="d", number=1),
            GivenUp(key=key, path="agents[0].validation.pattern", pattern="(a+)+"),
        )
        assert await store.append(facts)
        await _post_body(store)


async def _post_body(store: Store) -> None:
    from service.conversations.document.job_parser import parse_stored  # noqa: PLC0415

    document = json.dumps({"agents": [{"id": "request", "model": "m"}], "conversations": [{"id": "0", "prompt": "-"}]})
    job = parse_stored(document, JobId("job-posted"), {})
    request = PostedRequest(path="/v1/chat/completions", body=BODY, name="m", model="m")
    job = replace(job, conversations=(job.conversations[0].with_posted(request),))
    await store.post(replace(new(job), document=document, created_at=datetime.now(UTC)), claims=False)


def load_postgres(version: str, url: str) -> None:
    """Fill an empty database with the store of a version."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(gzip.decompress((FOLDER / f"{version}.sql.gz").read_bytes()))


def load_sqlite(version: str, state: Path) -> None:
    """Write the store of a version into a state directory."""
    state.mkdir(parents=True, exist_ok=True)
    (state / FILE_NAME).write_bytes(gzip.decompress((FOLDER / f"{version}.db.gz").read_bytes()))


if __name__ == "__main__":
    write(sys.argv[1])
