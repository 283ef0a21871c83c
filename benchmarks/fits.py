"""Which strategy fits large models on 8, 64 and 512 devices, by `fivetune estimate`: python -m benchmarks.fits

In: names of models and numbers of devices. Out: a table as Markdown: GiB of a rank at its peak, bold if that fits; and
which strategy is taken. Nothing is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.harness import make_parser, table

COLUMNS = ("single", "ddp", "fsdp", "fsdp, copy per node", "tensor", "fsdp_tensor", "pipeline")
SETTINGS = ["--optimizer.name", "adamw", "--train.batch_size", "8", "--train.global_batch_size", "4096"]


def main() -> None:
    parser = make_parser(__doc__, results=None)
    parser.add_argument("--models", default="t5-3b,t5-11b,mt5-xxl")
    parser.add_argument("--devices", default="8,64,512")
    parser.add_argument("--device", default="h100")
    args = parser.parse_args()
    lines, rows = [["model", "devices", *COLUMNS, "taken"]], []
    for model in args.models.split(","):
        for num in args.devices.split(","):
            found = estimate(model, num, args.device)
            rows.append({"model": model, "devices": int(num), **found})
            cells = {name_column(one): format_cell(one) for one in found["strategies"]}
            lines.append([model, num, *(cells.get(name, "") for name in COLUMNS), describe_choice(found)])
    print(table(lines))
    if args.json:
        print(json.dumps({"rows": rows}))


def estimate(model: str, num_devices: str, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fivetune", "estimate", "recipes/squad_t5_base.yaml", "--devices", num_devices]
    command += ["--device", device, "--json", "--model.path", model, *SETTINGS]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def name_column(one: dict[str, Any]) -> str:
    return "fsdp, copy per node" if "strategy.replicas" in one["settings"] else one["strategy"]


def format_cell(one: dict[str, Any]) -> str:
    """The peak, bold if it fits, and the ranks that share heads or blocks if that is a choice."""
    if one["obstacle"]:
        return "-"
    size = one["settings"].get("strategy.size") or one["settings"].get("strategy.stages")
    shown = f"{one['peak_bytes'] / 2**30:,.0f}" + (f" (by {size})" if size else "")
    return f"**{shown}**" if one["fits"] else shown


def describe_choice(found: dict[str, Any]) -> str:
    if not found["choice"]:
        return "none"
    (taken,) = [one for one in found["strategies"] if one["settings"] == found["choice"]]
    return name_column(taken)


if __name__ == "__main__":
    main()
