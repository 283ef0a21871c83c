"""Names of class labels: data sets of the hub store a label as its number, and the names in their description.

In: the description of columns (`datasets.Features` as a table, also in the metadata of Parquet files) and rows. Out:
rows with names, since T5 learns words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from fivetune.types import JsonTable

METADATA = b"huggingface"


def find_class_labels(features: Mapping[str, Any]) -> JsonTable:
    """Return the columns that hold class labels, with their description.

    >>> find_class_labels({"text": {"_type": "Value"}, "label": {"_type": "ClassLabel", "names": ["no", "yes"]}})
    {'label': {'_type': 'ClassLabel', 'names': ['no', 'yes']}}
    """
    found: JsonTable = {}
    for name, feature in features.items():
        if '"ClassLabel"' in json.dumps(feature, default=str):  # also inside lists and objects
            found[name] = feature
    return found


def read_class_labels(metadata: Mapping[bytes, bytes] | None) -> JsonTable:
    """Return the columns with class labels that the metadata of an Arrow schema describes; {} without a description."""
    try:
        features = json.loads((metadata or {})[METADATA])["info"]["features"]
        return find_class_labels(features)
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def name_row_labels(row: JsonTable, labels: Mapping[str, Any]) -> JsonTable:
    """Return a row with the names of its class labels.

    >>> name_row_labels({"text": "a", "label": 1}, {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}})
    {'text': 'a', 'label': 'yes'}
    """
    named = {name: name_labels(row[name], labels[name]) for name in labels if name in row}
    return row | named if named else row


def name_labels(value: object, feature: Any) -> object:
    """Return a value with names in place of the numbers of class labels, also in lists and objects; -1 is no label.

    >>> name_labels([0, -1], {"_type": "List", "feature": {"_type": "ClassLabel", "names": ["no", "yes"]}})
    ['no', None]
    """
    if isinstance(feature, list) and feature:
        return name_labels(value, {"feature": feature[0]})
    if not isinstance(feature, Mapping):
        return value
    table = cast("Mapping[str, Any]", feature)
    names = table.get("names")
    if table.get("_type") == "ClassLabel" and isinstance(names, list) and isinstance(value, int):
        known = cast("list[str]", names)
        if 0 <= value < len(known):
            return known[value]
        return None if value == -1 else value
    inner = table.get("feature", table)
    if isinstance(value, list):
        return [name_labels(one, inner) for one in cast("list[object]", value)]
    if isinstance(value, dict) and isinstance(inner, Mapping):
        # A list of objects is stored as an object of lists.
        described = cast("Mapping[str, Any]", inner)
        parts = cast("JsonTable", value)
        return {name: name_labels(part, described.get(name)) for name, part in parts.items()}
    return value
