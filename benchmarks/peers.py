"""The peers of the training benchmark: transformers' Seq2SeqTrainer in several set-ups, and a plain loop.

transformers' Trainer runs its own `train()`, unchanged, in a thread of its own; a callback holds it between windows.
So what is timed is its whole loop: loader, collator, step, optimizer, schedule, callbacks.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

from benchmarks.harness import Work
from benchmarks.plan import LR, MAX_GRAD_NORM, Done, Plan, counted
from benchmarks.workloads import WORKLOADS, Examples
from fivetune.data.store.batch import IGNORE_INDEX
from fivetune.model.adapter import list_targets, shorten_names
from fivetune.model.selfcheck import verify_model
from fivetune.model.tokenizer import load_tokenizer, suppress_output
from fivetune.plugins import load_plugin

ATTENTIONS = ("eager", "sdpa")
WORKERS = {"cpu": 1, "cuda": 4}


class Peer:
    """transformers' Seq2SeqTrainer as its users run it: random batches, each padded to its longest example.

    Args:
        arguments: of Seq2SeqTrainingArguments, over those that all have alike.
        attention: name of transformers' implementation; None leaves the choice to transformers.
        pad_to: lengths of inputs and labels that every example is padded to beforehand.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        *,
        arguments: dict[str, Any] | None = None,
        attention: str | None = None,
        pad_to: tuple[int, int] | None = None,
    ) -> None:
        self.name = name
        self.precision = name_precision(plan, bf16=(arguments or {}).get("bf16", False))
        self._plan = plan
        self.model = pretrained(plan, attention)
        self._hold = _Hold()
        common: dict[str, Any] = {
            "output_dir": str(plan.folder / name),
            "per_device_train_batch_size": plan.batch_size,
            "max_steps": plan.max_steps,
            "learning_rate": LR,
            "lr_scheduler_type": "constant",
            "max_grad_norm": MAX_GRAD_NORM,
            "gradient_accumulation_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": not plan.on_gpu,
            "bf16": self.precision == "bf16",
            "tf32": True if self.precision == "tf32" else None,
            **({"optim": "adafactor"} if plan.optimizer == "adafactor" else {}),
            "dataloader_pin_memory": plan.on_gpu,
        }
        self._trainer = _CountingTrainer(
            model=self.model,
            args=Seq2SeqTrainingArguments(**common | (arguments or {})),
            train_dataset=features(plan.examples, pad_to),  # type: ignore[arg-type]
            data_collator=collator(plan, self.model),
            callbacks=[self._hold],
        )
        self._trainer.remove_callback(PrinterCallback)
        self._thread = threading.Thread(target=self._train, name=name, daemon=True)
        self._thread.start()
        self._hold.wait()

    def work(self, num_units: int) -> Work:
        self._trainer.done.clear()
        self._hold.orders.put(num_units)
        self._hold.wait()
        return counted(self._plan, self._trainer.done)

    def facts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._hold.orders.put(None)
        self._thread.join()

    def _train(self) -> None:
        try:
            with suppress_output():
                self._trainer.train()
            self._hold.reports.put(None)
        except BaseException as error:
            self._hold.reports.put(error)


class _CountingTrainer(Seq2SeqTrainer):
    """The Trainer, remembering the size of what it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.done: list[Done] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        mask, labels = inputs["attention_mask"], inputs["labels"]
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.done.append(Done(mask.sum(1), (labels != IGNORE_INDEX).sum(1), mask.numel() + labels.numel(), loss))
        return loss

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Length grouping as it is on a large data set: sorted over all examples that the benchmark has."""
        sampler = super()._get_train_sampler(train_dataset)
        return Sorted(sampler) if isinstance(sampler, LengthGroupedSampler) else sampler


class Sorted(LengthGroupedSampler):
    """The Trainer's sampler with one pool; its own pools are 50 batches, but a quarter of the data at most."""

    def __init__(self, sampler: LengthGroupedSampler) -> None:
        super().__init__(sampler.batch_size, lengths=sampler.lengths, generator=sampler.generator)

    def __iter__(self) -> Iterator[int]:
        num_batches = -(-len(self.lengths) // self.batch_size)
        return iter(
            get_length_grouped_indices(
                self.lengths, self.batch_size, mega_batch_mult=num_batches, generator=self.generator
            )
        )


class _Hold(TrainerCallback):
    """Lets the Trainer do as many steps as are ordered, and holds it at the end of the last of them."""

    def __init__(self) -> None:
        self.orders: queue.Queue[int | None] = queue.Queue()
        self.reports: queue.Queue[BaseException | None] = queue.Queue()
        self._left = 0

    def wait(self) -> None:
        """Until the Trainer is held. Raises what it raised."""
        if error := self.reports.get():
            raise error

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hold(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._hold(control)

    def _hold(self, control: Any) -> None:
        self.reports.put(None)
        order = self.orders.get()
        control.should_training_stop = order is None
        self._left = order or 0


class PlainLoop:
    """The loop of nanoT5 and its like: shuffled batches, dynamic padding, autocast and compile on a GPU, AdamW."""

    name = "plain"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.precision = name_precision(plan)
        self.model = pretrained(plan, None).to(plan.device)
        self._forward = torch.compile(self.model) if plan.on_gpu else self.model
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0, fused=True)
        self._batches = self._endless()

    def work(self, num_units: int) -> Work:
        done = []
        self.model.train()
        for _ in range(num_units):
            batch = {name: tensor.to(self._plan.device) for name, tensor in next(self._batches).items()}
            with make_autocast(self._plan, bf16=self.precision == "bf16"):
                loss = self._forward(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            mask, labels = batch["attention_mask"], batch["labels"]
            positions = mask.numel() + labels.numel()
            done.append(Done(mask.sum(1), (labels != IGNORE_INDEX).sum(1), positions, loss.detach()))
        return counted(self._plan, done)

    def facts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._batches.close()  # type: ignore[attr-defined]

    def _endless(self) -> Iterator[dict[str, Tensor]]:
        loader = torch.utils.data.DataLoader(
            features(self._plan.examples, None),  # type: ignore[arg-type]
            batch_size=self._plan.batch_size,
            shuffle=True,
            collate_fn=collator(self._plan, self.model),
            num_workers=WORKERS["cuda"] if self._plan.on_gpu else 0,
        )
        while True:
            yield from loader


def features(examples: Examples, pad_to: tuple[int, int] | None) -> list[dict[str, list[int]]]:
    """The examples as transformers takes them, padded beforehand or not."""
    made = []
    for i in range(len(examples)):
        inputs, labels = examples.inputs[i].tolist(), examples.labels[i].tolist()
        rest = (pad_to[0] - len(inputs), pad_to[1] - len(labels)) if pad_to else (0, 0)
        made.append(
            {
                "input_ids": inputs + [0] * rest[0],
                "attention_mask": [1] * len(inputs) + [0] * rest[0],
                "labels": labels + [IGNORE_INDEX] * rest[1],
            }
        )
    return made


def collator(plan: Plan, model: Any) -> DataCollatorForSeq2Seq:
    tokenizer = load_tokenizer(None, plan.model)
    return DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8 if plan.on_gpu else None)


def pretrained(plan: Plan, attention: str | None) -> Any:
    """The plan's weights as `from_pretrained` loads them, compared with their files.

    transformers 5.23 forces umT5's tie flag and scales the decoder's output by it: `verify_model` sets the flag as the
    family needs it, so that a peer computes the loss of the same model.
    """
    chosen = {"attn_implementation": attention} if attention else {}
    with suppress_output():
        model = AutoModelForSeq2SeqLM.from_pretrained(plan.model, dtype=torch.float32, **chosen)
    raw = json.loads((plan.model / "config.json").read_text())
    model = verify_model(model, sorted(plan.model.glob("*.safetensors")), raw, where=str(plan.model))
    return with_peft(plan.adapter, model) if plan.adapter else model


def with_peft(adapter: str, model: Any) -> Any:
    """peft's model with the matrices, ranks and scales of a FiveTune adapter."""
    options = load_plugin("adapters", adapter)()
    with suppress_output(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        return peft.get_peft_model(model, options.build_config(shorten_names(model, list_targets(model, options))))


def name_precision(plan: Plan, *, bf16: bool = False) -> str:
    """What a peer computes in: the plan's precision, bf16 if it asks for it, else bf16 on a GPU and fp32 on a CPU."""
    if bf16:
        return "bf16"
    return ("bf16" if plan.on_gpu else "fp32") if plan.precision == "auto" else plan.precision


def make_autocast(plan: Plan, *, bf16: bool) -> Any:
    """The autocast of a step in bf16, as the Trainer has it."""
    return torch.autocast(plan.device.partition(":")[0], torch.bfloat16) if bf16 else nullcontext()


def best_attention(plan: Plan, *, bf16: bool = False) -> str:
    """The attention of transformers with which a forward and backward pass is fastest here, in a peer's precision."""
    autocast = name_precision(plan, bf16=bf16) == "bf16"
    seconds = {}
    for attention in ATTENTIONS:
        model = pretrained(plan, attention).to(plan.device).train()
        few = collator(plan, model)(features(plan.examples, None)[: max(1, plan.batch_size // 4)])
        batch = {name: tensor.to(plan.device) for name, tensor in few.items()}
        for _ in range(2):
            started = time.perf_counter()
            with make_autocast(plan, bf16=autocast):
                loss = model(**batch).loss
            loss.backward()
            if plan.on_gpu:
                torch.cuda.synchronize()
            seconds[attention] = time.perf_counter() - started
        del model, batch, loss
        if plan.on_gpu:
            torch.cuda.empty_cache()  # this process lives beside the sides
    return min(seconds, key=lambda attention: seconds[attention])


def make_peer(name: str, plan: Plan, *, attention: str | None = None) -> Any:
    """The peer of that name. Raises KeyError for an unknown one."""
    tuned = {
        "train_sampling_strategy": "group_by_length",
        "optim": {"adamw": "adamw_torch_fused", "adafactor": "adafactor"}[plan.optimizer],
        "logging_nan_inf_filter": False,
        "dataloader_num_workers": WORKERS["cuda" if plan.on_gpu else "cpu"],
        "dataloader_persistent_workers": True,
    }
    source, target = WORKLOADS[plan.workload]
    made = {
        "default": lambda: Peer("default", plan),
        "tuned": lambda: Peer("tuned", plan, arguments=tuned, attention=attention),
        "compiled": lambda: Peer("compiled", plan, arguments={**tuned, "torch_compile": True}, attention=attention),
        "tuned-bf16": lambda: Peer("tuned-bf16", plan, arguments={**tuned, "bf16": True}, attention=attention),
        "padded": lambda: Peer("padded", plan, pad_to=(source.cap, target.cap)),
        "plain": lambda: PlainLoop(plan),
    }
    return made[name]()
