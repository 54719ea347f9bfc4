"""Rows of a file: what is kept of them beside their variables, and what is said where they cannot be used."""

from pathlib import Path

import pytest

from roundhouse_client import JobFileInvalid
from roundhouse_client.job_files import ReadJob, with_rows

WANTED: dict[str, object] = {"file": "rows.csv", "id": "$id", "prompt": "Is $question right?"}


def read(tmp_path: Path, rows: str, name: str = "rows.csv", **more: object) -> ReadJob:
    (tmp_path / name).write_text(rows)
    return with_rows({"conversations": {**WANTED, "file": name, **more}}, tmp_path, "job.yaml")


def test_metadata_of_a_row_stays_with_its_conversation(tmp_path: Path) -> None:
    """Columns that no prompt has, such as a group: a person finds them in the result."""
    table = "id,question,group,topic\na,it,one,cars\nb,that,two,tea\n"
    conversations = read(tmp_path, table, metadata=["group"], variables=["topic"]).document["conversations"]
    assert [each["metadata"] for each in conversations] == [{"group": "one"}, {"group": "two"}]
    assert [each["variables"] for each in conversations] == [{"topic": "cars"}, {"topic": "tea"}]


def test_metadata_may_be_any_json(tmp_path: Path) -> None:
    """It is kept and not read: lists and nothing at all, which no variable may be."""
    line = '{"id": "a", "question": "it", "labels": ["x", {"y": null}], "none": null}\n'
    (conversation,) = read(tmp_path, line, "rows.jsonl", metadata=["labels", "none"]).document["conversations"]
    assert conversation["metadata"] == {"labels": ["x", {"y": None}], "none": None}
    assert conversation["prompt"] == "Is it right?"  # without variables no dollar sign is read


def test_metadata_that_is_not_there_is_told_with_its_line(tmp_path: Path) -> None:
    """As a variable that is not there, with the columns that are."""
    with pytest.raises(JobFileInvalid) as caught:
        read(tmp_path, "id,question\na,it\n", metadata=["group"])
    (fault,) = caught.value.faults
    assert "rows.csv:1: " in fault
    assert "'group'" in fault
    assert "id, question" in fault
    with pytest.raises(JobFileInvalid, match=r"conversations\.metadata: must be a list of names of fields"):
        read(tmp_path, "id,question\na,it\n", metadata={"group": "group"})


@pytest.mark.parametrize(
    ("name", "rows"),
    [("rows.csv", "id,text,topic\na,b,c\n"), ("rows.jsonl", '{"id": 1, "text": "b", "topic": "c"}\n')],
)
def test_a_field_that_is_not_there_is_told_with_those_that_are(tmp_path: Path, name: str, rows: str) -> None:
    """One sees at once what the column is called."""
    with pytest.raises(JobFileInvalid) as caught:
        read(tmp_path, rows, name)
    (fault,) = caught.value.faults
    assert f"{name}:1: " in fault
    assert "'question' is not there" in fault
    assert "id, text, topic" in fault


def test_many_columns_are_not_all_told(tmp_path: Path) -> None:
    """A line is a line, and a name of a column may be as long as a file."""
    header = ",".join(f"column{number}{'x' * 100}" for number in range(1000))
    with pytest.raises(JobFileInvalid) as caught:
        read(tmp_path, f"{header}\n")
    (fault,) = caught.value.faults
    assert "column0" in fault
    assert len(fault) < 1000 + len(str(tmp_path))


def test_a_file_that_is_not_there_is_told_with_the_key_that_names_it(tmp_path: Path) -> None:
    """The fault is the job file's as likely as the folder's."""
    with pytest.raises(JobFileInvalid) as caught:
        with_rows({"conversations": WANTED}, tmp_path, "jobs/job.yaml")
    (fault,) = caught.value.faults
    assert fault.startswith("jobs/job.yaml: conversations.file: ")
    assert "rows.csv: No such file" in fault
