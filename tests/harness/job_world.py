"""Drawn jobs on a whole simulated node, under kills, compared with a plain implementation of the specification."""

import argparse
import asyncio
import json
import os
import pickle
import random
import re
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import anyio

from roundhouse_client.flows.forking import copies, forked_document, put_value
from service.config.schema import Config
from service.conversations.job.job import JobId, TurnKey, TurnKind
from service.conversations.job.states import ENDED_JOBS
from service.errors import InvalidJob, NothingRecorded, ServiceError, StoreUnavailable
from service.node.node import Node
from service.node.rollouts import RolloutsWanted
from service.scheduling.asking import judging
from service.store.awaited_turns import Which
from service.store.databases.membership_exclusive import ExclusiveMembership
from tests.harness.drawn_jobs import DrawnJob, JobDrawer, Row, draw_row
from tests.harness.programs.engine import send
from tests.harness.simulated_node import CALM_AT_S, Disk, Plan, World, simulated
from tests.harness.virtual import pass_time
from tests.harness.virtual_loop import Stuck, VirtualLoop
from tests.harness.virtual_machine import EngineProcess, Machine, ScriptedEngine
from tests.reference.heirs import Known
from tests.reference.prompts import Model
from tests.reference.reading import read_job
from tests.reference.rollouts import read_rollouts
from tests.reference.wire import Asked
from transport.dialects.openai import message_document
from workers.offload import pool

WORDS = re.compile(r"\s*\S+|\s+")  # tokens of an answer
RECORDING: Mapping[str, Any] = {"verbose": True, "return_tokens": True, "logprobs": True, "top_logprobs": 1}
FIRST_PROMPT = 1_000_000  # an id that no answer has
GOING_ON = ("continue_final_message", "add_generation_prompt", "echo")
TOPIC = re.compile(r"topic=(\w+)")
CONTEXT = 400
MODELS: Mapping[str, dict[str, Any]] = {
    "m0": {},
    "m1": {"params": {"top_k": 5, "max_tokens": 90}, "bios": {"template": "$context", "quote": "<$who> $words"}},
}
HISTORIES = 0.25  # share of the turns whose prompts are read afterwards
LAST_WORDS = 3500  # characters shown of a failed run
SHOWN = ("agent", "round", "kind", "state", "reason", "text", "inherited", "memory", "continued")


def without_half(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a request as it would be asked from the beginning, and the half that it goes on with, None without one."""
    if not request.get("continue_final_message"):
        return request, None
    half = request["messages"][-1]
    tokens = tokens_of(half)
    whole = {name: value for name, value in request.items() if name not in GOING_ON}
    whole["messages"] = request["messages"][:-1]
    for name, given in (("max_tokens", tokens), ("seed", -tokens)):
        if whole.get(name, -1) >= 0:
            whole[name] += given
    return whole, half


def tokens_of(half: dict[str, Any]) -> int:
    return sum(len(WORDS.findall(part)) for part in (half.get("reasoning_content") or "", half["content"]))


def goes_on(half: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Whether an answer has this half."""
    thought, words = half.get("reasoning_content") or "", half["content"]
    whole = answer.get("reasoning", "")
    return bool(whole == thought or (not words and whole.startswith(thought))) and answer["content"].startswith(words)


async def add(a: int, b: int) -> int:
    """Add two numbers; the only tool."""
    return a + b


async def run_at_once(_: pool.Pool, request: bytes, *__: object) -> object:
    """Run a function that the service would run in another process."""
    function, arguments, _limit_s = pickle.loads(request)  # noqa: S301 - of our own
    await anyio.lowlevel.checkpoint()
    return function(*arguments)


class AnsweringEngine(ScriptedEngine):
    """Answers each agent with one of its answers, and keeps its requests."""

    def __init__(self, process: EngineProcess, options: Namespace, world: "JobWorld") -> None:
        super().__init__(process, options)
        self._world = world
        self._answers: dict[int, dict[str, Any]] = {}

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/tokenize":
            self._world.prompts += 1  # none goes on from another, and an empty answer would not show it
            tokens = [FIRST_PROMPT + self._world.prompts] + [0] * (self.options.prompt_tokens - 1)
            send(writer, 200, json.dumps({"tokens": tokens}).encode())
            await writer.drain()
        elif path == "/detokenize":
            send(writer, 200, json.dumps({"content": self._world.text_of(json.loads(body)["tokens"])}).encode())
            await writer.drain()
        else:
            await super()._answer(path, body, writer)

    async def _answer_whole(self, request: dict[str, Any], writer: asyncio.StreamWriter, slot: dict[str, Any]) -> None:
        """Answer with ids, as llama.cpp does."""
        if not request.get("verbose"):
            await super()._answer_whole(request, writer, slot)
            return
        pieces = self._deltas(request)
        for number, _ in enumerate(pieces):
            await self._maybe_fail(number, request, writer)
            slot["next_token"] = [{"n_decoded": number + 1}]
            await pass_time(self.options.interval)
        answer = self._answers[id(request)]
        ids = [self._world.id_of(piece) for piece in pieces]
        message = {"role": "assistant", "content": answer["content"], "reasoning_content": answer.get("reasoning")}
        message["tool_calls"] = [
            {"id": each["id"], "type": "function", "function": {n: each[n] for n in ("name", "arguments")}}
            for each in answer.get("tool_calls", ())
        ]
        entries = [{"id": number, "token": "?", "logprob": -0.5} for number in ids]
        choice = {
            "index": 0,
            "message": {name: value for name, value in message.items() if value},
            "finish_reason": "tool_calls" if answer.get("tool_calls") else "stop",
            **({"logprobs": {"content": entries}} if request.get("logprobs") else {}),
        }
        usage = {"prompt_tokens": self.options.prompt_tokens, "completion_tokens": len(pieces)}
        told = {"choices": [choice], "usage": usage, "__verbose": {"tokens": ids}}
        send(writer, 200, json.dumps(told).encode())

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter, slot: dict[str, Any]) -> None:
        if "tag" not in request:
            await super()._stream(request, writer, slot)
            return
        whole, half = without_half(request)
        if request.get("verbose"):
            whole = {name: value for name, value in whole.items() if name not in RECORDING}
        self._answers[id(request)] = answer = self._world.draw_answer(whole, half)
        done = self._world.note_asked(whole, half_tokens=tokens_of(half) if half else 0)
        await super()._stream(request, writer, slot)
        done(answer, len(self._pieces_of(answer)))
        del self._answers[id(request)]

    def _deltas(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self._answers.get(id(request))
        if answer is None:
            return super()._deltas(request)
        _, half = without_half(request)
        if half is None:
            return self._pieces_of(answer)
        echo = {"reasoning_content": half.get("reasoning_content") or "", "content": half["content"]}
        rest = {**answer, "content": answer["content"].removeprefix(half["content"])}
        rest["reasoning"] = answer.get("reasoning", "").removeprefix(echo["reasoning_content"])
        return [{name: words} for name, words in echo.items() if words] + self._pieces_of(rest)

    def _pieces_of(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        pieces = [{"reasoning_content": piece} for piece in WORDS.findall(answer.get("reasoning", ""))]
        pieces += [{"content": piece} for piece in WORDS.findall(answer["content"])]
        for index, each in enumerate(answer.get("tool_calls", ())):
            function = {"name": each["name"], "arguments": each["arguments"]}
            pieces.append({"tool_calls": [{"index": index, "id": each["id"], "function": function}]})
        return pieces


@dataclass(slots=True)
class JobWorld(World):
    """One run of drawn jobs."""

    rows: Sequence[Row] = ()
    drawn: list[DrawnJob] = field(default_factory=list)
    ids: dict[str, JobId] = field(default_factory=dict)  # ids of jobs, by their keys
    asked: list[tuple[str, Asked]] = field(default_factory=list)  # by the key of the job
    differences: list[tuple[str, str]] = field(default_factory=list)  # by the key of the job
    told: dict[str, dict[str, Any]] = field(default_factory=dict)  # transcripts, by the keys of jobs
    _answered: Counter[str] = field(default_factory=Counter)
    _drawn: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # the answers to each question
    _life: int = 0
    prompts: int = 0  # tokenized so far
    _tokens: dict[str, int] = field(default_factory=dict)  # ids by their texts

    def id_of(self, piece: dict[str, Any]) -> int:
        """Return the id of a piece of an answer."""
        (text,) = piece.values()
        return self._tokens.setdefault(
            text if isinstance(text, str) else text[0]["function"]["name"], len(self._tokens) + 1
        )

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        texts = {number: text for text, number in self._tokens.items()}
        return "".join(texts[number] for number in ids)

    def config(self) -> Config:
        options: dict[str, object] = {"load": self.plan.load_s, "interval": self.plan.interval_s, "prompt-tokens": 50}
        options["goes-on"] = "kept"
        options |= {"breaks": self.plan.breaks} if self.plan.breaks else {}
        common = {
            "engine": "llama-server",
            "command": [sys.executable],
            "args": options,
            "replicas": self.plan.replicas,
            "slots": self.plan.slots,
            "context": CONTEXT,
            "restart": {"initial_s": 0.5, "max_s": 5, "failures": 50},
            "tools": {"python": {"add": "tests.harness.job_world:add"}},
        }
        models = {name: {**common, **own, "port": 20_000 + 100 * n} for n, (name, own) in enumerate(MODELS.items())}
        return Config.model_validate(
            {
                "server": {"state_dir": str(self.folder)},
                "scheduling": {"policy": self.plan.policy},
                "models": models,
            }
        )

    def draw_jobs(self) -> None:
        for number, row in enumerate(self.rows):
            self.drawn.append(JobDrawer(f"j{number}", row, self.chance).draw())

    # What engines are asked

    def draw_answer(self, request: dict[str, Any], half: dict[str, Any] | None) -> dict[str, Any]:
        """Return an answer; one that goes on is the last that was drawn for the same question."""
        key, _, agent = request["tag"].partition("/")
        question = json.dumps([request["tag"], request["messages"]])
        if half is not None:
            self.counts["answers that went on"] += 1
            return next(each for each in reversed(self._drawn[question]) if goes_on(half, each))
        self._answered[request["tag"]] += 1
        said = f"{key}.{agent}.{self._answered[request['tag']]}"
        job = next(each for each in self.drawn if each.key == key)
        answer = dict(self.chance.choice(job.answers[agent]))
        answer = {n: text.replace("{n}", said) if isinstance(text, str) else text for n, text in answer.items()}
        self._drawn.setdefault(question, []).append(answer)
        return answer

    def note_asked(self, request: dict[str, Any], half_tokens: int) -> Any:  # noqa: ANN401
        key, _, agent = request["tag"].partition("/")
        topic = TOPIC.search(json.dumps(request["messages"]))
        conversation = request.get("at") or (topic[1].rpartition("c")[2] if topic else "")
        conversation = conversation if "at" in request else f"c{conversation}"
        place, now = len(self.asked), self.machine.loop.time()
        self.asked.append((key, Asked(conversation, agent, request, None, self._life, now, now, 0, half_tokens)))
        self.note(f"{request['tag']} of {conversation} is asked")

        def done(answer: dict[str, Any], tokens: int) -> None:
            asked = replace(self.asked[place][1], answer=answer, tokens=tokens, done_at=self.machine.loop.time())
            self.asked[place] = key, asked

        return done

    # What happens

    async def _post_all(self, node: Node) -> None:
        self._life += 1
        for job in self.drawn:
            if job.key in self.ids:
                continue
            if self.chance.random() < 0.3:
                await pass_time(self.chance.uniform(0, 5))
            await self._post(node, job)

    async def _post(self, node: Node, job: DrawnJob) -> None:
        while True:
            try:
                stored, _ = await node.door.post(job.document, job.key)
            except StoreUnavailable:
                await pass_time(1)
                continue
            except InvalidJob as error:
                if self.ids.get(job.key.removesuffix("h")) is None:
                    raise ValueError(f"{error} {error.faults} {dict(job.row)}") from None
                raise
            self.ids[job.key] = stored.id
            return

    async def _wait_ended(self, node: Node) -> None:
        while True:
            await pass_time(2)
            try:
                await self._speak(node)
                open_jobs = 0
                for job in list(self.drawn):
                    if job.key in self.ids:
                        is_ended = (await node.jobs.get(self.ids[job.key])).stored.state in ENDED_JOBS
                        open_jobs += not is_ended
                        if is_ended and job.fork != "none":
                            await self._fork(node, job)
                            open_jobs += 1
            except ServiceError:
                continue
            if not open_jobs:
                return

    async def _speak(self, node: Node) -> None:
        names = {self.ids[job.key]: job for job in self.drawn if job.says and job.key in self.ids}
        for job_id, job in names.items():
            for turn in await node.callers.listed(Which(job_id=job_id), 0, 100):
                words = self.chance.choice(job.says[turn.key.agent_id])
                await node.callers.say(TurnKey(*turn.key), words)

    async def _fork(self, node: Node, source: DrawnJob) -> None:
        """Post a job that begins with the record of an ended one."""
        chance, kind = Random(source.key + str(self.seed)), source.fork  # noqa: S311
        name = source.document["conversations"][0]["id"]
        told = json.loads(b"".join(await node.jobs.transcript_json(self.ids[source.key], name)))
        spoken = [turn for turn in told["turns"] if turn["state"] == "completed" and turn["kind"] == "turn"]
        heir = self._heir(source, kind, name, spoken, chance)
        source.fork = "none"
        if heir is None:
            return
        self.drawn.append(heir)
        try:
            await self._post(node, heir)
        except InvalidJob as error:
            self.drawn.remove(heir)
            self.counts[f"fork refused: {error}"[:160]] += 1

    def _heir(
        self, source: DrawnJob, kind: str, name: str, spoken: list[dict[str, Any]], chance: Random
    ) -> DrawnJob | None:
        if not spoken:
            return None
        key = f"{source.key}h"
        turn = chance.choice(spoken)
        before = {"before": {"agent": turn["agent"], "round": turn["round"]}}
        cut = {"before": before, "times": before, "rounds": {"rounds": max(1, turn["round"])}}.get(kind, {})
        cut = before if kind == "set" and chance.random() < 0.5 else cut
        document = json.loads(json.dumps(source.document))
        document = forked_document(document, self.ids[source.key], name, cut, 1)
        document["conversations"] = copies(document, 2 if kind == "times" else 1)
        document = json.loads(json.dumps(document))  # its conversations have no part in common
        answers = dict(source.answers)
        for agent in document["agents"]:
            if "params" in agent:
                put_value(document, f"agents.{agent['id']}.params.tag", f"{key}/{agent['id']}")
        if kind == "times":
            for each in document["conversations"]:
                for agent in source.answers:
                    put_value(each, f"agents.{agent}.params.at", each["id"])
        if kind == "set":
            answers |= self._change(document, key, source, chance)
        return DrawnJob(key, document, source.row, answers, source.says)

    def _change(self, document: dict[str, Any], key: str, source: DrawnJob, chance: Random) -> dict[str, Any]:
        """Change an heir's agents."""
        name = chance.choice(list(source.answers))
        put_value(document, f"agents.{name}.system", "You are another one.")
        put_value(document, f"agents.{name}.visible_to", chance.choice((None, [], [name])))
        if document["mode"] == "led" or chance.random() < 0.4:
            return {}
        new = {"id": "new", "model": "m1", "params": {"tag": f"{key}/new"}, "role": "guest"}
        document["agents"].append(new)
        return {"new": [{"content": "New words {n}."}, {"content": "yes"}]}

    async def _happen(self, _node: Node) -> None:
        """Apply the drawn events to the engines, until it is calm."""
        while self.now < CALM_AT_S:
            await pass_time(self.chance.expovariate(1.0))
            running = self.machine.running
            if running and self.chance.random() < self.plan.deaths_a_minute / 60:
                self.counts["killed engines"] += 1
                self.chance.choice(running).kill()
            if self.chance.random() < 0.05:
                self.disk.bad = 0.0 if self.disk.bad else self.plan.bad_commits
        self.disk.bad = 0.0
        for process in self.machine.running:
            process.engine.options.breaks = None

    # What must hold

    async def _audit(self, node: Node) -> None:
        models = {
            name: Model(context=CONTEXT, params=own.get("params", {}), bios=own.get("bios", {}))
            for name, own in MODELS.items()
        }
        sources: dict[tuple[str, str], Known] = {}
        for job in self.drawn:
            if job.key not in self.ids:
                self.faults.append(f"{job.key} was never taken")
                continue
            told = self.told[job.key] = {}
            for place, each in enumerate(job.document["conversations"]):
                name = each.get("id") or f"c{place}"
                told[name] = json.loads(b"".join(await node.jobs.transcript_json(self.ids[job.key], name)))
                self.counts[f"conversations {told[name]['state']}"] += 1
                self.counts["turns"] += len(told[name]["turns"])
            asked = [each for key, each in self.asked if key == job.key]
            self.counts["requests"] += len(asked)
            await self._audit_history(node, job, told, asked)
            faults, known = read_job(
                self.ids[job.key], job.document, told, asked, models, lambda _, a: a["a"] + a["b"], sources
            )
            sources |= known
            self.differences += [(job.key, fault) for fault in faults]
            self.differences += [(job.key, fault) for fault in await self._rollout_faults(node, job, told, asked)]
            self.counts["jobs"] += 1

    async def _rollout_faults(
        self, node: Node, job: DrawnJob, told: dict[str, Any], asked: Sequence[Asked]
    ) -> list[str]:
        """Return where the rows of a job are not those of its turns."""
        try:
            posted = await node.rollouts.check_recorded(self.ids[job.key])
        except NothingRecorded:
            return []
        rows: list[dict[str, Any]] | None = None
        while rows is None:
            wanted = RolloutsWanted(partial=True)
            with suppress(StoreUnavailable):  # the first reading is written
                rows = [json.loads(line) async for line in node.rollouts.lines(self.ids[job.key], posted, wanted)]
                continue
            await pass_time(1)
        self.counts["rows"] += len(rows)
        written: dict[tuple[str, str], set[str]] = {}
        for each in asked:
            if each.answer is not None:
                calls = "".join(call["name"] for call in each.answer.get("tool_calls", ()))
                text = each.answer.get("reasoning", "") + each.answer["content"] + calls
                written.setdefault((each.conversation, each.agent), set()).add(text)
        return read_rollouts(job.document, told, rows, self.text_of, written)

    async def _audit_history(self, node: Node, job: DrawnJob, told: Mapping[str, Any], asked: Sequence[Asked]) -> None:
        """Check that the prompts shown for attempts were asked, byte for byte."""
        for name, transcript in told.items():
            seen = [(each.agent, each.body["messages"]) for each in asked if each.conversation == name]
            for turn in transcript["turns"]:
                if turn["inherited"] is not None or self.chance.random() > HISTORIES:
                    continue
                key = TurnKey(self.ids[job.key], name, turn["agent"], turn["round"])
                prompts = await node.prompts.of_turn(key, TurnKind(turn["kind"]))
                self.counts["prompts told"] += len(prompts)
                for prompt, attempt in zip(prompts, turn["attempts"], strict=True):
                    is_whole = attempt["outcome"] == "completed" or attempt["reason"] == "invalid_answer"
                    messages = [message_document(each) for each in prompt.messages or ()]
                    if is_whole and messages not in [each for _, each in seen]:
                        self.differences.append((job.key, f"{job.key}/{name}: {key} was not asked with {messages}"))


def calm_plan(chance: Random, *, is_calm: bool) -> Plan:
    """Draw the events: none if it should be calm."""
    plan = replace(Plan.drawn(chance), killers=0, cancels=0.0)
    if "hang" in plan.breaks:
        plan = replace(plan, breaks="chance=0.05:refuse")
    return replace(plan, deaths_a_minute=0.0, breaks="", bad_commits=0.0, lives=1) if is_calm else plan


def run_rows(seed: int, rows: Sequence[Row], *, is_calm: bool = False, plan: Plan | None = None) -> JobWorld:
    """Run a job of each row, with drawn events or a ``plan``.

    The result's ``differences`` are empty if all went as specified.
    """
    chance = Random(seed)  # noqa: S311
    random.seed(seed)
    loop = VirtualLoop(chance)
    machine = Machine(loop, chance, lambda process, options: AnsweringEngine(process, options, world))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plan = plan or calm_plan(chance, is_calm=is_calm)
        world = JobWorld(seed, Path(folder), chance, plan, machine, Disk(chance), rows=rows)
        for owner in (pool, judging):  # however slow this machine is just now
            stack.enter_context(patch.object(owner, "QUICK_S", 60.0))
        stack.enter_context(patch.object(pool.Pool, "run", run_at_once))
        stack.enter_context(patch.object(ExclusiveMembership, "now", lambda *_: 1.8e9 + loop.time()))
        stack.enter_context(simulated(world, checks=False))
        try:
            anyio.run(world.run, backend_options={"loop_factory": lambda: loop})
        except (Exception, Stuck) as error:  # noqa: BLE001 - it is told with the seed, and with what came before
            world.faults.append("".join(traceback.format_exception(error))[-LAST_WORDS:])
    return world


def show(world: JobWorld, job: DrawnJob, conversation: str) -> None:
    """Print a job, one of its transcripts, and its engines' requests."""
    print(json.dumps(job.document))
    told = world.told[job.key][conversation]
    for turn in told["turns"]:
        print({name: turn[name] for name in SHOWN}, [(each["reason"], each["text"]) for each in turn["attempts"]])
    print({name: value for name, value in told.items() if name != "turns"})
    for key, each in world.asked:
        if key == job.key and each.conversation == conversation:
            asked = f"{each.at:.3f} to {each.done_at:.3f}, life {each.life}: {each.agent} after {each.half_tokens}"
            print(f"{asked} -> {each.answer}")
            for name in sorted(each.body.keys() - {"stream", "stream_options", "tools", "return_progress"}):
                print(f"    {name}: {each.body[name]}")


def main() -> None:
    """Run seeds of random rows, and print where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=12, help="of a seed")
    parser.add_argument("--calm", action="store_true")
    parser.add_argument("--only", help="the factors that are drawn, with commas")
    parser.add_argument("--show", action="store_true", help="print the documents of jobs that differ")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        sys.exit("set PYTHONHASHSEED=0: the order in sets of names is drawn otherwise")
    failed = 0
    for seed in options.seeds:
        began = time.perf_counter()
        chance = Random(f"rows {seed}")  # noqa: S311
        rows = [
            draw_row(chance, options.only.split(",") if options.only not in (None, "all") else None)
            for _ in range(options.jobs)
        ]
        world = run_rows(seed, rows, is_calm=options.calm)
        print(seed, f"{time.perf_counter() - began:.2f} s", dict(world.counts))
        for fault in world.faults[:20]:
            print(f"  seed {seed}: {fault}")
        for key, fault in world.differences:
            job = next(each for each in world.drawn if each.key == key)
            print(f"  seed {seed} {key}: {fault}\n    {dict(job.row)}")
            if options.show:
                show(world, job, fault.partition(":")[0].rpartition("/")[2])
        failed += bool(world.faults or world.differences)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
