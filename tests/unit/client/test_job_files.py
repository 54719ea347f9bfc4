"""Job files whose conversations are rows of another file (docs/reference/jobs.md, "Conversations of a file")."""

import json
from pathlib import Path

import pytest

from roundhouse_client import JobFileInvalid, load_job
from roundhouse_client.job_files import with_rows
from service.formats.documents import parse_document

WANTED: dict[str, object] = {"file": "rows.jsonl", "id": "$id", "prompt": "Is $question right?"}


def read(tmp_path: Path, rows: str, name: str = "rows.jsonl", **more: object) -> list[dict[str, object]]:
    """Return the conversations of a file with this text."""
    (tmp_path / name).write_text(rows)
    conversations = {**WANTED, "file": name, **more}
    return list(with_rows({"conversations": conversations}, tmp_path, "job.yaml").document["conversations"])


def faults(tmp_path: Path, rows: str, name: str = "rows.jsonl", **more: object) -> list[str]:
    """Return the faults of such a file, without the folder."""
    with pytest.raises(JobFileInvalid) as caught:
        read(tmp_path, rows, name, **more)
    return [fault.removeprefix(f"{tmp_path}/") for fault in caught.value.faults]


def test_each_line_is_a_conversation(tmp_path: Path) -> None:
    """Fields are placed by name. Numbers and booleans are read as in JSON, and blank lines are skipped."""
    rows = '{"id": 1, "question": "it", "topic": "x"}\n\n{"id": "b", "question": "$id $$5", "topic": true}\n'
    assert read(tmp_path, rows) == [{"id": "1", "prompt": "Is it right?"}, {"id": "b", "prompt": "Is $id $$5 right?"}]
    assert read(tmp_path, rows, limit=1, variables=["topic"]) == [
        {"id": "1", "prompt": "Is it right?", "variables": {"topic": "x"}}
    ]
    assert read(tmp_path, rows, id=None, variables=["topic"])[1] == {
        "prompt": "Is $$id $$$$5 right?",
        "variables": {"topic": True},
    }
    assert read(tmp_path, rows, prompt="$$5 for ${topic}$")[0]["prompt"] == "$5 for x$"


def test_a_table_names_its_fields_in_its_first_row(tmp_path: Path) -> None:
    """Cells may hold line ends and commas; a column's name may hold any character allowed in braces."""
    table = '\ufeffid,the question,other\na,"One,\ntwo",1\n\nb,Three,2\n'
    assert read(tmp_path, table, "rows.csv", prompt="${the question}?") == [
        {"id": "a", "prompt": "One,\ntwo?"},
        {"id": "b", "prompt": "Three?"},
    ]
    assert read(tmp_path, "id\tquestion\na\tb\n", "rows.tsv") == [{"id": "a", "prompt": "Is b right?"}]


@pytest.mark.parametrize(
    ("name", "rows", "told"),
    [
        ("rows.jsonl", '{"id": 1}\nno\n[1]\n{"id": 1, "question": null}', [
            "rows.jsonl:1: 'question' is not there",
            "rows.jsonl:2: is not JSON",
            "rows.jsonl:3: is not an object",
            "rows.jsonl:4: 'question' is no text, number, true or false",
        ]),
        ("rows.jsonl", "[" * 200_000, ["rows.jsonl:1: is not JSON"]),
        ("rows.jsonl", "\n", ["rows.jsonl: has no rows"]),
        ("rows.csv", "id,question\na\nb,c,d\n", [
            "rows.csv:2: has 1 cells, and the first row 2",
            "rows.csv:3: has 3 cells, and the first row 2",
        ]),
        ("rows.csv", "id,text\na,b\n", ["rows.csv:1: the first row has the names of the fields, and 'question'"]),
        ("rows.csv", 'id,question\na,"b\n', ["rows.csv:2: is not CSV"]),
        ("rows.csv", "id,question,\na,b,c\n1,,\n", ["rows.csv:3: 'question' is empty"]),
        ("rows.csv", "id,question,x,x\na,b,c,d\n", ["rows.csv:1: the first row has the names of the fields, and 'x'"]),
        ("rows.jsonl", '{"id": 1, "question": NaN}\n{"id": 2, "question": -Infinity}', [
            "rows.jsonl:1: 'question' is no number: NaN",
            "rows.jsonl:2: 'question' is no number: NaN",
        ]),
        ("rows.jsonl", '{"id": 1, "question": ""}', ["rows.jsonl:1: 'question' is empty"]),
    ],
)  # fmt: skip
def test_faults_are_reported_with_their_lines(tmp_path: Path, name: str, rows: str, told: list[str]) -> None:
    """All of them, up to a readable number."""
    found = faults(tmp_path, rows, name)
    assert len(found) == len(told)
    assert all(fault.startswith(each) for fault, each in zip(found, told, strict=True)), found


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    """It is missing, is not UTF-8, or has too many rows."""
    with pytest.raises(JobFileInvalid, match=r"rows\.jsonl: No such file"):
        with_rows({"conversations": WANTED}, tmp_path, "job.yaml")
    (tmp_path / "rows.jsonl").write_bytes(b'{"id": "\xff"}')
    with pytest.raises(JobFileInvalid, match=r"rows\.jsonl: is not UTF-8"):
        with_rows({"conversations": WANTED}, tmp_path, "job.yaml")
    rows = '{"id": 1, "question": "x"}\n' * 100_001
    assert faults(tmp_path, rows) == ["rows.jsonl:100001: more than 100000 rows; give conversations.limit"]
    assert len(read(tmp_path, rows, limit=5)) == 5


def test_a_blank_prompt_and_a_metadata_that_is_no_json_are_told_with_their_lines(tmp_path: Path) -> None:
    """Unused columns may hold anything."""
    assert faults(tmp_path, '{"id": 1, "question": " "}', prompt="$question") == ["rows.jsonl:1: the prompt is blank"]
    rows = '{"id": 1, "question": "x", "gold": {"n": NaN}}'
    assert "rows.jsonl:1: 'gold' is no number: NaN" in faults(tmp_path, rows, metadata=["gold"])[0]
    assert len(read(tmp_path, rows)) == 1


@pytest.mark.parametrize(
    "job",
    [
        {"system": "You are $question."},
        {"agents": [{"id": "a", "system": "Of ${question}."}]},
        {"agents": [{"id": "a", "role": "$question"}]},
        {"agents": [{"id": "a", "validation": {"choices": ["$question"]}}]},
        {"until": [{"agent": "a", "says": ["$question"]}]},
    ],
)
def test_a_field_named_in_a_text_has_to_be_a_variable(tmp_path: Path, job: dict[str, object]) -> None:
    """Otherwise the name itself would be sent, in every row."""
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "question": "x"}')
    with pytest.raises(JobFileInvalid, match=r"\$question is a field of the rows; list it in"):
        with_rows({**job, "conversations": WANTED}, tmp_path, "job.yaml")
    with_rows({**job, "conversations": {**WANTED, "variables": ["question"]}}, tmp_path, "job.yaml")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"prompt": None}, "job.yaml: conversations.prompt: is required"),
        ({"limit": 0}, "job.yaml: conversations.limit: must be a whole number from 1 on"),
        ({"variables": {"a": "b"}}, "job.yaml: conversations.variables: must be a list of names of fields"),
        ({"rounds": 2}, "job.yaml: conversations.rounds: unknown key"),
        ({"file": "rows.txt"}, "job.yaml: conversations.file: must end with one of"),
    ],
)
def test_an_invalid_option_is_refused(tmp_path: Path, more: dict[str, object], told: str) -> None:
    """Before anything is read."""
    with pytest.raises(JobFileInvalid) as caught:
        with_rows({"conversations": {**WANTED, **more}}, tmp_path, "job.yaml")
    assert caught.value.faults[0].startswith(told)


def test_yaml_is_read_as_the_service_reads_it(tmp_path: Path) -> None:
    """Words that other versions of YAML read as booleans or dates, and numbers of every kind."""
    values = [
        "yes",
        "No",
        "on",
        "off",
        "y",
        "true",
        "TRUE",
        "False",
        "~",
        "null",
        "2024-01-01",
        "12:30:45",
        "0o17",
        "1e3",
    ]
    text = "".join(f"k{number}: {value}\n" for number, value in enumerate(values)) + "conversations: []\n"
    (tmp_path / "job.yaml").write_text(text)
    assert load_job(tmp_path / "job.yaml") == parse_document(text, "job.yaml")[0]


@pytest.mark.parametrize("name", ["job.yaml", "job.json"])
def test_a_job_is_loaded_with_its_conversations(tmp_path: Path, name: str) -> None:
    """From a file beside it, with progress reports. Words of YAML stay words, as the service reads them."""
    agents = [{"id": "a", "model": "m", "validation": {"choices": ["yes", "no"]}}]
    text = f"agents:\n- {{id: a, model: m, validation: {{choices: [yes, no]}}}}\nconversations: {json.dumps(WANTED)}\n"
    job = {"agents": agents, "conversations": WANTED}
    (tmp_path / name).write_text(json.dumps(job) if name == "job.json" else text)
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "question": "x"}\n' * 2500)
    told: list[int] = []
    loaded = load_job(tmp_path / name, on_progress=told.append)
    assert (loaded["agents"], len(loaded["conversations"]), told) == (agents, 2500, [1000, 2000, 2500])
    (tmp_path / name).write_text("[1" if name == "job.json" else "a: [")
    with pytest.raises(JobFileInvalid, match="is not"):
        load_job(tmp_path / name)
