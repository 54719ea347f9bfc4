"""A scripted engine: takes llama-server's flags and speaks its chat API, in the way that a test wants.

Standard library only, so that it starts quickly and under any interpreter. Each fault is one flag; without flags it
behaves as a healthy engine does.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

CALIBRATION = re.compile(r"[0-9a-f]{8} (word )+")
OTHER_AT = 5  # the word that another answer has in place of its own
TEMPLATES = {"first": "<think>", "maybe": "{% if not enable_thinking %}<think></think>{% endif %}", "never": ""}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    address = parser.add_mutually_exclusive_group(required=True)
    address.add_argument("--port", type=int)
    address.add_argument("--uds", help="listen on this UNIX socket")
    parser.add_argument("--lives", type=Path, help="append a line, begin or end and the pid: of a start, of a SIGTERM")
    parser.add_argument("--record", type=Path, help="append one JSON line a request: when it came, and its body")
    parser.add_argument(
        "--chooses",
        action="store_true",
        help="answer with one of what stands behind ANSWERS: in the system message, with | between, or that a grammar "
        "allows: the same for the same discussion; CALL NAME is a call of that tool",
    )
    parser.add_argument("--echo", help="answer with what this pattern finds in the messages, instead of counting")
    parser.add_argument(
        "--calls",
        type=json.loads,
        help="call the tool of this JSON object, {name, arguments}, wherever it may be called and was not just run",
    )
    parser.add_argument("--tokens", type=int, default=3, help="tokens of an answer")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds between tokens")
    parser.add_argument("--hold", help="wait until there is the file that this pattern finds last in the messages")
    parser.add_argument("--prefill", type=float, default=0.0, help="seconds before the first token, with no byte sent")
    parser.add_argument("--prompt-tokens", type=int, default=7, help="tell that every prompt has so many tokens")
    parser.add_argument("--load", type=float, default=0.0, help="seconds of 503 before it is ready")
    parser.add_argument("--exit-at-once", type=int, help="exit with this status before anything is served")
    parser.add_argument(
        "--exit-if", type=Path, help="exit with status 3 before anything is served if this file is there"
    )
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--signals", action="store_true", help="leave every signal to its default")
    parser.add_argument(
        "--daemon", type=Path, help="double-fork a setsid child that holds the output; its pid goes here"
    )
    parser.add_argument("--flood", type=int, default=0, help="bytes of log at the start")
    parser.add_argument("--die-after", type=int, help="exit with status 0 after so many tokens of an answer")
    parser.add_argument("--die-on", help="exit when a prompt holds this text, or with --die-after in the answer to it")
    parser.add_argument("--stop-on", help="stop as by SIGSTOP when a prompt holds this text")
    parser.add_argument(
        "--die-once", type=Path, help="with --die-on, --die-after or --stop-on: only while this file is not there"
    )
    parser.add_argument(
        "--breaks",
        type=_breakage,
        help="WHEN=NUMBER:HOW; when: every (so many requests), load (so many in flight), chance (of a request), age "
        "(in seconds); how: exit, segv, kill, hang, refuse",
    )
    parser.add_argument("--stall-after", type=int, help="send so many tokens and then nothing more")
    parser.add_argument("--cut-after", type=int, help="send so many tokens and then half a frame, and close")
    parser.add_argument("--error-after", type=int, help="send so many tokens and then an error inside the stream")
    parser.add_argument("--error-message", default="Compute error.", help="what that error says")
    parser.add_argument("--counts", type=int, help="count so many tokens in every prompt that is to be counted")
    parser.add_argument("--count-busy", type=Path, help="be too busy to count once: while this file is not there")
    parser.add_argument("--count-status", type=int, default=404, help="answer so to what is to be counted, otherwise")
    parser.add_argument("--reject", type=int, help="answer every request with this status")
    parser.add_argument("--reject-body", default='{"error": {"code": 500, "message": "no", "type": "server_error"}}')
    parser.add_argument("--deaf-after", type=int, help="live on and listen no more after so many answers")
    parser.add_argument("--html", action="store_true", help="answer requests with a 200 of HTML")
    parser.add_argument("--parallel", type=int, default=4, help="slots; a request beyond them waits without a byte")
    parser.add_argument("--accepts-first", action="store_true", help="send the headers before a slot is free")
    parser.add_argument("--props-slots", type=int, help="tell so many slots in GET /props; otherwise there is none")
    parser.add_argument("--cache-metrics", type=Path, help="answer GET /metrics with what is in this file")
    parser.add_argument("--no-slots", action="store_true", help="know no GET /slots")
    parser.add_argument(
        "--thinks",
        choices=list(TEMPLATES),
        help="know POST /apply-template, and a template that begins a thought, leaves it to the model, or has none",
    )
    parser.add_argument(
        "--goes-on",
        choices=["kept", "rewritten", "unlike", "refused", "declined", "closed", "spent", "other"],
        help="know how to go on with half an answer: as it is, after a template that writes it in other words, with "
        "other words although the template keeps it, or not at all although the template keeps it: with 400, with 500, "
        "without an answer; the last two refuse all, or write another answer, once they have died",
    )
    parser.add_argument("--muses", type=int, default=0, help="with --goes-on: think so many words before each answer")
    parser.add_argument("--script", type=Path, help="answer the n-th request with the n-th entry of this JSON list")
    parser.add_argument("--never-ready", action="store_true", help="load for ever")
    parser.add_argument("--mute", action="store_true", help="accept requests and never answer")
    parser.add_argument("--mute-on", help="accept requests whose prompt holds this text and never answer those")
    parser.add_argument(
        "--spin-after", type=int, help="send so many tokens, then spin at 100 %% with everything blocked"
    )
    parser.add_argument("--comments", type=float, help="send an SSE comment every so many seconds, and nothing else")
    parser.add_argument("--progress", type=int, default=0, help="send so many steps of prompt progress first")
    parser.add_argument(
        "--counting", type=int, default=0, help="read the prompt in so many steps, seen in /slots alone"
    )
    parser.add_argument("--step", type=float, default=0.05, help="seconds of one such step")
    parser.add_argument("--bad-frame-after", type=int, help="send so many tokens and then a frame that is not JSON")
    parser.add_argument("--long-frame-after", type=int, help="send so many tokens and then a frame of 16 MiB")
    parser.add_argument("--repeat", help="answer with this again and again, for as long as anybody listens")
    parser.add_argument("--keep-busy", action="store_true", help="keep a slot busy when its client has gone")
    parser.add_argument("--retry-after", type=int, help="with --reject: the header of that name")
    parser.add_argument("--reject-first", type=int, help="reject only so many requests")
    parser.add_argument("--reject-on", help="reject only requests whose body holds this text")
    return parser.parse_known_args(argv)[0]


def _breakage(text: str) -> tuple[str, float, str]:
    what, how = text.split(":")
    when, number = what.split("=")
    return when, float(number), how


class Engine:
    """Serves one connection a request."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ready_at = time.monotonic() + options.load
        self.requests = 0
        self.rejected = 0
        self.asked = 0
        self.is_wedged = False
        self.deaf = asyncio.Event()
        self.free = asyncio.Semaphore(options.parallel)
        self.slots = [
            {
                "id": number,
                "id_task": -1,
                "is_processing": False,
                "n_prompt_tokens_processed": 0,
                "next_token": [{"n_decoded": 0}],
            }
            for number in range(options.parallel)
        ]

    def exit(self, status: int) -> None:
        """End the process at once."""
        os._exit(status)

    def take_signal(self, number: signal.Signals) -> None:
        """Handle a signal as a process without a handler does."""
        os.kill(os.getpid(), number)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = re.search(r"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            answer = asyncio.ensure_future(self._answer(head.split()[1], body, writer))
            gone = asyncio.ensure_future(reader.read())
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            answer.cancel()  # the client has gone, or the answer is done
            with contextlib.suppress(asyncio.CancelledError):
                await answer
            gone.cancel()
        writer.close()
        if self.requests == self.options.deaf_after:
            self.deaf.set()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        options = self.options
        if options.never_ready or time.monotonic() < self.ready_at:
            send(writer, 503, b'{"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}')
        elif path == "/v1/models":
            send(writer, 200, b'{"object": "list", "data": []}')
        elif path == "/slots" and not options.no_slots:
            send(writer, 200, json.dumps(self.slots).encode())
        elif path == "/props" and (options.props_slots or options.thinks):
            props = {"total_slots": options.props_slots, "chat_template": TEMPLATES.get(options.thinks, "")}
            send(writer, 200, json.dumps(props).encode())
        elif path == "/apply-template" and (options.goes_on or options.thinks):
            render = self._template if options.goes_on else self._render
            send(writer, 200, json.dumps({"prompt": render(json.loads(body))}).encode())
        elif path == "/v1/chat/completions/input_tokens":
            self._count(json.loads(body), writer)
        elif path != "/v1/chat/completions":
            self._answer_probe(path, writer)
        elif options.reject and self._may_reject(body):
            send(writer, options.reject, options.reject_body.encode(), retry_after=options.retry_after)
        elif options.html:
            send(writer, 200, b"<html>Welcome</html>", "text/html")
        else:
            await self._serve_chat(json.loads(body), writer)
        await writer.drain()

    def _answer_probe(self, path: str, writer: asyncio.StreamWriter) -> None:
        """Answer vLLM's own probes; for others there is no answer."""
        if path == "/health":
            send(writer, 200, b"")
        elif path == "/metrics" and self.options.cache_metrics:
            send(writer, 200, self.options.cache_metrics.read_bytes(), "text/plain")
        else:
            send(writer, 404, b"{}")

    def _count(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        options = self.options
        if options.goes_on:
            tokens = options.prompt_tokens + sum(len(_pieces(part)) for part in _begun(request))
            return send(writer, 200, json.dumps({"input_tokens": tokens}).encode())
        self._record(request)
        if options.count_busy is not None and not options.count_busy.exists():
            options.count_busy.touch()
            return send(writer, 503, b"{}")
        counted = {} if options.counts is None else {"input_tokens": options.counts}
        return send(writer, 200 if counted else options.count_status, json.dumps(counted).encode())

    def _may_reject(self, body: bytes) -> bool:
        if self.options.reject_on is not None and self.options.reject_on.encode() not in body:
            return False
        self.rejected += 1
        return self.options.reject_first is None or self.rejected <= self.options.reject_first

    async def _serve_chat(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        options = self.options
        is_muted = options.mute_on is not None and options.mute_on in json.dumps(request["messages"])
        if options.mute or is_muted or self.is_wedged:
            await asyncio.Event().wait()
        if CALIBRATION.fullmatch(str(request["messages"][-1]["content"])):
            return await self._show_pace(request, writer)
        self.asked += 1
        if self._must_break() and self._break():
            return send(writer, 500, options.reject_body.encode())
        if self.is_wedged:
            await asyncio.Event().wait()
        if options.accepts_first and request.get("stream"):
            await _begin_stream(writer)
        async with self.free:
            slot = next(slot for slot in self.slots if not slot["is_processing"])
            slot.update(
                id_task=self.requests, is_processing=True, n_prompt_tokens_processed=0, next_token=[{"n_decoded": 0}]
            )
            try:
                await self._stream(request, writer, slot)
            except asyncio.CancelledError:
                if options.keep_busy:
                    await asyncio.shield(asyncio.Event().wait())
                raise
            finally:
                slot["is_processing"] = False

    async def _show_pace(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Answer requests that measure an engine's speed: they are not recorded, and cause no fault."""
        options, tokens = self.options, int(request["max_tokens"])
        await _begin_stream(writer)
        await asyncio.sleep(options.prefill)
        for number in range(tokens):
            _event(writer, {"choices": [{"index": 0, "delta": {"content": f"word{number} "}}]})
            await writer.drain()
            await asyncio.sleep(options.interval)
        _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(request["messages"][-1]["content"].split()), "completion_tokens": tokens}
        _event(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter, slot: dict[str, Any]) -> None:
        options = self.options
        self.requests += 1
        self._record(request)
        messages = json.dumps(request["messages"])
        if options.die_on and options.die_after is None and options.die_on in messages and self._may_die():
            self.exit(1)
        if options.stop_on and options.stop_on in messages and self._may_die():
            self.take_signal(signal.SIGSTOP)
        is_spent = options.goes_on == "spent" and options.die_once.exists()
        if is_spent or (any(_begun(request)) and options.goes_on in {"refused", "other"}):
            return send(writer, 400, b'{"error": {"code": 400, "message": "no prefill", "type": "invalid_request"}}')
        if any(_begun(request)) and options.goes_on == "declined":
            return send(writer, 500, b'{"error": {"code": 500, "message": "no prefill", "type": "server_error"}}')
        if any(_begun(request)) and options.goes_on == "closed":
            return None
        if not request.get("stream"):
            return await self._answer_whole(request, writer, slot)
        if not options.accepts_first:
            await _begin_stream(writer)
        await self._held(request)
        await self._prefill(writer, slot)
        deltas = self._deltas(request)
        for number, delta in enumerate(deltas):
            await self._maybe_fail(number, request, writer)
            _event(writer, {"choices": [{"index": 0, "delta": delta}]})
            slot["next_token"] = [{"n_decoded": number + 1}]
            await writer.drain()
            await asyncio.sleep(options.interval)
        while options.repeat:
            _event(writer, {"choices": [{"index": 0, "delta": {"content": options.repeat.replace("|", "\n")}}]})
            await writer.drain()
            await asyncio.sleep(options.interval or 0.001)
        await self._maybe_fail(len(deltas), request, writer)
        reason = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
        reason = next((delta.pop("finish") for delta in deltas if "finish" in delta), reason)
        _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        begun = _begun(request)
        tokens = options.prompt_tokens + sum(len(_pieces(part)) for part in begun)
        usage = {"prompt_tokens": tokens, "completion_tokens": len(deltas) - sum(map(bool, begun))}
        _event(writer, {"choices": [], "usage": usage})
        return writer.write(b"data: [DONE]\n\n")

    async def _answer_whole(self, request: dict[str, Any], writer: asyncio.StreamWriter, slot: dict[str, Any]) -> None:
        """Answer once the whole answer is ready."""
        options = self.options
        await self._held(request)
        await self._prefill(writer, slot)
        deltas = self._deltas(request)
        for number, _ in enumerate(deltas):
            await self._maybe_fail(number, request, writer)
            slot["next_token"] = [{"n_decoded": number + 1}]
            await asyncio.sleep(options.interval)
        message = {"role": "assistant", "content": "".join(delta.get("content", "") for delta in deltas)}
        usage = {"prompt_tokens": options.prompt_tokens, "completion_tokens": len(deltas)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        send(writer, 200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def _template(self, request: dict[str, Any]) -> str:
        """Return a prompt that ends with the half answer, if there is one."""
        thought, text = _begun(request)
        asked = request["messages"][:-1] if thought or text else request["messages"]
        half = (f"<think>{thought}" + "</think>" * bool(text) if thought else "") + text
        half = half.upper() if self.options.goes_on == "rewritten" else half
        return "".join(f"<{each['role']}>{each['content']}" for each in asked) + f"<assistant>{half}"

    def _render(self, request: dict[str, Any]) -> str:
        """Return a prompt as the template ends it; the request is recorded too."""
        self._record(request)
        if self.options.thinks != "never" and _may_not_think(request):
            return "?<think>\n\n</think>\n\n"
        return "?<think>\n" if self.options.thinks == "first" else "?"

    def _record(self, request: dict[str, Any]) -> None:
        if self.options.record:
            entry = {"at": time.time(), "pid": os.getpid(), "request": request}
            with self.options.record.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    async def _held(self, request: dict[str, Any]) -> None:
        found = re.findall(self.options.hold, json.dumps(request["messages"])) if self.options.hold else []
        while found and not _is_there(found[-1]):  # noqa: ASYNC110 - a file tells of itself to none
            await asyncio.sleep(0.005)

    async def _prefill(self, writer: asyncio.StreamWriter, slot: dict[str, Any]) -> None:
        options = self.options
        while options.comments:
            writer.write(b": ping\n\n")
            await writer.drain()
            await asyncio.sleep(options.comments)
        for step in range(options.counting):
            slot["n_prompt_tokens_processed"] = step + 1
            await asyncio.sleep(options.step)
        for step in range(options.progress):
            told = {"total": options.progress, "processed": step, "cache": 0, "time_ms": 1}
            _event(writer, {"choices": [], "prompt_progress": told})
            await writer.drain()
            await asyncio.sleep(options.step)
        await asyncio.sleep(options.prefill)

    async def _maybe_fail(self, number: int, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        options = self.options
        is_meant = number == options.die_after and (options.die_on or "") in json.dumps(request["messages"])
        if is_meant and self._may_die():
            self.exit(0)
        if number == options.stall_after:
            self.is_wedged = True
            await asyncio.Event().wait()
        if number == options.spin_after:
            while True:
                pass
        if number == options.bad_frame_after:
            writer.write(b"data: {nonsense\n\n")
        if number == options.long_frame_after:
            writer.write(b"data: " + b"x" * (16 << 20))
        if number == options.cut_after:
            writer.write(b'data: {"choices": [{"del')
            raise ConnectionError
        if number == options.error_after:
            _event(writer, {"error": {"code": 500, "message": options.error_message, "type": "server_error"}})
            raise ConnectionError

    def _must_break(self) -> bool:
        when, number, _ = self.options.breaks or ("", 0.0, "")
        in_flight = sum(bool(slot["is_processing"]) for slot in self.slots)
        return (
            (when == "every" and self.asked >= number)
            or (when == "load" and in_flight + 1 >= number)
            or (when == "chance" and random.random() < number)  # noqa: S311
        )

    def _break(self) -> bool:
        """Break as configured; return whether only the request is refused."""
        how = self.options.breaks[2]
        if how in {"segv", "kill"}:
            self.take_signal(signal.SIGSEGV if how == "segv" else signal.SIGKILL)
        if how == "exit":
            self.exit(1)
        self.is_wedged = how == "hang"
        return bool(how == "refuse")

    def _may_die(self) -> bool:
        marker: Path | None = self.options.die_once
        if marker is None:
            return True
        if marker.exists():
            return False
        marker.touch()
        return True

    def _deltas(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        if self.options.repeat:
            return []
        if self.options.goes_on:
            return self._rest(request)
        if self.options.script:
            script = json.loads(self.options.script.read_text())
            entry = script[min(self.requests, len(script)) - 1]
            if self.options.thinks == "first" and not _may_not_think(request):
                thought, _, answer = entry["content"].partition("</think>")  # without an end all of it is the thought
                entry = {"reasoning": thought, "content": answer}
            return _scripted(entry) + ([{"finish": entry["finish"]}] if "finish" in entry else [])
        if self.options.chooses:
            return _scripted(_chosen(request))
        if self.options.calls and request.get("tools") and request["messages"][-1]["role"] != "tool":
            return _scripted({"tool_calls": [self.options.calls]})
        return [{"content": word} for word in self._words(request)]

    def _rest(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the answer, with a half that it goes on with as its first piece."""
        is_other = self.options.goes_on == "other" and self.options.die_once.exists()
        topic = re.search(self.options.echo, json.dumps(request["messages"])) if self.options.echo else None
        numbered = [f"{topic[0] if topic else ''}word{number}" for number in range(self.options.tokens)]
        if is_other:
            numbered[OTHER_AT] = "other"
        thought, begun = _begun(request)
        entry: dict[str, Any] = {"content": " ".join(numbered)}
        if self.options.script:
            script = json.loads(self.options.script.read_text())
            calls = sum(message["role"] == "tool" for message in request["messages"])
            entry = script[min(calls, len(script) - 1)]
        if self.options.chooses:
            entry = _chosen(request)
        mused = " ".join(f"thought{number}" for number in range(self.options.muses)) if not begun else thought
        muses = [{"reasoning_content": each} for each in (thought, *_pieces(mused.removeprefix(thought))) if each]
        rest = _pieces(entry.get("content", "").removeprefix(begun))
        rest = rest[: request.get("max_tokens")]
        first = [{"content": begun if self.options.goes_on != "unlike" else begun[::-1]}] if begun else []
        words = [{"content": piece} for piece in rest]
        return [*muses, *first, *words, *_scripted({**entry, "content": ""})]

    def _words(self, request: dict[str, Any]) -> list[str]:
        if self.options.echo:
            text = json.dumps(request["messages"])
            found = list(dict.fromkeys(re.findall(self.options.echo, text)))
            return [f"{word} " for word in found]
        return [f"word{number} " for number in range(self.options.tokens)]


def _note(file: Path | None, what: str) -> None:
    if file is not None:
        with file.open("a") as lives:  # several engines share it: one write is one line
            lives.write(f"{what} {os.getpid()}\n")


def _is_there(path: str) -> bool:
    return Path(path).exists()


async def _begin_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    await writer.drain()


def _may_not_think(request: dict[str, Any]) -> bool:
    return request.get("chat_template_kwargs", {}).get("enable_thinking") is False


def _chosen(request: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that depends on the discussion alone: system messages contain the time."""
    messages = request["messages"][: -1 if any(_begun(request)) else None]
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    rules = dict(line.split(" ::= ", 1) for line in (request.get("grammar") or "").splitlines())
    held_to = re.findall(r'"([^"]+)"', rules.get("answer", rules.get("root", "")))  # a thought may come first
    listed = re.findall(r"ANSWERS: ([^\n]*)", system) or ["Indeed. | Perhaps. | No."]
    answers = held_to or [each.strip() for each in listed[-1].split("|")]
    heard = json.dumps([message for message in messages if message["role"] != "system"])
    heard = re.sub(r"\\n\\nYou began this turn before[^\"]*", "", heard)  # a break changes no answer
    digest = hashlib.sha256(f"{heard} {answers}".encode()).digest()
    word = answers[digest[0] % len(answers)]
    if word.startswith("CALL "):
        return {"tool_calls": [{"name": word[5:], "arguments": "{}"}]}
    return {"content": word}


def _begun(request: dict[str, Any]) -> tuple[str, str]:
    """Return the thought and the text of the half answer that a request goes on with, empty without one."""
    if not request.get("continue_final_message"):
        return "", ""
    half = request["messages"][-1]
    return str(half.get("reasoning_content", "")), str(half["content"])


def _pieces(text: str) -> list[str]:
    """Return the tokens of a text: words with the blanks before them, as models write them."""
    return re.findall(r"\s*\S+", text)


def _scripted(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pieces of one answer; the arguments of its calls come in pieces of five characters."""
    deltas: list[dict[str, Any]] = []
    if "reasoning" in entry:
        deltas.append({"reasoning_content": entry["reasoning"]})
    deltas += [{"content": word} for word in re.findall(r"\S*\s*", entry.get("content", "")) if word]
    for index, call in enumerate(entry.get("tool_calls", [])):
        name = {"name": call["name"], "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": call.get("id", f"c{index}"), "function": name}]})
        text = call["arguments"]
        for start in range(0, len(text), 5):
            piece = {"index": index, "function": {"arguments": text[start : start + 5]}}
            deltas.append({"tool_calls": [piece]})
    return deltas


def send(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes,
    content_type: str = "application/json",
    retry_after: int | None = None,
) -> None:
    head = [f"HTTP/1.1 {status} X", f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    head += [] if retry_after is None else [f"Retry-After: {retry_after}"]
    writer.write("\r\n".join([*head, "Connection: close", "", ""]).encode() + body)


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(document).encode() + b"\n\n")


def _leave_daemon(pid_file: Path) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            pid_file.write_text(str(os.getpid()))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
        os._exit(0)
    os.wait()


async def _main(options: argparse.Namespace) -> None:
    engine = Engine(options)
    stop = asyncio.Event()
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif options.signals:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    # A client that finds the port open may signal at once, so the handlers are installed first.
    if options.uds:
        server: asyncio.Server = await asyncio.start_unix_server(engine.serve, options.uds)
    else:
        server = await asyncio.start_server(engine.serve, options.host, options.port)
    if options.breaks and options.breaks[0] == "age":
        asyncio.get_running_loop().call_later(options.breaks[1], os._exit, 1)
    print(f"scripted engine: listening on {options.uds or f'port {options.port}'}", flush=True)
    async with server:
        ends = [asyncio.ensure_future(event.wait()) for event in (stop, engine.deaf)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await stop.wait()
    _note(options.lives, "end")
    os._exit(0)


def main() -> None:
    """Fail at once, or serve."""
    options = parse_options()
    _note(options.lives, "begin")
    if options.exit_if and options.exit_if.exists():
        options.exit_at_once = 3
    if options.exit_at_once is not None:
        print("scripted engine: cannot allocate the universe", flush=True)
        sys.exit(options.exit_at_once)
    for start in range(0, options.flood, 100):
        print(f"{start:099d}")
    if options.daemon:
        _leave_daemon(options.daemon)
    asyncio.run(_main(options))


if __name__ == "__main__":
    main()
