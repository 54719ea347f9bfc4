"""Rows of a file: metadata kept beside their variables, and messages about unusable rows."""

from pathlib import Path

import pytest

from roundhouse_client import JobFileInvalid
from roundhouse_client.job_files import ReadJob, with_rows

WANTED: dict[str, object] = {"file": "rows.csv", "id": "$id", "prompt": "Is $question right?"}


def read(tmp_path: Path, rows: str, name: str = "rows.csv", **more: object) -> ReadJob:
    (tmp_path / name).write_text(rows)
    return with_rows({"conversations": {**WANTED, "file": name, **more}}, tmp_path, "job.yaml")


def test_metadata_of_a_row_stays_with_its_conversation(tmp_path: Path) -> None:
    """Columns that no prompt uses, such as a group, appear in the result."""
    table = "id,question,group,topic\na,it,one,cars\nb,that,two,tea\n"
    conversations = read(tmp_path, table, metadata=["group"], variables=["topic"]).document["conversations"]
    assert [each["metadata"] for each in conversations] == [{"group": "one"}, {"group": "two"}]
    assert [each["variables"] for each in conversations] == [{"topic": "cars"}, {"topic": "tea"}]


def test_metadata_may_be_any_json(tmp_path: Path) -> None:
    """It is kept unread: lists and null are allowed, though not for variables."""
    line = '{"id": "a", "question": "it", "labels": ["x", {"y": null}], "none": null}\n'
    (conversation,) = read(tmp_path, line, "rows.jsonl", metadata=["labels", "none"]).document["conversations"]
    assert conversation["metadata"] == {"labels": ["x", {"y": None}], "none": None}
    assert conversation["prompt"] == "Is it right?"  # without variables no dollar sign is read


def test_missing_metadata_is_reported_with_its_line(tmp_path: Path) -> None:
    """As a missing variable is, with the existing columns."""
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
def test_a_missing_field_is_reported_with_the_existing_ones(tmp_path: Path, name: str, rows: str) -> None:
    """The message shows the column's real name."""
    with pytest.raises(JobFileInvalid) as caught:
        read(tmp_path, rows, name)
    (fault,) = caught.value.faults
    assert f"{name}:1: " in fault
    assert "'question' is not there" in fault
    assert "id, text, topic" in fault


def test_many_columns_are_not_all_listed(tmp_path: Path) -> None:
    """A message is one line, and a column's name may be as long as a file."""
    header = ",".join(f"column{number}{'x' * 100}" for number in range(1000))
    with pytest.raises(JobFileInvalid) as caught:
        read(tmp_path, f"{header}\n")
    (fault,) = caught.value.faults
    assert "column0" in fault
    assert len(fault) < 1000 + len(str(tmp_path))


def test_a_missing_file_is_reported_with_the_key_that_names_it(tmp_path: Path) -> None:
    """The mistake may be in the job file or in the folder."""
    with pytest.raises(JobFileInvalid) as caught:
        with_rows({"conversations": WANTED}, tmp_path, "jobs/job.yaml")
    (fault,) = caught.value.faults
    assert fault.startswith("jobs/job.yaml: conversations.file: ")
    assert "rows.csv: No such file" in fault
