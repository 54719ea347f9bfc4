"""Rows of recorded conversations, as the specification has them: each completed turn once, and its reward."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Document = dict[str, Any]


def read_rollouts(
    document: Document,
    told: Mapping[str, Document],
    rows: Sequence[Document],
    text_of: Callable[[Sequence[int]], str],
    written: Mapping[tuple[str, str], set[str]],
) -> list[str]:
    """Return where the rows differ from the transcripts of an ended job.

    ``text_of`` reads ids; ``written`` are all texts of engines, by conversation and agent. Engines of these jobs tell
    as many ids for each prompt, so that no prompt goes on from another: each message is a row.
    """
    recorded = {
        each["id"]: each.get("record") or document.get("record") or {}
        for each in document["agents"]
        if each.get("by", "model") == "model"
    }
    faults: list[str] = []
    for name, transcript in told.items():
        own = [row for row in rows if row["conversation"] == name]
        spoken = [turn for turn in transcript["turns"] if _is_spoken(turn) and recorded[turn["agent"]].get("tokens")]
        wanted = [(turn["agent"], turn["round"]) for turn in spoken]
        found = [(row["agent"], row["rounds"][0]) for row in own]
        if {*wanted} != {*found}:
            faults.append(f"{name}: its rows are of {sorted(found)}, and its turns of {sorted(wanted)}")
        for row in own:
            text = text_of([each for each, mask in zip(row["completion_ids"], row["mask"], strict=True) if mask])
            has_logprobs = bool(recorded[row["agent"]].get("logprobs"))
            faults += _row_faults(row, text, written[name, row["agent"]], has_logprobs=has_logprobs)
        for turn in spoken:
            of_turn = [row for row in own if (row["agent"], row["rounds"][0]) == (turn["agent"], turn["round"])]
            tokens = sum(sum(row["mask"]) for row in of_turn)
            if tokens != (turn["recorded"] or {}).get("tokens"):
                faults.append(f"{name}: {turn['agent']} has {tokens} tokens in rows, not {turn['recorded']}")
        faults += [
            f"{name}: {turn['agent']} {turn['round']} was recorded"
            for turn in transcript["turns"]
            if turn["recorded"] is not None and turn not in spoken and turn["inherited"] is None
        ]
        faults += _reward_faults(document.get("reward"), name, transcript, own)
    return faults


def _row_faults(row: Document, text: str, written: set[str], *, has_logprobs: bool) -> list[str]:
    name = row["conversation"]
    found = {
        f"no engine wrote {text!r} for {row['agent']}": text not in written,
        f"a row is {row['partial']} over {row['rounds']}": row["partial"] or row["rounds"][0] != row["rounds"][1],
        f"its logprobs are {row['logprobs']}": (row["logprobs"] is None) == has_logprobs,
    }
    return [f"{name}: {fault}" for fault, is_so in found.items() if is_so]


def _is_spoken(turn: Document) -> bool:
    is_own = turn["inherited"] is None and turn["by"] == "model"
    return turn["kind"] == "turn" and turn["state"] == "completed" and is_own


def _reward_faults(source: Document | None, name: str, transcript: Document, rows: Sequence[Document]) -> list[str]:
    wanted = None
    if source is not None:
        said = [
            turn["text"]
            for turn in transcript["turns"]
            if turn["agent"] == source["agent"]
            and turn["inherited"] is None
            and turn["state"] == "completed"
            and turn["kind"] == "turn"
        ]
        number = re.search(source["pattern"], said[-1]) if said else None
        wanted = None if number is None else float(number[0])
    return [
        f"{name}: a row has the reward {row['reward']} ({row['reward_error']}), and not {wanted}"
        for row in rows
        if row["reward"] != wanted or (source is not None and (wanted is None) != bool(row["reward_error"]))
    ]
