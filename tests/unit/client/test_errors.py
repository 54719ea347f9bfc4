"""The tree of errors: every answer and every failure of httpx maps to one of them."""

import httpx
import pytest

import roundhouse_client
import service.api.errors.refusals  # noqa: F401 - the classes in it are of the tree too
from roundhouse_client import errors
from roundhouse_client.calls.job_calls import get_job
from roundhouse_client.drivers.exchange import AFTER, BEFORE, Address, translated
from roundhouse_client.errors import AnswerLost, AnswerMalformed, Refused, RoundhouseError, Unreachable, refusal
from roundhouse_client.request import Reply, checked
from service.api.errors.problems import ANSWERS
from service.errors import ServiceError
from tests.documents.test_reference import classes_below
from tests.unit.client.answers import problem


def leaves(base: type) -> list[type]:
    """Return httpx's own classes below ``base`` from which no other class of httpx derives."""
    every: list[type] = base.__subclasses__()
    kinds = [each for each in every if each.__module__.partition(".")[0] == "httpx"]
    return [found for each in kinds for found in leaves(each)] or [base]


def test_every_failure_of_httpx_is_translated() -> None:
    """Callers need not know which library sends; a wrong use of streams is a defect of ours."""
    mapped = (*BEFORE, *AFTER)
    assert [each for each in leaves(httpx.RequestError) if not issubclass(each, mapped)] == []
    assert issubclass(httpx.InvalidURL, mapped)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (httpx.ConnectError("refused"), Unreachable),
        (httpx.ConnectTimeout("slow"), Unreachable),
        (httpx.ReadError("reset"), AnswerLost),
        (httpx.ReadTimeout("slow"), AnswerLost),
        (httpx.RemoteProtocolError("cut"), AnswerLost),
    ],
)
def test_errors_say_whether_the_request_may_have_been_carried_out(
    raised: Exception, kind: type[RoundhouseError]
) -> None:
    """The caller decides by it whether to send again."""
    with pytest.raises(kind) as caught, translated("http://here"):
        raise raised
    assert (caught.value.__cause__, str(raised) in str(caught.value)) == (raised, True)


def test_every_status_that_the_service_sends_has_a_class() -> None:
    """Classes follow the caller's possible reactions; only failures of the service have the general one."""
    statuses = {kind.status for kind in classes_below(ServiceError)} | {each.status for each in ANSWERS.values()}
    others = {status for status in statuses if type(refusal(status, {})) is errors.ServiceFailed}
    assert others <= {500, 502}


def test_a_refusal_carries_the_services_answer() -> None:
    """Code, title, detail, faults with their paths, and when to try again."""
    faults = [{"path": "agents[0].model", "message": "unknown model 'x'"}]
    error = refusal(422, problem(422, "invalid_job", errors=faults, title="The job is refused"))
    assert isinstance(error, errors.InvalidRequest)
    assert (error.status, error.code, error.title, error.detail) == (
        422, "invalid_job", "The job is refused", "it cannot be",
    )  # fmt: skip
    assert str(error) == "The job is refused\n  agents[0].model: unknown model 'x'"
    busy = refusal(503, problem(503, "shutting_down"), "7")
    assert (type(busy), busy.retry_after_s, str(busy)) == (errors.NotNow, 7.0, "it cannot be")
    assert refusal(503, {}, "Wed, 21 Oct 2026 07:28:00 GMT").retry_after_s is None


def test_an_answer_of_a_proxy_is_a_refusal_too() -> None:
    """A proxy's page has no code, and is shown."""
    with pytest.raises(Refused, match="not an answer of Roundhouse: '<h1>bad gateway") as caught:
        checked(Reply(status=502, body=b"<h1>bad gateway</h1>"))
    assert (type(caught.value), caught.value.code) == (errors.ServiceFailed, "")
    with pytest.raises(AnswerMalformed, match="301"):
        checked(Reply(status=301, body=b""))


def test_every_error_is_exported() -> None:
    """Callers can catch each error by its name."""
    kinds = (each for each in vars(errors).values() if isinstance(each, type))
    there = {each.__name__ for each in kinds if each.__module__ == errors.__name__}
    assert there <= set(roundhouse_client.__all__)
    assert roundhouse_client.__all__ == sorted(roundhouse_client.__all__)


def test_a_request_that_waits_has_a_longer_time_limit() -> None:
    """A wait that the service was asked for is no silence."""
    address, calls = Address("http://here", None, 3.0), (get_job("x"), get_job("x", wait_s=20))
    limits = [address.arguments(call.request)["timeout"] for call in calls]
    assert [(limit.read, limit.connect) for limit in limits] == [(3.0, 3.0), (23.0, 3.0)]


@pytest.mark.parametrize("url", ["ftp://here", "http://[::1", "here:8080"])
def test_an_invalid_url_is_refused_at_once(url: str) -> None:
    """No request is sent."""
    with pytest.raises(Unreachable, match="no Roundhouse at"):
        Address(url, None, 1.0)


def test_url_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the command line; arguments override them, and no key is shown."""
    monkeypatch.setenv("ROUNDHOUSE_URL", "http://there:1/")
    monkeypatch.setenv("ROUNDHOUSE_API_KEY", "hidden")
    address = Address(None, None, 1.0)
    assert address.url == "http://there:1"
    assert address.arguments(roundhouse_client.request.Request(path="/x"))["headers"] == {
        "Authorization": "Bearer hidden"
    }
    assert "hidden" not in repr(address)
    assert Address("http://here", "mine", 1.0).url == "http://here"


def test_a_fault_without_a_place_is_shown_alone() -> None:
    """For example that a file is no YAML."""
    document = {"title": "The configuration is not usable", "errors": [{"path": "", "message": "r.yaml:7: not YAML"}]}
    assert str(Refused(422, document)) == "The configuration is not usable\n  r.yaml:7: not YAML"
    document["errors"] = [{"path": "models.m.slots", "message": "is required"}]
    assert str(Refused(422, document)).endswith("\n  models.m.slots: is required")
