"""transformers' Seq2SeqTrainer on the same model, data and steps, used as its own scripts use it.

It saves at every step, resumes from the checkpoint that `get_last_checkpoint` finds, and saves the model at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reliability.warm import WarmProcess
from reliability.workload import NUM_STEPS, Reference, Workload, squad_file, time_run

DATA = "train.json"
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adafactor": {"optim": "adafactor"},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
}
STEPS_TO_STOP = 500
STOPPED: dict[str, dict[str, Any]] = {  # that save when a signal comes; they do so three seconds later
    f"{name}, stopped": {
        **options,
        "enable_jit_checkpoint": True,
        "max_steps": STEPS_TO_STOP,
        "save_steps": STEPS_TO_STOP,
    }
    for name, options in VARIANTS.items()
}


class Peer:
    """Starts the peer's runs."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def start(self, folder: Path, variant: str = "adamw", prepare: Callable[[], None] | None = None) -> WarmProcess:
        """Start or resume a run in `folder`; `prepare` is called in its process, before it trains."""
        if not (folder / DATA).exists():  # here and once: two processes that begin at a time only read it
            squad_file(folder / DATA)
        return WarmProcess(train_peer, str(folder), str(self.workload.model), {**VARIANTS, **STOPPED}[variant], prepare)

    def resume(self, folder: Path, variant: str = "adamw") -> None:
        """Continue or start the run; it must succeed without any help."""
        done = self.start(folder, variant).finish()
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-300:]}"

    def run_undisturbed(self, variant: str = "adamw") -> Reference:
        """The peer's run that nothing disturbs, made twice at the first call: both must have the same weights.

        So a trial whose weights differ shows the effect of its fault.
        """

        def make() -> Reference:
            runs: list[Reference] = []
            for number in range(2):
                folder = self.workload.make_folder(f"peer-{variant}-{number}")
                begun, ended = time_run(self.start(folder, variant), folder / "run")
                runs.append(Reference(folder, read_peer_weights(folder), begun, ended))
            assert runs[0].weights == runs[1].weights, "two undisturbed runs of the Trainer differ: no trial shows more"
            return runs[0]

        return self.workload.references.get(f"peer {variant}", make)


def read_peer_weights(folder: Path) -> bytes:
    """The weights that the peer saved at its end, byte for byte."""
    return (folder / "run" / "model.safetensors").read_bytes()


def train_peer(folder: str, model: str, options: dict[str, Any], prepare: Callable[[], None] | None = None) -> None:
    """Train the steps of 8 examples in `folder`/run, from its last checkpoint where there is one."""
    import torch
    from transformers import (
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )
    from transformers.trainer_utils import get_last_checkpoint

    torch.set_num_threads(1)
    loaded, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    run = Path(folder) / "run"
    arguments = Seq2SeqTrainingArguments(
        str(run),
        **{
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": NUM_STEPS,
            "learning_rate": 1e-3,
            "save_steps": 1,
            "save_total_limit": 2,
            "logging_steps": 1,
            "report_to": [],
            "seed": 1,
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        },
    )
    trainer = Seq2SeqTrainer(
        model=loaded,
        args=arguments,
        train_dataset=encode_questions(Path(folder) / DATA, tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=loaded),
        processing_class=tokenizer,
    )
    if prepare is not None:
        prepare()
    last = get_last_checkpoint(str(run)) if run.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()


def encode_questions(path: Path, tokenizer: Any) -> Any:
    """The questions of the campaign's SQuAD file, which is made where it is missing, as the rows of a list."""
    if not path.exists():
        squad_file(path)
    paragraphs = json.loads(path.read_text())["data"][0]["paragraphs"]
    rows: list[dict[str, list[int]]] = []
    for paragraph in paragraphs:
        for asked in paragraph["qas"]:
            text = f"question: {asked['question']} context: {paragraph['context']}"
            answer = asked["answers"][0]["text"] if asked["answers"] else "unanswerable"
            rows.append({"input_ids": tokenizer(text).input_ids, "labels": tokenizer(answer).input_ids})
    return rows
