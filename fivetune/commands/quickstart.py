"""Fine-tune the included t5-nano in minutes.

On a generated corpus: the score before, after, and without the context.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import add_flag, print_json, print_table, print_text

BLIND_STEPS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", default="runs", help="folder for the corpus and the two runs (default: runs)")
    parser.add_argument("--steps", type=int, help="number of steps; default: the recipe's")
    add_flag(parser, "--json", "print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    from fivetune.data.corpus.reading import QUICKSTART_EVAL, QUICKSTART_TRAIN, write_quickstart_corpus
    from fivetune.reading.report import write_report
    from fivetune.rundir.figures import find_exported_eval
    from fivetune.rundir.progress import format_time_span
    from fivetune.training.run import train

    folder = Path(args.dir)
    files = write_quickstart_corpus(folder / "quickstart-corpus")
    print_text(
        f"corpus: {QUICKSTART_TRAIN:,} questions to train on, {QUICKSTART_EVAL} held out, about half unanswerable; "
        f"in {files[0].parent}"
    )
    blind_folder = folder / "quickstart-blind"
    run_folder = folder / "quickstart"
    data = {"data.train": str(files[0]), "data.eval": str(files[1])}
    # A model that never sees the contexts: what the score would be without reading.
    print("context-blind baseline: the same model, trained on the questions without their contexts")
    blind_steps = min(args.steps or BLIND_STEPS, BLIND_STEPS)
    blind_settings = {
        **data,
        "run.dir": str(blind_folder),
        "task.template": "question: {question}",
        "train.num_steps": blind_steps,
        "eval.every_steps": blind_steps,
        "eval.at_start": False,
        "report.beside": [],
    }
    blind = train("quickstart", blind_settings, overwrite=True, preflight=False, command="fivetune quickstart")
    # The same recipe with contexts; its report compares it with the baseline.
    print("fine-tuning on questions with their contexts")
    settings = {**data, "run.dir": str(run_folder), "report.beside": [str(blind_folder)]}
    steps = {"train.num_steps": args.steps} if args.steps else {}
    done = train("quickstart", {**settings, **steps}, overwrite=True, command="fivetune quickstart")
    page = write_report(run_folder)
    best = find_exported_eval(done.records)
    assert best is not None  # the recipe evaluates, so the best step has its record
    scores = {"before": done.evals[0].scores, "context-blind": blind.evals[-1].scores, "after": best.scores}
    names = {"exact": "exact match", "HasAns_exact": "answerable", "NoAns_exact": "unanswerable", "f1": "F1"}
    print(f"\nofficial SQuAD 2.0 scores on {best.num_examples} held-out questions about unseen names")
    rows = [[model, *(f"{values[name]:.1f}" for name in names)] for model, values in scores.items()]
    print_table(["model", *names.values()], rows)
    print()
    print_text(f"trained in {format_time_span(done.status.seconds or 0.0)}; model {run_folder}/model")
    print_text(f"report {page}")
    print_text(f"predict with it: fivetune predict {run_folder} --input {files[1]} --output answers.jsonl")
    if args.json:
        named = {"scores": scores["after"], "before": scores["before"], "context_blind": scores["context-blind"]}
        print_json({**named, "report": str(page)})
    return 0
