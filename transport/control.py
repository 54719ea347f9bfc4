"""vLLM's control endpoints: pause, resume, and calls into its worker processes.

Source: vLLM 0.32 and 0.33, ``entrypoints/serve/dev`` and ``entrypoints/rl/online`` (``VLLM_SERVER_DEV_MODE=1``). Their
paths move between releases; a missing one answers 404. No call has a time limit: the caller knows how long a phase may
take, and a dropped call goes on in the engine.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

import anyio
import msgspec

from transport.bodies import UnreadableBody, read_body
from transport.client import LOST, open_http
from transport.dialects.refusals import decode_error
from transport.endpoint import Endpoint
from transport.engine_connections import connection_error
from transport.errors import UNDECODABLE, CannotAsk, EngineRejected, MalformedFrame

_OK: Final = 200
_ABSENT: Final = 404
OWN_LACK_S: Final = 0.2
MOST_BYTES: Final = 1024 * 1024  # largest answer
_SENT: Final = "http11.send_request_body.complete"


class EngineControl:
    """Controls one vLLM, on a fresh connection for each call, apart from generation."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __repr__(self) -> str:
        return f"<EngineControl {self._endpoint}>"

    async def pause(self, *, clear_cache: bool) -> None:
        """Return when the engine stands still; requests in flight are kept and go on after ``resume``.

        With ``clear_cache`` the engine forgets prefixes and reads kept requests again with the weights it then has.

        Raises:
            EngineError: it does not pause.
        """
        await self._call("POST", "/pause", params={"mode": "keep", "clear_cache": clear_cache})

    async def resume(self) -> None:
        """Return when the engine goes on.

        Raises:
            EngineError: it does not.
        """
        await self._call("POST", "/resume")

    async def sleep(self) -> None:
        """Return when the engine's weights are in host memory and its device memory is free.

        Raises:
            EngineError: it does not sleep.
        """
        await self._call("POST", "/sleep", params={"level": 1})

    async def wake(self) -> None:
        """Return when the weights are back on the device.

        Raises:
            EngineError: it does not wake.
        """
        await self._call("POST", "/wake_up")

    async def call_workers(self, method: str, arguments: Mapping[str, object]) -> list[object]:
        """Call each of the engine's worker processes; return their answers.

        Raises:
            EngineError: one of them failed, or cannot be asked.
        """
        answer = await self._call("POST", "/collective_rpc", body={"method": method, "kwargs": arguments})
        results = answer.get("results")
        if not isinstance(results, list):
            raise MalformedFrame(f"/collective_rpc answered without results: {answer}")
        return results

    async def post(self, path: str, body: Mapping[str, object], on_sent: Callable[[], None] | None = None) -> None:
        """Return when a POST has succeeded; ``on_sent`` is called once the body is sent.

        Raises:
            EngineError: it failed.
        """
        await self._call("POST", path, body=body, on_sent=on_sent)

    async def load_adapter(self, name: str, path: str) -> int | None:
        """Return when a LoRA adapter can be asked for by name, even if it was loaded before.

        Returns the engine's number for the adapter; None if that is unknown.

        Raises:
            EngineError: it cannot be loaded.
        """
        before = await self._adapters()
        try:
            await self._call("POST", "/v1/load_lora_adapter", body={"lora_name": name, "lora_path": path})
        except EngineRejected as error:
            if "already been loaded" not in str(error):
                raise
        new = await self._adapters() - before
        return new.pop() if len(new) == 1 else None

    async def unload_adapter(self, name: str, number: int | None) -> None:
        """Return when a LoRA adapter is gone: its name, and its weights if ``number`` is known.

        vLLM itself forgets only the name and keeps the weights in their place until others need it (0.32); on a CPU the
        base's tokens are then computed with the weights in the last place.

        Raises:
            EngineError: it cannot be unloaded, or was never loaded.
        """
        await self._call("POST", "/v1/unload_lora_adapter", body={"lora_name": name})
        if number in await self._adapters():
            await self.call_workers("remove_lora", {"lora_id": number})

    async def _adapters(self) -> set[int]:
        """Return the numbers of the adapters whose weights the engine's worker processes hold."""
        answers = await self.call_workers("list_loras", {})
        return {int(number) for number in re.findall(r"\d+", str(answers[0]))} if answers else set()

    async def label(self, version: int) -> None:
        """Set the engine's version label of its weights; do nothing if it has no such label.

        Raises:
            EngineError: it has one, and cannot set it.
        """
        try:
            await self._call("POST", "/update_weight_version", body={"new_version": str(version)})
        except EngineRejected as error:
            if error.status != _ABSENT:
                raise

    async def world_size(self) -> int:
        """Return how many worker processes the engine has.

        Raises:
            EngineError: it does not report that.
        """
        size = (await self._call("GET", "/get_world_size")).get("world_size")
        if not isinstance(size, int):
            raise MalformedFrame(f"/get_world_size answered {size!r}")
        return size

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, object] | None = None,
        body: Mapping[str, object] | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> Mapping[str, object]:
        async def trace(event: str, _info: Mapping[str, object]) -> None:
            if event == _SENT and on_sent is not None:
                on_sent()

        query = {} if params is None else {name: str(value).lower() for name, value in params.items()}
        answer = content = None
        while answer is None or content is None:
            try:
                async with (
                    open_http(self._endpoint) as client,
                    client.stream(method, path, params=query, json=body, extensions={"trace": trace}) as answer,
                ):
                    content = await read_body(answer, MOST_BYTES)
            except UnreadableBody as error:
                raise MalformedFrame(f"{method} {path}: {error}") from error
            except LOST as error:
                failure = connection_error(error, f"{method} {path}: ")
                if not isinstance(failure, CannotAsk):
                    raise failure from error
                await anyio.sleep(OWN_LACK_S)  # nothing was sent, and the engine is not to blame
        if answer.status_code != _OK:
            raise decode_error(answer.status_code, answer.headers, content)
        try:
            is_json = answer.headers.get("content-type", "").startswith("application/json")  # adapters: a sentence
            document = msgspec.json.decode(content) if content and is_json else {}
        except UNDECODABLE as error:
            raise MalformedFrame(f"{path} answered 200 with no JSON: {error}") from error
        return document if isinstance(document, dict) else {}
