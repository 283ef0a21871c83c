"""Print the tables of all training results that are kept, as Markdown: python -m benchmarks."""

from __future__ import annotations

import json

from benchmarks.harness import RESULTS
from benchmarks.train import report

for path in sorted(RESULTS.glob("train-*.json")):
    report(json.loads(path.read_text(encoding="utf-8")))
