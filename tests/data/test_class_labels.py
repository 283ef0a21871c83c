"""Names of the hub's class labels are the words of labels, from Parquet, saved data sets and objects."""

from __future__ import annotations

import json

import pytest

from fivetune.data.class_labels import name_labels
from fivetune.data.readers.records import read_records

FEATURES = {
    "text": {"dtype": "string", "_type": "Value"},
    "label": {"names": ["World", "Sci/Tech"], "_type": "ClassLabel"},
    "tags": {"feature": {"names": ["O", "B-PER"], "_type": "ClassLabel"}, "_type": "List"},
}
ROWS = [{"text": "a", "label": 1, "tags": [0, 1]}, {"text": "b", "label": -1, "tags": []}]
NAMED = [{"text": "a", "label": "Sci/Tech", "tags": ["O", "B-PER"]}, {"text": "b", "label": None, "tags": []}]


@pytest.mark.parametrize("metadata", [{"huggingface": json.dumps({"info": {"features": FEATURES}})}, {}, {"a": "b"}])
def test_labels_of_parquet_have_their_names(tmp_path, metadata):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    found = [dict(record.fields) for record in read_records(str(tmp_path / "a.parquet"))]
    expected = NAMED if "huggingface" in metadata else ROWS
    assert [{name: row[name] for name in ROWS[0]} for row in found] == expected


@pytest.mark.parametrize("content", ["", "{", "null", '{"info": null}', '{"info": {"features": 3}}'])
def test_a_damaged_description_is_no_description(tmp_path, content):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(ROWS).replace_schema_metadata({"huggingface": content})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [record.fields["label"] for record in read_records(str(tmp_path / "a.parquet"))] == [1, -1]


@pytest.mark.parametrize(
    ("value", "feature", "expected"),
    [
        (2, FEATURES["label"], 2),  # no such name
        ("World", FEATURES["label"], "World"),
        (True, {"dtype": "bool", "_type": "Value"}, True),
        ([{"kind": 1, "n": 1}], [{"kind": FEATURES["label"], "n": FEATURES["text"]}], [{"kind": "Sci/Tech", "n": 1}]),
        (
            {"kind": [1, 0]},
            {"feature": {"kind": FEATURES["label"]}, "_type": "Sequence"},
            {"kind": ["Sci/Tech", "World"]},
        ),
        (None, FEATURES["label"], None),
    ],
)
def test_names_of_nested_labels(value, feature, expected):
    assert name_labels(value, feature) == expected


def test_data_sets_in_memory_and_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    from fivetune.data.readers.tables import iter_rows

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    made = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    assert [row["label"] for row in iter_rows(made, "data.train")] == ["yes", "no"]
    assert [record.fields["label"] for record in read_records(str(tmp_path / "saved"))] == ["yes", "no"]
