"""The client against a real service: the same promises for ordinary code and for asyncio."""

import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, assert_type

import anyio
import anyio.to_thread
import pytest

from roundhouse_client import (
    AccessDenied,
    AnswerLost,
    AsyncClient,
    Client,
    Event,
    InvalidRequest,
    Job,
    NotFound,
    NotNow,
    StateConflict,
    Transcript,
    Unreachable,
    WaitExceeded,
)
from roundhouse_client.calls import job_calls, model_calls, node_calls, session_calls, worker_calls
from roundhouse_client.flows import following
from roundhouse_client.request import Call
from roundhouse_client.values.events import KINDS, JobEnd, TurnChange
from service.api.errors.forms import SERVED
from tests.harness.proxy import CuttingProxy, cutting
from tests.harness.service import Document, Service, check_debate, debate, scripted_model, serving
from tests.harness.waiting import wait_until

README = Path(__file__).parents[2] / "client" / "README.md"
TOLD = (r"c0 \['.+'\]", r"\d+ end {'state': 'completed', .+", r"invalid_job \[\('agents', '.+'\)\]")  # last, by each
SLOW: Document = {"tokens": 100_000, "interval": 0.01}
OWN_CALLS: list[Call[Any]] = [  # one of each route, with a name for each part of its path
    job_calls.post_job({}),
    job_calls.list_jobs(),
    job_calls.get_job("X"),
    job_calls.cancel_job("X"),
    job_calls.delete_job("X"),
    job_calls.get_conversation("X", "X"),
    job_calls.get_prompts("X", "X", "X", 0),
    job_calls.get_document("X"),
    job_calls.get_timeline("X"),
    job_calls.get_deliveries("X"),
    job_calls.post_reward("X", "X", 1.0),
    session_calls.open_session(),
    session_calls.get_session("X"),
    session_calls.get_session_rows("X"),
    session_calls.post_session_reward("X", 1.0),
    session_calls.delete_session("X"),
    job_calls.awaited(),
    job_calls.awaited("X"),
    worker_calls.list_workers(),
    worker_calls.get_worker("X"),
    worker_calls.get_log("X"),
    worker_calls.get_incidents("X"),
    worker_calls.drain_worker("X"),
    worker_calls.resume_worker("X"),
    worker_calls.restart_worker("X"),
    node_calls.get_status(),
    node_calls.get_speaking(),
    node_calls.list_lanes(),
    node_calls.get_usage(),
    node_calls.list_nodes(),
    node_calls.list_spans(),
    node_calls.reload_configuration(),
    node_calls.get_upgrade(),
    node_calls.upgrade(),
    node_calls.get_health(),
    node_calls.get_readiness(),
    node_calls.get_metrics(),
    model_calls.load_model("X"),
    model_calls.unload_model("X"),
    model_calls.get_tools("X"),
    model_calls.list_adapters("X"),
    model_calls.load_adapter("X", "X", "X"),
    model_calls.unload_adapter("X", "X"),
    model_calls.get_weights("X"),
    model_calls.init_weights("X", {}),
    model_calls.update_weights("X", {}),
]
IN_FLOWS = {
    ("GET", "/v1/jobs/{}/events"),
    ("GET", "/v1/jobs/{}/result"),
    ("GET", "/v1/jobs/{}/rollouts"),
    ("POST", "/v1/jobs/{}/conversations/{}/turns/{}/{}"),
}
# Paths of other makers' interfaces, which their own clients speak.
FOREIGN = re.compile(r"/v1/models(/{\w+(:path)?})?$|/version$")  # and all that is relayed


class Caller:
    """Calls either client in the same way; a stream comes as a list."""

    def __init__(self, kind: type[Client] | type[AsyncClient], url: str, **options: Any) -> None:  # noqa: ANN401
        self.client = kind(url, **{"api_key": "secret"} | options)

    async def __call__(self, name: str, *arguments: object, **more: object) -> Any:  # noqa: ANN401
        method = getattr(self.client, name)
        if isinstance(self.client, Client):
            return await anyio.to_thread.run_sync(partial(_all, method, *arguments, **more), abandon_on_cancel=True)
        result = method(*arguments, **more)
        return [each async for each in result] if isinstance(result, AsyncGenerator) else await result

    async def close(self) -> None:
        if isinstance(self.client, Client):
            self.client.close()
        else:
            await self.client.close()


def _all(method: Callable[..., Any], *arguments: object, **more: object) -> Any:  # noqa: ANN401
    result = method(*arguments, **more)
    return list(result) if isinstance(result, Iterator) else result


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    models = {"m": scripted_model(free_ports(2), replicas=2), "slow": scripted_model(free_ports(1), **SLOW)}
    with serving(tmp_path_factory.mktemp("client"), free_ports(1), models, {"api_keys": ["secret"]}) as running:
        yield running


@pytest.fixture
def proxy(service: Service) -> Iterator[CuttingProxy]:
    with cutting(port_of(service)) as running:
        yield running


@pytest.fixture(params=[Client, AsyncClient], ids=["ordinary", "asyncio"])
async def new(request: pytest.FixtureRequest, service: Service) -> AsyncGenerator[Callable[..., Caller], None]:
    """Make clients of one kind, and close them."""
    made: list[Caller] = []

    def make(url: str = service.url, **options: object) -> Caller:
        made.append(Caller(request.param, url, **options))
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest.fixture
def caller(new: Callable[..., Caller]) -> Caller:
    return new()


def port_of(service: Service) -> int:
    return int(service.url.rpartition(":")[2])


async def test_a_job_is_posted_waited_for_and_read(caller: Caller) -> None:
    """This is what a user does first."""
    posted: Job = await caller("post_job", debate(conversations=3, rounds=2, metadata={"mine": [1]}))
    assert (posted.name, posted.metadata, posted.progress.turns.total) == ("debate", {"mine": [1]}, 18)
    job: Job = await caller("wait_job", posted.id)
    assert (job.id, job.state, job.has_ended, job.progress.turns.completed) == (posted.id, "completed", True, 18)
    assert job.finished_at is not None
    assert job.finished_at >= job.created_at
    transcripts: list[Transcript] = await caller("read_result", job.id)
    assert [each.id for each in transcripts] == ["q0", "q1", "q2"]
    for each in transcripts:
        check_debate(dict(each.document), rounds=2)
        assert {turn.attempts[0].outcome for turn in each.turns} == {"completed"}
    assert await caller("get_conversation", job.id, "q1") == transcripts[1]
    prompts = await caller("get_prompts", job.id, "q1", "m", 1)
    assert "TOPIC-1." in str(prompts.attempts[0].messages)
    assert (await caller("get_deliveries", job.id)).deliveries == ()
    await caller("delete_job", job.id)
    with pytest.raises(NotFound, match=f"job {job.id} does not exist"):
        await caller("get_job", job.id)


async def test_the_service_waits_with_its_answer_for_a_jobs_end(caller: Caller, service: Service) -> None:
    """GET /v1/jobs/{id}?wait_s= is one request, not many; it answers at the end, or after its time."""
    job_id = (await caller("post_job", debate(model="slow"))).id
    began_at = anyio.current_time()
    assert (await caller("get_job", job_id, wait_s=0.2)).state == "running"
    assert anyio.current_time() - began_at >= 0.2
    ended: list[Job] = []

    async def look() -> None:
        ended.append(await caller("get_job", job_id, wait_s=60.0))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            await caller("get_job", job_id, wait_s=0.2)  # by then that look is under way
            service.http.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
    assert ended[0].state == "cancelled"
    with pytest.raises(InvalidRequest, match="wait_s"):
        await caller("get_job", job_id, wait_s=61.0)


async def test_a_wait_is_bounded_and_a_job_is_cancelled(caller: Caller) -> None:
    """The error holds the job as it was."""
    job_id = (await caller("post_job", debate(model="slow"))).id
    with pytest.raises(WaitExceeded) as caught:
        await caller("wait_job", job_id, timeout_s=0.2)
    assert isinstance(caught.value.last, Job)
    with pytest.raises(StateConflict) as refused:
        await caller("delete_job", job_id)
    assert refused.value.code == "not_ended"
    with pytest.raises(StateConflict, match=job_id):
        await caller("read_result", job_id)
    assert (await caller("cancel_job", job_id)).id == job_id
    assert (await caller("wait_job", job_id, timeout_s=20.0)).state == "cancelled"


async def test_a_client_posts_one_job_for_each_idempotency_key(caller: Caller) -> None:
    """A second post returns the same job; with another body it is refused."""
    first = await caller("post_job", debate(), idempotency_key=f"key-{id(caller)}")
    assert (await caller("post_job", debate(), idempotency_key=f"key-{id(caller)}")).id == first.id
    with pytest.raises(StateConflict) as refused:
        await caller("post_job", debate(rounds=2), idempotency_key=f"key-{id(caller)}")
    assert refused.value.code == "idempotency_conflict"


async def test_refusals_have_one_class_for_each_remedy(caller: Caller, new: Callable[..., Caller]) -> None:
    """Callers choose what to do by the class."""
    with pytest.raises(InvalidRequest) as invalid:
        await caller("post_job", debate(model="gone"))
    assert invalid.value.code == "invalid_job"
    assert [fault.path for fault in invalid.value.faults] == [f"agents[{place}].model" for place in range(3)]
    with pytest.raises(NotNow) as full:
        await caller("post_job", debate(conversations=9), queue=False)
    assert (full.value.code, full.value.retry_after_s is not None) == ("no_slot_available", True)
    with pytest.raises(NotFound) as unknown:
        await caller("get_weights", "m")
    assert unknown.value.code == "model_not_found"
    keyless = new(api_key=None)
    with pytest.raises(AccessDenied):
        await keyless("list_jobs")
    assert (await keyless("get_health")).status == "ok"


async def test_many_jobs_are_posted_at_once_and_listed(caller: Caller) -> None:
    """Each is taken or refused separately."""
    lines = await caller("post_jobs", [debate(), debate(model="gone"), debate(name="third")])
    assert [(each.line, each.status, each.code) for each in lines] == [
        (1, 202, None), (2, 422, "invalid_job"), (3, 202, None),
    ]  # fmt: skip
    assert lines[1].errors[0].path == "agents[0].model"
    page = await caller("list_jobs", limit=1)
    assert len(page.jobs) == 1
    assert (await caller("list_jobs", limit=1, cursor=page.next_cursor)).jobs[0].id != page.jobs[0].id
    listed = [job.id for job in await caller("read_jobs")]
    assert {lines[0].id, lines[2].id} <= set(listed)
    assert len(listed) == len(set(listed))


async def test_events_come_with_their_types(caller: Caller) -> None:
    """From the first to the end, or after an event that was read."""
    job_id = (await caller("post_job", debate(rounds=2))).id
    events: list[Event] = await caller("follow_job", job_id)
    numbers = [event.number for event in events if event.number is not None]
    assert numbers == list(range(1, len(numbers) + 1))
    assert all(isinstance(event.value, KINDS[event.kind]) for event in events)
    changes = [event.value for event in events if isinstance(event.value, TurnChange)]
    done = [change.agent for change in changes if change.state == "completed"]
    assert sorted(done) == ["a", "a", "b", "b", "m", "m"]
    assert isinstance(events[-1].value, JobEnd)
    later = await caller("follow_job", job_id, after=numbers[-2])
    assert [event.number for event in later] == [numbers[-1]]
    assert await caller("follow_job", job_id, after=numbers[-1]) == []


async def test_events_continue_after_each_disconnect(
    new: Callable[..., Caller], proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks within events, again and again: each comes once, in order."""
    monkeypatch.setattr(following, "RECONNECT_S", 0.01)
    job_id = (await new()("post_job", debate(conversations=2, rounds=3))).id
    whole = [(event.number, event.kind, event.data) for event in await new()("follow_job", job_id) if event.number]
    proxy.cuts = [1_500 + 97 * number for number in range(12)]  # a look at the job, and some events
    events = await new(proxy.url)("follow_job", job_id)
    assert [(event.number, event.kind, event.data) for event in events if event.number] == whole
    assert proxy.carried > 5


async def test_a_result_continues_after_a_disconnect(new: Callable[..., Caller], proxy: CuttingProxy) -> None:
    """Each transcript comes once."""
    job_id = (await new()("post_job", debate(conversations=6))).id
    await new()("wait_job", job_id)
    whole = await new()("read_result", job_id)
    proxy.cuts = [5_000, 400, 9_000, 9_500]
    assert await new(proxy.url)("read_result", job_id) == whole
    assert proxy.carried == 5


async def test_a_lost_answer_doubles_no_job(new: Callable[..., Caller], proxy: CuttingProxy) -> None:
    """With a key the job is sent again and stays one job; without one the caller learns that the outcome is unknown."""
    name = f"once-{id(proxy)}"
    proxy.cuts = [40, 0]
    posted = await new(proxy.url)("post_job", debate(name=name), idempotency_key=name)
    assert proxy.carried == 3
    proxy.cuts = [40]
    with pytest.raises(AnswerLost):
        await new(proxy.url)("post_job", debate(name=f"{name}-2"))
    assert proxy.carried == 4
    jobs = [job for job in await new()("read_jobs") if job.name.startswith(name)]
    assert sorted(job.name for job in jobs) == [name, f"{name}-2"]
    assert posted.id in [job.id for job in jobs]


async def test_workers_are_read_and_operated(caller: Caller, service: Service) -> None:
    """States with their causes, logs and incidents."""
    workers = (await caller("list_workers")).workers
    assert [worker.id for worker in workers] == ["m-0", "m-1", "slow-0"]
    drained = await caller("drain_worker", "m-1")
    assert (drained.state, drained.because) == ("draining", "drained by an operator")
    assert (await caller("resume_worker", "m-1")).slots.total == 2
    before = (await caller("get_worker", "m-1")).incarnation
    await caller("restart_worker", "m-1")

    def is_back() -> bool:
        worker = service.get("/v1/workers/m-1")
        return bool(worker["incarnation"] > before and worker["state"] == "ready")

    await wait_until(is_back, "the worker is there again")
    await caller("wait_ready")
    assert any("listening" in line.text for line in (await caller("get_log", "m-1")).lines)
    assert (await caller("get_incidents", "m-0")).incidents == ()
    with pytest.raises(NotFound):
        await caller("follow_log", "gone")


async def test_a_log_is_followed(service: Service) -> None:
    """The caller reads as long as it wants; then the connection is released."""
    with Client(service.url, api_key="secret") as client:
        lines = client.follow_log("m-0")
        assert any("listening" in line.text for line in lines)
        lines.close()
    async with AsyncClient(service.url, api_key="secret") as aclient:
        async for line in aclient.follow_log("m-0"):
            if "listening" in line.text:
                break


async def test_a_node_is_read(caller: Caller) -> None:
    """Status, lanes, readiness, metrics, tools, adapters."""
    status = await caller("get_status")
    assert (status.pools.capacity, [worker.id for worker in status.workers]) == (6, ["m-0", "m-1", "slow-0"])
    assert (await caller("list_lanes")).lanes == ()
    used = await caller("get_usage", by=["model"], since=date(2026, 1, 1))
    assert (used.by, used.is_cut) == (("model",), False)
    assert (await caller("get_readiness")).status == "ready"
    assert "roundhouse_" in await caller("get_metrics")
    assert (await caller("get_tools", "m")).tools == ()
    assert (await caller("list_adapters", "m")).adapters == ()
    with pytest.raises((InvalidRequest, StateConflict)):
        await caller("load_adapter", "m", "poet", "/nowhere/poet.gguf")
    with pytest.raises(NotFound):
        await caller("unload_adapter", "m", "poet")


async def test_an_unreachable_service_is_reported(new: Callable[..., Caller], free_ports: Callable[[int], int]) -> None:
    """The error has the address and the cause, and comes after the requested time."""
    url = f"http://127.0.0.1:{free_ports(1)}"
    with pytest.raises(Unreachable, match=f"no Roundhouse at {url}: ") as caught:
        await new(url, patience_s=0.3)("get_status")
    assert caught.value.url == url


@pytest.mark.system
@pytest.mark.parametrize("kind", [Client, AsyncClient], ids=["ordinary", "asyncio"])
async def test_a_wait_and_a_stream_outlive_a_kill(
    tmp_path: Path, free_ports: Callable[[int], int], kind: type[Client] | type[AsyncClient]
) -> None:
    """The service is killed and started again: a wait gets the end, a stream gets each event once."""
    models = {"m": scripted_model(free_ports(1), tokens=20, interval=0.01)}
    found: dict[str, Any] = {}
    with serving(tmp_path, free_ports(1), models) as running:
        caller = Caller(kind, running.url)
        job_id = (await caller("post_job", debate(rounds=3))).id

        async def keep(name: str) -> None:
            found[name] = await caller(name, job_id)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(keep, "wait_job")
                tasks.start_soon(keep, "follow_job")
                done = partial(_completed, running, job_id)
                await wait_until(lambda: done() >= 1, "a turn has ended")
                running.kill()
                await anyio.to_thread.run_sync(running.start)
        await caller.close()
    assert found["wait_job"].state == "completed"
    numbers = [event.number for event in found["follow_job"] if event.number]
    assert numbers == list(range(1, len(numbers) + 1))
    assert found["follow_job"][-1].kind == "end"


def _completed(service: Service, job_id: str) -> int:
    return int(service.get(f"/v1/jobs/{job_id}")["progress"]["turns"]["completed"])


@pytest.mark.parametrize("number", range(len(TOLD)))
def test_the_readmes_examples_run(service: Service, number: int) -> None:
    """As they are, except for the model."""
    text = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)[number]
    environment = {**os.environ, "ROUNDHOUSE_URL": service.url, "ROUNDHOUSE_API_KEY": "secret"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text.replace('"tiny"', '"m"')],
        capture_output=True, text=True, env=environment, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(TOLD[number], done.stdout.splitlines()[-1]), done.stdout


def test_every_route_has_a_call(service: Service) -> None:
    """No route of Roundhouse's own surface needs curl."""
    served = {
        (method.upper(), re.sub(r"{[\w:]+}", "{}", path))
        for path, item in service.get("/openapi.json")["paths"].items()
        for method in item
        if not (FOREIGN.match(path) or path in SERVED)
    }
    asked = {(call.request.method, re.sub(r"/(X|0)(?=/|$)", "/{}", call.request.path)) for call in OWN_CALLS}
    assert asked | IN_FLOWS == served


def test_the_types_describe_the_calls(service: Service) -> None:
    """With mypy --strict callers see the arguments and results of each method."""
    with Client(service.url, api_key="secret") as client:
        jobs = client.list_jobs(limit=1).jobs
        assert_type(jobs, tuple[Job, ...])
        for event in client.follow_job("gone") if not jobs else ():
            assert_type(event, Event)


async def test_the_types_describe_the_calls_of_asyncio(service: Service) -> None:
    """The same, awaited."""
    async with AsyncClient(service.url, api_key="secret") as client:
        jobs = (await client.list_jobs(limit=1)).jobs
        assert_type(jobs, tuple[Job, ...])
