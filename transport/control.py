"""vLLM's control endpoints: pause, resume, and calls into its worker processes.

Source: vLLM 0.32 and 0.33, ``entrypoints/serve/dev`` and ``entrypoints/rl/online`` (``VLLM_SERVER_DEV_MODE=1``). Their
paths move between releases and answer 404 where they are not. Nothing here is bounded in time: the caller knows how
long a phase may take, and a call that is dropped goes on in the engine.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

import anyio
import msgspec

from transport.bodies import UnreadableBody, read_body
from transport.client import LOST, connection_error, open_http
from transport.dialects import openai
from transport.endpoint import Endpoint
from transport.errors import CannotAsk, EngineRejected, MalformedFrame

_OK: Final = 200
_ABSENT: Final = 404
OWN_LACK_S: Final = 0.2
MOST_BYTES: Final = 1024 * 1024  # of one answer
_SENT: Final = "http11.send_request_body.complete"


class EngineControl:
    """One vLLM's control; a connection of its own for each call, apart from those of generation."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __repr__(self) -> str:
        return f"<EngineControl {self._endpoint}>"

    async def pause(self, *, clear_cache: bool) -> None:
        """Return when the engine stands still; requests in flight are kept, and go on after ``resume``.

        With ``clear_cache`` what they have read is read again with the weights of then, and prefixes are forgotten.

        Raises:
            EngineError: it does not.
        """
        await self._call("POST", "/pause", params={"mode": "keep", "clear_cache": clear_cache})

    async def resume(self) -> None:
        """Return when the engine goes on.

        Raises:
            EngineError: it does not.
        """
        await self._call("POST", "/resume")

    async def sleep(self) -> None:
        """Return when the engine's weights are in the host's memory, and its device's memory is free.

        Raises:
            EngineError: it does not sleep.
        """
        await self._call("POST", "/sleep", params={"level": 1})

    async def wake(self) -> None:
        """Return when they are back.

        Raises:
            EngineError: it does not wake.
        """
        await self._call("POST", "/wake_up")

    async def call_workers(self, method: str, arguments: Mapping[str, object]) -> list[object]:
        """Call each of the engine's worker processes; return their answers.

        Raises:
            EngineError: one of them failed, or they cannot be asked.
        """
        answer = await self._call("POST", "/collective_rpc", body={"method": method, "kwargs": arguments})
        results = answer.get("results")
        if not isinstance(results, list):
            raise MalformedFrame(f"/collective_rpc answered without results: {answer}")
        return results

    async def post(self, path: str, body: Mapping[str, object], on_sent: Callable[[], None] | None = None) -> None:
        """Return when a call of its own has succeeded; ``on_sent`` is called when the engine has been told.

        Raises:
            EngineError: it has not.
        """
        await self._call("POST", path, body=body, on_sent=on_sent)

    async def load_adapter(self, name: str, path: str) -> int | None:
        """Return when a LoRA adapter can be asked for by its name; so it can where it was there already.

        What is returned is the engine's number for it, where that can be told.

        Raises:
            EngineError: it cannot.
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
        """Return when a LoRA adapter is gone: its name, and where its ``number`` is known its weights.

        vLLM itself forgets the name alone, and has the weights in their place until others need it (0.32); on a CPU the
        base's tokens are computed with those in the last place.

        Raises:
            EngineError: it is not, or never was there.
        """
        await self._call("POST", "/v1/unload_lora_adapter", body={"lora_name": name})
        if number in await self._adapters():
            await self.call_workers("remove_lora", {"lora_id": number})

    async def _adapters(self) -> set[int]:
        """Return the numbers of the adapters whose weights the engine's worker processes have."""
        answers = await self.call_workers("list_loras", {})
        return {int(number) for number in re.findall(r"\d+", str(answers[0]))} if answers else set()

    async def label(self, version: int) -> None:
        """Tell the engine what its weights are called, where it keeps such a word.

        Raises:
            EngineError: it does, and cannot be told.
        """
        try:
            await self._call("POST", "/update_weight_version", body={"new_version": str(version)})
        except EngineRejected as error:
            if error.status != _ABSENT:
                raise

    async def world_size(self) -> int:
        """Return how many worker processes the engine has.

        Raises:
            EngineError: it does not say.
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
            raise openai.decode_error(answer.status_code, answer.headers, content)
        try:
            is_json = answer.headers.get("content-type", "").startswith("application/json")  # adapters: a sentence
            document = msgspec.json.decode(content) if content and is_json else {}
        except openai.UNDECODABLE as error:
            raise MalformedFrame(f"{path} answered 200 with no JSON: {error}") from error
        return document if isinstance(document, dict) else {}
