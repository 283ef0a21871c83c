"""Print the tables of all training results that are kept, as Markdown: python -m benchmarks."""

from __future__ import annotations

import json

from benchmarks.harness import make_parser
from benchmarks.train import report

args = make_parser(__doc__).parse_args()
found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.results.glob("train-*.json"))]
for result in found:
    report(result)
if args.json:
    print(json.dumps(found))
