"""Fine-tune the carried t5-nano on a generated corpus: score before, after, and without the context, in minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import print_json

NUM_TRAIN, NUM_EVAL, SEED = 16_000, 600, 7
BLIND_STEPS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", default="runs", help="folder for the corpus and the two runs (default: runs)")
    parser.add_argument("--steps", type=int, help="fewer steps than the recipe's, to look around")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    from fivetune.nano.reading import FIRMS, PEOPLE, SHIPS, write_reading_corpus
    from fivetune.progress import duration
    from fivetune.report import write_report
    from fivetune.rundir import best_eval
    from fivetune.training import train

    folder = Path(args.dir)
    files = write_reading_corpus(
        folder / "quickstart-corpus",
        num_train=NUM_TRAIN,
        num_eval=NUM_EVAL,
        seed=SEED,
        domains=(SHIPS, FIRMS, PEOPLE),
        max_facts=4,
    )
    print(
        f"corpus: {NUM_TRAIN:,} questions to train on, {NUM_EVAL} held out, about half unanswerable; "
        f"in {files[0].parent}"
    )
    blind_folder = folder / "quickstart-blind"
    shared = {"data.train": str(files[0]), "data.eval": str(files[1]), "report.beside": [str(blind_folder)]}
    steps = {"train.num_steps": args.steps} if args.steps else {}
    print("context-blind baseline: the same model, trained on the questions alone")
    blind_steps = min(args.steps or BLIND_STEPS, BLIND_STEPS)
    blind = train(
        "quickstart",
        {
            **shared, "run.dir": str(blind_folder), "task.template": "question: {question}",
            "train.num_steps": blind_steps, "eval.every_steps": blind_steps, "eval.at_start": False,
            "report.beside": [],
        },
        overwrite=True, preflight=False,
    )  # fmt: skip
    print("fine-tuning on questions with their contexts")
    done = train("quickstart", {**shared, **steps, "run.dir": str(folder / "quickstart")}, overwrite=True)
    page = write_report(folder / "quickstart")
    best = best_eval(done.evals, done.status["best"])
    assert best is not None  # the recipe evaluates, so the best step has its record
    scores = {
        "before": done.evals[0]["scores"], "context-blind": blind.evals[-1]["scores"], "after": best["scores"],
    }  # fmt: skip
    _print_table(scores, num_examples=best["num_examples"])
    print(f"trained in {duration(done.status['seconds'])}; model {folder}/quickstart/model")
    print(f"report {page}")
    print(f"ask it: fivetune predict {folder}/quickstart --input {files[1]} --output answers.jsonl")
    if args.json:
        print_json({"scores": scores["after"], "before": scores["before"], "context_blind": scores["context-blind"],
                    "report": str(page)})  # fmt: skip
    return 0


def _print_table(scores: dict[str, dict[str, float]], *, num_examples: int) -> None:
    """Exact match and its two halves, one line per model."""
    names = {"exact": "exact match", "HasAns_exact": "answerable", "NoAns_exact": "unanswerable", "f1": "F1"}
    print(f"\nofficial SQuAD 2.0 scores on {num_examples} held-out questions about unseen names")
    print(f"{'':<15}" + "".join(f"{label:>14}" for label in names.values()))
    for model, values in scores.items():
        print(f"{model:<15}" + "".join(f"{values[name]:14.1f}" for name in names))
    print()
