"""The answers to a file of questions, computed once: a call that was killed goes on from the answers in a folder.

In: a run's model and a file. Out: a PredictedFile, whose answers are in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from fivetune import rundir
from fivetune.data.shard import WHOLE, Shard
from fivetune.data.store.token_store import describe_data, load_or_build_store
from fivetune.distributed.world import World
from fivetune.errors import translate_oom_errors
from fivetune.model.adapter import FOLDER
from fivetune.rundir.checksums import MANIFEST
from fivetune.rundir.export_file import EXPORT
from fivetune.rundir.files import replace_file
from fivetune.rundir.progress import ProgressCallback
from fivetune.training.answers.answer_log import FORMAT as ANSWERS_FORMAT
from fivetune.training.answers.answer_log import PATTERN as ANSWERS
from fivetune.training.answers.answer_log import AnswerLog, AnswerWriter
from fivetune.training.answers.inputs import describe_questions
from fivetune.training.answers.loading import RunModel
from fivetune.training.answers.predicted_file import ANSWERED, PredictedFile
from fivetune.training.answers.shards import SETTINGS, refuse_other_answers
from fivetune.training.state.resume import select_scored_settings
from fivetune.types import OnNote


def answer_file(
    run: Path,
    loaded: RunModel,
    source: str,
    folder: Path,
    *,
    on_progress: ProgressCallback,
    on_note: OnNote,
    world: World,
    shard: Shard = WHOLE,
    shard_folders: Sequence[Path] = (),
) -> PredictedFile:
    """Answer the questions of a source that the folder has no answer to.

    Args:
        run: the run directory of the model.
        folder: folder of the answers; each rank needs the same one.
        on_note: called with a sentence about answers that an earlier call has left in the folder.
        world: the ranks that share the questions.
        shard: the records that are answered.
        shard_folders: folders of all shards of the source, which must be answered with the same data and settings.

    Raises DataError for a source that cannot be read, or that changes meanwhile.
    """
    config = loaded.config
    task = config.task
    columns = config.data.columns
    described = replace(describe_questions(config, source, task, columns), shard=shard)
    _, guard = describe_data(described, loaded.tokenizer)
    found = PredictedFile(source, task, dict(columns), (folder,), guard, header=config.data.header, shard=shard)
    with translate_oom_errors():
        # Rank 0 tokenises, and removes answers of other weights before any rank reads them.
        with world.run_rank_zero_first(f"answers in {folder}"), guard.explain_errors(ANSWERED):
            if world.is_first:
                _discard_other_answers(run, loaded, folder, guard.fingerprint, on_note)
                refuse_other_answers(folder, shard_folders)
            # Nothing to answer: building a store would refuse a file without a usable record.
            if all(row.skipped for row in found.iter_records()):
                return found
            store = load_or_build_store(
                described,
                loaded.tokenizer,
                cache=folder / "data",
                cache_setting="--output",
                on_progress=on_progress,
            )
            guard.refuse_change(ANSWERED)
            if store.rebuilt:
                on_note(store.rebuilt)

        with AnswerLog(folder) as answers:
            missing = np.setdiff1d(np.arange(store.num_groups), answers.questions)
        world.barrier()  # no rank reads what another already writes
        total = store.num_groups
        before = total - len(missing)
        if before and world.is_first:
            on_note(f"{before:,} of {total:,} records are answered already in {folder}.")

        evaluator = loaded.make_predictor(store)
        with AnswerWriter(folder, world.rank) as writer:
            answered = evaluator.predict(loaded.model, questions=missing, world=world)
            for number, (question, prediction) in enumerate(answered, start=1):
                writer.append(question, prediction)
                on_progress("answering", min(before + number * world.size, total), total)
        world.barrier()  # the answers of all ranks are in the folder
    return found


def _discard_other_answers(run: Path, loaded: RunModel, folder: Path, data: str, on_note: OnNote) -> None:
    """Remove the answers of other weights, settings or data; write down what the next ones belong to."""
    # A list of checksums stands for the weights, which are large.
    listed = run / EXPORT
    if not listed.is_file():
        listed = (loaded.checkpoint or rundir.find_model_folder(run)) / MANIFEST
    weights = sha256(listed.read_bytes())
    for path in sorted((run / FOLDER).glob("*.safetensors")):  # virtual tokens are not in model/
        weights.update(path.read_bytes())
    settings = {
        **select_scored_settings(loaded.config),
        "task": loaded.config.task.model_dump(mode="json"),
        "data": data,
        "format": ANSWERS_FORMAT,
        "precision": loaded.compute.precision,
        "weights": weights.hexdigest(),
    }
    new = json.dumps(settings, sort_keys=True)
    path = folder / SETTINGS
    if path.is_file() and path.read_text(encoding="utf-8") == new:
        return

    # The old ones go before answers.json says otherwise: a kill in between leaves no answer under a wrong name.
    stale = sorted(folder.glob(ANSWERS))
    for answers in stale:
        answers.unlink()
    if stale:
        on_note(f"{folder}: its answers are of other weights, settings or data, and are computed again.")
    with replace_file(path) as file:
        file.write(new.encode())
