"""Conversations that begin from a record cost what they inherit: each key has bounds of turns, bytes and sources.

Source: specification, "Begun from a record".
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.harness.service import Document, Service, scripted_model, serving

MOST_BYTES = 1_000_000  # ``limits.body_bytes``
QUEUED = 50  # the bounded key's limit
ROUNDS = 20  # the inherited source's rounds
MIB = 1 << 20
KEYS: list[Document] = [
    {"name": "root", "key": "key-root", "scopes": ["admin"]},
    {"name": "bounded", "key": "key-bounded", "scopes": ["read", "submit"], "queued": QUEUED},
]
ROOT, BOUNDED = ({"Authorization": f"Bearer {each['key']}"} for each in KEYS)
LARGE = "x" * 100_000
Ports = Callable[[int], int]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Ports) -> Iterator[Service]:
    models = {"m": scripted_model(free_ports(1), slots=8)}
    folder = tmp_path_factory.mktemp("forks")
    with serving(folder, free_ports(1), models, {"keys": KEYS}, limits={"body_bytes": MOST_BYTES}) as running:
        running.http.headers.update(ROOT)
        yield running


def source(service: Service, rounds: int = 1, headers: Document = ROOT, **fields: object) -> str:
    """Run a job of one conversation; return its id."""
    job = {"agents": [{"id": "a", "model": "m"}], "conversations": [{"id": "c", "prompt": "Go."}], **fields}
    job_id = service.post_job({"rounds": rounds, **job}, **headers)
    assert service.wait_ended(job_id)["state"] == "completed"
    return job_id


def fork(
    service: Service, sources: list[str], rounds: int, headers: Document = ROOT, **given: object
) -> httpx.Response:
    talks = [{"from": {"job": job_id, "conversation": "c"}, "rounds": rounds, **given} for job_id in sources]
    job = {"agents": [{"id": "a", "model": "m"}], "conversations": talks}
    return service.http.post("/v1/jobs", json=job, headers=headers, timeout=120)


def memory(service: Service, field: str) -> int:
    """Return the service's memory in bytes: ``VmRSS`` now, or with ``VmHWM`` the maximum since ``forget_peak``."""
    assert service.process is not None
    status = Path(f"/proc/{service.process.pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def forget_peak(service: Service) -> None:
    assert service.process is not None
    Path(f"/proc/{service.process.pid}/clear_refs").write_text("5", encoding="utf-8")


def test_inherited_turns_count_against_a_bound_of_the_key(service: Service) -> None:
    """A fork with one new turn and twenty inherited ones counts as twenty-one."""
    job_id = source(service, ROUNDS, BOUNDED)
    few = fork(service, [job_id], ROUNDS + 1, BOUNDED)
    assert few.status_code == 202, few.text
    many = fork(service, [job_id] * (QUEUED // ROUNDS + 1), ROUNDS + 1, BOUNDED)
    assert many.status_code in (422, 429), many.text
    assert "inherit" in many.text
    assert "bounded" in many.text or str(QUEUED) in many.text
    assert fork(service, [job_id] * (QUEUED // ROUNDS + 1), ROUNDS + 1).status_code == 202, "nobody bounds this key"


TAKEN: dict[str, Document] = {
    "prompts": {"conversations": [{"id": "c", "prompt": LARGE}]},
    "systems": {"agents": [{"id": "a", "model": "m", "system": LARGE}]},
    "casts": {"conversations": [{"id": "c", "prompt": "Go.", "agents": {"a": {"system": LARGE}}}]},
}


@pytest.mark.parametrize("what", TAKEN)
@pytest.mark.parametrize("given", [{}, {"prompt": "Mine."}], ids=["its prompt", "a prompt of its own"])
def test_the_bytes_read_of_sources_are_bounded_like_a_body(service: Service, what: str, given: Document) -> None:
    """Prompts, systems and casts of all sources together: each is read, whether the heir keeps it or not."""
    within = [source(service, **TAKEN[what]) for _ in range(2)]
    assert fork(service, within, 2, **given).status_code == 202
    beyond = [source(service, **TAKEN[what]) for _ in range(MOST_BYTES // len(LARGE) + 1)]
    refused = fork(service, beyond, 2, **given)
    assert refused.status_code == 422, refused.text
    assert ("limits.body_bytes" in refused.text, "conversations[" in refused.text) == (True, True)


@pytest.mark.system
def test_sources_are_read_one_at_a_time(service: Service) -> None:
    """A post that takes little from each of many large sources needs the memory of one; the test counts bytes."""
    large: Document = {"agents": [{"id": f"a{n}", "model": "m", "system": LARGE} for n in range(9)]}
    sources = [source(service, **large) for _ in range(40)]
    fork(service, sources[:1], 2)  # the first post imports modules
    forget_peak(service)
    before = memory(service, "VmHWM")
    fork(service, sources, 2)
    assert memory(service, "VmHWM") - before < 16 * MOST_BYTES, (memory(service, "VmHWM") - before) // MIB


@pytest.mark.system
def test_heirs_of_one_fork_point_share_their_inheritance(service: Service) -> None:
    """Two thousand heirs of a hundred turns hold a hundred turns, while they wait and while they speak."""
    job_id = source(service, 100)
    fork(service, [job_id], 101)
    before = memory(service, "VmRSS")
    forget_peak(service)
    taken = fork(service, [job_id] * 2_000, 101)
    assert taken.status_code == 202, taken.text
    grown = memory(service, "VmHWM") - before
    service.http.post(f"/v1/jobs/{taken.json()['id']}/cancel")
    assert grown < 24 * MIB, grown // MIB


def test_a_source_that_is_named_a_thousand_times_is_read_once(service: Service) -> None:
    """Reading is bounded by sources, not by the conversations that begin from them."""
    job_id = source(service, agents=[{"id": "a", "model": "m", "system": LARGE}])
    assert fork(service, [job_id] * 100, 2, prompt="Mine.").status_code == 202
