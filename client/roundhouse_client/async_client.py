"""``AsyncClient``: all of Roundhouse for asyncio. One line here makes a method of a call in ``calls/``."""

from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import update_wrapper
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

import httpx

from roundhouse_client.calls import job_calls, model_calls, node_calls, session_calls, worker_calls
from roundhouse_client.drivers.concurrent import AsyncDriver
from roundhouse_client.drivers.exchange import CALL_PATIENCE_S, LIMIT_S, Address
from roundhouse_client.drivers.ordinary import OnPause
from roundhouse_client.flows import following, forking, reading, rolling, speaking, waiting
from roundhouse_client.flows.asking import ask, patient
from roundhouse_client.flows.steps import Flow, Gives
from roundhouse_client.request import Call

P = ParamSpec("P")
T = TypeVar("T")


class _Asks(Generic[P, T]):
    """A method that sends one call and returns its answer."""

    def __init__(self, call: Callable[P, Call[T]]) -> None:
        self._call = call

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Call[T]]: ...
    @overload
    def __get__(self, client: "AsyncClient", owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(
        self, client: "AsyncClient | None", owner: type
    ) -> Callable[P, Call[T]] | Callable[P, Coroutine[Any, Any, T]]:
        if client is None:
            return self._call

        async def method(*args: P.args, **kwargs: P.kwargs) -> T:
            return await client.ask(self._call(*args, **kwargs))

        return update_wrapper(method, self._call)


class _Runs(Generic[P, T]):
    """A method that runs a flow and returns its result."""

    def __init__(self, flow: Callable[P, Flow[T]]) -> None:
        self._flow = flow

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Flow[T]]: ...
    @overload
    def __get__(self, client: "AsyncClient", owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(
        self, client: "AsyncClient | None", owner: type
    ) -> Callable[P, Flow[T]] | Callable[P, Coroutine[Any, Any, T]]:
        if client is None:
            return self._flow

        async def method(*args: P.args, **kwargs: P.kwargs) -> T:
            return await client.driver.run(patient(self._flow, client.flow_patience_s)(*args, **kwargs))

        return update_wrapper(method, self._flow)


class _Streams(Generic[P, T]):
    """A method that runs a flow and yields its values."""

    def __init__(self, flow: Callable[P, Gives[T]]) -> None:
        self._flow = flow

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Gives[T]]: ...
    @overload
    def __get__(self, client: "AsyncClient", owner: type) -> Callable[P, AsyncGenerator[T, None]]: ...
    def __get__(
        self, client: "AsyncClient | None", owner: type
    ) -> Callable[P, Gives[T]] | Callable[P, AsyncGenerator[T, None]]:
        if client is None:
            return self._flow

        def method(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
            return client.driver.stream(patient(self._flow, client.flow_patience_s)(*args, **kwargs))

        return update_wrapper(method, self._flow)


class AsyncClient:
    """A client of a running Roundhouse; an asynchronous context manager that closes its connections.

    ``url`` and ``api_key`` default to ``ROUNDHOUSE_URL`` and ``ROUNDHOUSE_API_KEY``. ``timeout_s`` bounds the silence
    of an answer. Failures that may pass are retried for ``patience_s`` where that doubles nothing: for reads, and for
    jobs posted with an idempotency key. ``http`` is your own httpx client, with proxies or certificates, which you
    close; without one the environment's proxies are not used. ``on_pause`` is called before each wait. Close streams
    that you leave early with ``contextlib.aclosing``.

    Raises:
        Unreachable: the URL is not an HTTP URL.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = LIMIT_S,
        patience_s: float | None = None,
        http: httpx.AsyncClient | None = None,
        on_pause: OnPause | None = None,
    ) -> None:
        self._address = Address(url, api_key, timeout_s)
        self.driver = AsyncDriver(self._address, http, on_pause)
        self.patience_s = CALL_PATIENCE_S if patience_s is None else patience_s
        self.flow_patience_s = patience_s  # None keeps the default of each wait and stream

    def __repr__(self) -> str:
        return f"<AsyncClient {self.url}>"

    @property
    def url(self) -> str:
        """The address of the service."""
        return self._address.url

    async def __aenter__(self) -> Self:
        """Use the client for a block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self.driver.close()

    async def ask(self, call: Call[T], *, patience_s: float | None = None) -> T:
        """Send a call, and return its answer; ``patience_s`` None takes the client's own.

        Raises:
            RoundhouseError: any error of its tree.
        """
        return await self.driver.run(ask(call, self.patience_s if patience_s is None else patience_s))

    post_job = _Asks(job_calls.post_job)
    post_jobs = _Asks(job_calls.post_jobs)
    list_jobs = _Asks(job_calls.list_jobs)
    read_jobs = _Streams(reading.read_jobs)
    get_job = _Asks(job_calls.get_job)
    wait_job = _Runs(waiting.wait_job)
    follow_job = _Streams(following.follow_job)
    awaited = _Asks(job_calls.awaited)
    say = _Runs(speaking.say)
    fork = _Runs(forking.fork)
    cancel_job = _Asks(job_calls.cancel_job)
    delete_job = _Asks(job_calls.delete_job)
    read_result = _Streams(reading.read_result)
    download_result = _Streams(reading.download_result)
    get_conversation = _Asks(job_calls.get_conversation)
    get_prompts = _Asks(job_calls.get_prompts)
    get_document = _Asks(job_calls.get_document)
    get_timeline = _Asks(job_calls.get_timeline)
    get_deliveries = _Asks(job_calls.get_deliveries)
    read_rollouts = _Streams(rolling.read_rollouts)
    read_episodes = _Streams(rolling.read_episodes)
    post_reward = _Asks(job_calls.post_reward)

    open_session = _Asks(session_calls.open_session)
    get_session = _Asks(session_calls.get_session)
    get_session_rows = _Asks(session_calls.get_session_rows)
    get_session_episodes = _Asks(session_calls.get_session_episodes)
    post_session_reward = _Asks(session_calls.post_session_reward)
    delete_session = _Asks(session_calls.delete_session)

    list_workers = _Asks(worker_calls.list_workers)
    get_worker = _Asks(worker_calls.get_worker)
    drain_worker = _Asks(worker_calls.drain_worker)
    resume_worker = _Asks(worker_calls.resume_worker)
    restart_worker = _Asks(worker_calls.restart_worker)
    get_log = _Asks(worker_calls.get_log)
    follow_log = _Streams(following.follow_log)
    get_incidents = _Asks(worker_calls.get_incidents)

    get_status = _Asks(node_calls.get_status)
    get_speaking = _Asks(node_calls.get_speaking)
    list_lanes = _Asks(node_calls.list_lanes)
    get_usage = _Asks(node_calls.get_usage)
    list_nodes = _Asks(node_calls.list_nodes)
    list_spans = _Asks(node_calls.list_spans)
    get_upgrade = _Asks(node_calls.get_upgrade)
    upgrade = _Asks(node_calls.upgrade)
    reload_configuration = _Asks(node_calls.reload_configuration)
    get_health = _Asks(node_calls.get_health)
    get_readiness = _Asks(node_calls.get_readiness)
    wait_ready = _Runs(waiting.wait_ready)
    get_metrics = _Asks(node_calls.get_metrics)

    list_models = _Asks(model_calls.list_models)
    load_model = _Asks(model_calls.load_model)
    unload_model = _Asks(model_calls.unload_model)
    get_tools = _Asks(model_calls.get_tools)
    list_adapters = _Asks(model_calls.list_adapters)
    load_adapter = _Asks(model_calls.load_adapter)
    unload_adapter = _Asks(model_calls.unload_adapter)
    get_weights = _Asks(model_calls.get_weights)
    init_weights = _Asks(model_calls.init_weights)
    update_weights = _Asks(model_calls.update_weights)
