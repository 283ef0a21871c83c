"""When to stay silent: does a promised share of errors hold on examples that did not choose the confidence?

In: predictions of runs, which `fivetune evaluate` or a training wrote, of many examples. Each seed draws 600 of them,
on which the confidence is chosen as `fivetune evaluate --max-error` does; all others are fresh. Out: for each run and
promise the share of fresh examples that is answered, the share of wrong answers among them, and how often it is kept.

    python -m benchmarks.silence quickstart 1 1600    # 6,600 held-out questions, then the recipe's training
    python -m benchmarks.silence stackoverflow 1 POSTS.csv.gz      # 4,050 posts to train on, 2,700 held out
    python -m benchmarks.silence --json measure runs/silence/*/run
    python -m benchmarks.silence --json trainings runs/silence/*/run

`measure` draws a hundred times from the predictions of each run; `trainings` draws once from each, and counts the runs
that keep a promise.

The temperature of a run is left out: it changes no order. The run's own weights were chosen by other examples (the
quickstart: of 600 of the 6,600) or after a fixed number of steps (Stack Overflow).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fivetune
from benchmarks import so_quality
from benchmarks.harness import facts, make_parser, publish_result, table
from fivetune.data.corpus import reading
from fivetune.rundir import read_run
from fivetune.rundir.figures import find_exported_eval
from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.abstention import choose_level, count_answers, find_error_score, format_promise
from fivetune.scores.analysis.calibration import restore_lines

FOLDER = Path("runs/silence")
PROMISES = (0.01, 0.02, 0.05, 0.1)
NUM_SEEDS, FIRST_SEEDS = 100, 10
NUM_DRAWN = 600  # predictions that choose a confidence, as many as the quickstart evaluates
NUM_HELD_OUT = 6_600  # questions of the quickstart
NUM_POSTS = 4_050  # to train on


def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    quickstart = commands.add_parser("quickstart", help="train the recipe quickstart")
    quickstart.add_argument("seed", type=int, help="of the run")
    quickstart.add_argument("steps", type=int, help="1600, as the recipe has it, or fewer for more errors")
    posts = commands.add_parser("stackoverflow", help="train the recipe stackoverflow_quality_nano")
    posts.add_argument("seed", type=int, help="of the split and of the run")
    posts.add_argument("source", type=Path, help="CSV file with columns text and rating, also gzipped")
    measuring = commands.add_parser("measure", help="measure the promises on ten splits of each run's predictions")
    measuring.add_argument("runs", type=Path, nargs="+")
    trainings = commands.add_parser("trainings", help="measure the promises over runs of several seeds, one draw each")
    trainings.add_argument("runs", type=Path, nargs="+", help="in folders RECIPE-SEED")
    args = parser.parse_args()
    if args.command == "quickstart":
        train_quickstart(FOLDER / f"quickstart-{args.seed}-{args.steps}", args.seed, args.steps)
    elif args.command == "stackoverflow":
        train_stackoverflow(FOLDER / f"stackoverflow-{args.seed}", args.seed, args.source)
    elif args.command == "measure":
        publish_result(args, "silence", measure(args.runs))
    else:
        publish_result(args, "silence-trainings", measure_trainings(args.runs))


# --- the runs ---


def train_quickstart(folder: Path, seed: int, steps: int) -> None:
    """Train the recipe on its own corpus, with more held-out questions; its weights are chosen by 600 of them."""
    domains = (reading.SHIPS, reading.FIRMS, reading.PEOPLE)
    train, held_out = reading.write_reading_corpus(
        folder / "corpus",
        num_train=reading.QUICKSTART_TRAIN,
        num_eval=NUM_HELD_OUT,
        seed=7,
        domains=domains,
        max_facts=4,
    )
    settings = {
        "data.train": str(train),
        "data.eval": str(held_out),
        "run.dir": str(folder / "run"),
        "run.seed": seed,
        "eval.max_examples": NUM_DRAWN,
        "eval.at_start": False,
        "train.num_steps": steps,
        "report.beside": [],
    }
    fivetune.train("quickstart", settings, overwrite=True)


def train_stackoverflow(folder: Path, seed: int, source: Path) -> None:
    """Train the recipe on a drawn part of the posts, with a tokenizer of that part."""
    train, held_out = so_quality.split(so_quality.read_posts(source), num_train=NUM_POSTS, seed=seed)
    model = so_quality.write_parts(folder, train, held_out)
    settings = {
        "data.train": str(folder / "train.csv"),
        "data.eval": str(folder / "test.csv"),
        "model.config": str(model),
        "run.dir": str(folder / "run"),
        "run.seed": seed,
    }
    fivetune.train(so_quality.RECIPE, settings, overwrite=True)


# --- the promises ---


def measure(folders: Sequence[Path]) -> dict[str, Any]:
    """Measure each run, print a table."""
    found: list[dict[str, Any]] = []
    rows = [["run", "promise", "held", "of ten", "silent", "answered (5, 50, 95 %)", "wrong (5, 50, 95 %)", "fresh"]]
    for folder in folders:
        lines, score = _read_lines(folder)
        for promise in PROMISES:
            seeds = [_measure_seed(lines, score, promise, seed) for seed in range(NUM_SEEDS)]
            kept = _summarise(seeds, promise)
            found.append({"run": folder.parent.name, "num_fresh": len(lines) - NUM_DRAWN, **kept})
            rows.append(_build_row(found[-1]))
    print(table(rows))
    return {"runs": found, **facts("cpu")}


def measure_trainings(folders: Sequence[Path]) -> dict[str, Any]:
    """Measure one draw of each run, print a table: how many trainings of each recipe keep each promise."""
    recipes: dict[str, list[Path]] = {}
    for folder in folders:
        recipes.setdefault(folder.parent.name.partition("-")[0], []).append(folder)
    found: list[dict[str, Any]] = []
    rows = [["recipe", "promise", "kept by", "silent", "answered (least, median, most)", "wrong (least, median, most)"]]
    for recipe, runs in recipes.items():
        read = [_read_lines(folder) for folder in runs]
        for promise in PROMISES:
            draws: list[dict[str, Any]] = []
            for seed, (lines, score) in enumerate(read):
                draws.append(_measure_seed(lines, score, promise, seed))
            errors = [one["wrong"] for one in draws if one["wrong"] is not None]
            kept = sum(one["wrong"] is None or one["wrong"] <= promise for one in draws)
            silent = len(draws) - len(errors)
            found.append({"recipe": recipe, "promise": promise, "kept": kept, "silent": silent, "draws": draws})
            spreads: list[str] = []
            for values in ([one["answered"] for one in draws], errors):
                edges = np.percentile(values, (0, 50, 100)).tolist() if values else []
                spreads.append(", ".join(f"{100 * value:.1f}" for value in edges))
            rows.append([recipe, format_promise(promise), f"{kept} of {len(draws)}", str(silent), *spreads])
    print(table(rows))
    return {"runs": [folder.parent.name for folder in folders], "promises": found, **facts("cpu")}


def _read_lines(folder: Path) -> tuple[Sequence[Prediction], str]:
    """Read the predictions of a run with confidences as the model gave them, and the score that tells errors."""
    run = read_run(folder)
    record = find_exported_eval(run)
    assert record is not None
    lines = restore_lines(run.read_predictions(record), record.temperature)
    score = find_error_score(lines, "exact")
    assert score is not None
    return lines, score


def _measure_seed(lines: Sequence[Prediction], score: str, promise: float, seed: int) -> dict[str, Any]:
    """Choose the confidence on drawn predictions, and measure it on all others."""
    sure = np.array([line.confidence for line in lines])
    wrong = np.array([line.scores[score] < 1 for line in lines])
    order = np.random.default_rng(seed).permutation(len(lines))
    chosen, fresh = order[:NUM_DRAWN], order[NUM_DRAWN:]
    level = choose_level(count_answers(sure[chosen].tolist(), wrong[chosen].tolist()), promise)
    if level is None:
        return {"seed": seed, "answered": 0.0, "wrong": None}
    is_answered = sure[fresh] >= level.probability
    return {
        "seed": seed,
        "answered": float(is_answered.mean()),
        "wrong": float(wrong[fresh][is_answered].mean()),
    }


def _summarise(seeds: Sequence[dict[str, Any]], promise: float) -> dict[str, Any]:
    """Count the seeds that keep a promise, also by giving no answer; percentiles over the seeds."""
    errors = [one["wrong"] for one in seeds if one["wrong"] is not None]
    held = [one["wrong"] is None or one["wrong"] <= promise for one in seeds]
    return {
        "promise": promise,
        "held": sum(held),
        "held_of_first": sum(held[:FIRST_SEEDS]),
        "silent": len(seeds) - len(errors),
        "answered": _compute_spread([one["answered"] for one in seeds]),
        "wrong": _compute_spread(errors) if errors else None,
        "first_seeds": seeds[:FIRST_SEEDS],
    }


def _compute_spread(values: Sequence[float]) -> list[float]:
    return np.percentile(values, (5, 50, 95)).tolist()


def _build_row(found: dict[str, Any]) -> list[str]:
    spreads: list[str] = []
    for values in (found["answered"], found["wrong"] or ()):
        spreads.append(", ".join(f"{100 * value:.1f}" for value in values))
    return [
        found["run"],
        format_promise(found["promise"]),
        f"{found['held']} of {NUM_SEEDS}",
        f"{found['held_of_first']} of {FIRST_SEEDS}",
        f"{found['silent']}",
        *spreads,
        f"{found['num_fresh']:,}",
    ]


if __name__ == "__main__":
    main()
