"""Translation of the arguments of transformers' example scripts and TrainingArguments to settings.

In: one argument and its value. Out: the equivalent settings. Every argument of Seq2SeqTrainingArguments and of the
question-answering scripts is in one of four tables: it has a setting (ALIASES), it describes FiveTune's fixed behaviour
(UNCHANGED), it changes no result (NO_EFFECT), or it has no equivalent and the message gives an alternative.
"""

from __future__ import annotations

from collections.abc import Mapping

from fivetune.errors import ConfigError
from fivetune.types import JsonTable

ALIASES: dict[str, str] = {
    # model
    "model_name_or_path": "model.path",
    "config_name": "model.config",
    "tokenizer_name": "model.tokenizer",
    "model_revision": "model.revision",
    # data
    "train_file": "data.train",
    "validation_file": "data.eval",
    "validation_split": "data.eval_share",
    "validation_split_percentage": "data.eval_share",
    "max_source_length": "data.max_input_tokens",
    "max_seq_length": "data.max_input_tokens",
    "max_target_length": "data.max_target_tokens",
    "max_answer_length": "data.max_target_tokens",
    "doc_stride": "data.window_overlap",
    "max_train_samples": "data.max_train_examples",
    "max_eval_samples": "data.max_eval_examples",
    "question_column": "data.columns.question",
    "context_column": "data.columns.context",
    "answer_column": "data.columns.answer",
    "header": "data.header",
    "cache_dir": "data.cache_dir",
    "version_2_with_negative": "task.name",
    # training
    "output_dir": "run.dir",
    "seed": "run.seed",
    "per_device_train_batch_size": "train.batch_size",
    "auto_find_batch_size": "train.batch_size",
    "num_train_epochs": "train.num_epochs",
    "max_steps": "train.num_steps",
    "early_stopping_patience": "train.early_stopping.patience",
    "label_smoothing_factor": "loss.label_smoothing",
    "teacher": "distill.teacher",
    "teacher_model_name_or_path": "distill.teacher",
    "max_grad_norm": "train.max_grad_norm",
    "ema_decay": "train.ema",
    "logging_steps": "train.log_every_steps",
    "bf16": "train.precision",
    "gradient_checkpointing": "train.recompute",
    "activation_checkpointing": "train.recompute",
    "use_cpu": "device",
    "no_cuda": "device",
    "ddp_timeout": "launch.timeout_minutes",
    # optimizer and schedule
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "optim": "optimizer.name",
    "adafactor": "optimizer.name",
    "warmup_steps": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_fraction",
    "lr_scheduler_type": "schedule.name",
    # evaluation, checkpoints, trackers
    "per_device_eval_batch_size": "eval.batch_size",
    "eval_steps": "eval.every_steps",
    "eval_on_start": "eval.at_start",
    "metric_for_best_model": "eval.metric",
    "generation_max_length": "eval.max_new_tokens",
    "val_max_target_length": "eval.max_new_tokens",
    "val_max_answer_length": "eval.max_new_tokens",
    "num_beams": "eval.num_beams",
    "generation_num_beams": "eval.num_beams",
    "num_return_sequences": "eval.num_candidates",
    "min_length": "eval.min_new_tokens",
    "do_sample": "eval.temperature",
    "temperature": "eval.temperature",
    "top_k": "eval.top_k",
    "top_p": "eval.top_p",
    "no_repeat_ngram_size": "eval.no_repeat_ngram_size",
    "stop_strings": "eval.stop",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "report_to": "report.sinks",
}

ANOTHER_DEFAULT = object()  # the value equals the default of the argument: the setting is unchanged

VALUE_ALIASES: dict[str, dict[str | float, object]] = {
    "version_2_with_negative": {True: "squad_v2", False: "squad"},
    "auto_find_batch_size": {True: "auto", False: ANOTHER_DEFAULT},
    "max_steps": {-1: ANOTHER_DEFAULT},
    "max_grad_norm": {0: None},
    "bf16": {True: "bf16", False: ANOTHER_DEFAULT},
    "use_cpu": {True: "cpu", False: ANOTHER_DEFAULT},
    "no_cuda": {True: "cpu", False: ANOTHER_DEFAULT},
    "adafactor": {True: "adafactor", False: ANOTHER_DEFAULT},
    "warmup_steps": {0: ANOTHER_DEFAULT},
    "warmup_ratio": {0: ANOTHER_DEFAULT},
    "optim": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "adamw_apex_fused": "adamw",
        "paged_adamw": "adamw",  # in 8 bits it pages the moments, in 32 it is AdamW: paging changes no result
        "paged_adamw_32bit": "adamw",
        "paged_adamw_8bit": "adamw_8bit",
        "lion_32bit": "lion",
        "paged_lion_32bit": "lion",
        "schedule_free_adamw": "schedule_free",
    },
    "lr_scheduler_type": {
        "constant_with_warmup": "constant",
        "polynomial": "linear",  # of power 1, the default; lr_scheduler_kwargs are refused
        "cosine_with_restarts": "cosine",  # of one cycle, the default
        "warmup_stable_decay": "wsd",
    },
    "metric_for_best_model": {"exact_match": "exact"},
    "report_to": {"none": [], "all": ["tensorboard", "wandb", "mlflow"]},
}

EVALUATIONS = "By default a run evaluates ten times: eval.every_steps. Without data.eval nothing is evaluated."
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50}  # of transformers, with do_sample; top_p is 1 in both
NO_GROUPS = "Beams are one group; eval.num_candidates keeps several answers of eval.num_beams."
UNCHANGED: dict[str, tuple[tuple[object, ...], str]] = {  # accepted with these values: FiveTune's fixed behaviour
    "do_train": ((True,), "fivetune train always trains. To score only: fivetune evaluate RUN --data.eval FILE."),
    "do_eval": ((True,), "Without data.eval nothing is evaluated: leave it out."),
    "do_predict": ((False,), "After training: fivetune predict RUN --input FILE."),
    "predict_with_generate": ((True,), "Evaluation always generates; leave it out."),
    "load_best_model_at_end": ((True,), "model/ always holds the best checkpoint; leave it out."),
    "greater_is_better": ((True,), "Each metric states its direction; leave it out."),
    "eval_strategy": (("steps",), EVALUATIONS),
    "evaluation_strategy": (("steps",), EVALUATIONS),
    "save_strategy": (("steps",), "By default a checkpoint is written at each evaluation: checkpoint.every_steps."),
    "fp16": ((False,), "train.precision: auto takes bf16, or fp16 on GPUs without bf16."),
    "bf16_full_eval": ((False,), "Evaluation computes in train.precision."),
    "fp16_full_eval": ((False,), "Evaluation computes in train.precision."),
    "pad_to_max_length": ((False,), "Batches are not padded; train.forward: buckets computes fixed sizes."),
    "ignore_pad_token_for_loss": ((True,), "Padding is never part of the loss; leave it out."),
    "average_tokens_across_devices": ((True,), "The loss is divided by the tokens of all devices; leave it out."),
    "use_fast_tokenizer": ((True,), "Tokenizers are always the fast ones; leave it out."),
    "use_slow_tokenizer": ((False,), "Tokenizers are always the fast ones; leave it out."),
    "group_by_length": ((True,), "Examples of similar length share a batch; data.bucket_pool: 1 draws at random."),
    "early_stopping_threshold": ((0,), "Set train.early_stopping.min_delta, in points of the score (0 to 100)."),
    "push_to_hub": ((False,), "Nothing is uploaded. Afterwards: hf upload NAME RUN/model."),
    "torch_compile": ((False,), "torch.compile is not offered; train.capture replays steps as CUDA graphs instead."),
    "dataloader_drop_last": ((False,), "No example is dropped; leave it out."),
    "null_score_diff_threshold": ((0,), "fivetune score finds the best threshold; the report shows its curve."),
    "prediction_loss_only": ((False,), "Evaluation always generates; leave it out."),
    "trust_remote_code": ((False,), "Code from a model's repository is never run."),
    "ignore_data_skip": ((False,), "A resumed run continues at its place in the data."),
    "typical_p": ((1,), "Answers are drawn by eval.temperature, eval.top_k and eval.top_p."),
    "encoder_no_repeat_ngram_size": ((0,), "eval.no_repeat_ngram_size counts within the answer alone."),
    "num_beam_groups": ((1,), NO_GROUPS),
    "diversity_penalty": ((0,), NO_GROUPS),
    "gradient_accumulation_steps": ((), "Set train.global_batch_size: accumulation is derived from it."),
}

# Workers, logging, memory, uploads: any value is accepted, because no result depends on it.
NO_EFFECT = frozenset({
    "preprocessing_num_workers", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
    "dataloader_in_order", "overwrite_cache", "disable_tqdm", "log_level", "log_level_replica",
    "log_on_each_node", "logging_strategy", "logging_first_step", "logging_nan_inf_filter", "skip_memory_metrics",
    "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics",
    "save_on_each_node", "save_only_model", "torch_empty_cache_steps", "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "local_rank", "remove_unused_columns",
    "include_num_input_tokens_seen", "include_for_metrics", "label_names", "length_column_name",
    "sortish_sampler", "restore_callback_states_from_checkpoint", "hub_token", "hub_private_repo", "hub_model_id",
    "logging_dir", "save_safetensors", "past_index", "jit_mode_eval", "use_ipex", "use_mps_device", "ray_scope",
    "half_precision_backend", "fp16_backend", "fp16_opt_level", "include_inputs_for_metrics",
    "include_tokens_per_second", "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token",
    "dispatch_batches", "split_batches",
    "hub_strategy", "hub_always_push", "hub_revision", "use_cache", "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs", "low_cpu_mem_usage", "n_best_size", "token", "use_auth_token",
})  # fmt: skip

NO_EQUIVALENT: dict[str, str] = {
    "source_prefix": "Put the prefix into the template: --task.inputs 'summarize: {text}' of the tasks jsonl and "
    "classification, task.template of the question tasks.",
    "forced_bos_token": "T5 models begin all answers with the same token; leave it out.",
    "forced_bos_token_id": "T5 models begin all answers with the same token; leave it out.",
    "forced_eos_token_id": "Each answer ends by the model's end token, or at eval.max_new_tokens.",
    "bad_words_ids": "Words cannot be forbidden; eval.suppress_sentinels forbids <extra_id_N> alone.",
    "max_length": "Set data.max_input_tokens, data.max_target_tokens, and eval.max_new_tokens for answers.",
    "resume_from_checkpoint": "Write fivetune train RUN --resume.",
    "overwrite_output_dir": "Write --overwrite, which moves the old run aside.",
    "test_file": "After training: fivetune evaluate RUN --data.eval FILE.",
    "max_predict_samples": "After training: fivetune evaluate RUN --data.eval FILE --data.max_eval_examples N.",
    "run_name": "The run is named after run.dir; report.title is the heading of its report.",
    "project": "Set the project by the tracker's own variable, such as WANDB_PROJECT.",
    "text_column": "Name it in the template of task jsonl: --task.inputs 'summarize: {text}'.",
    "summary_column": "Name it in the template of task jsonl: --task.targets '{summary}'.",
    "lora": "Set model.adapter.name: lora.",
    "use_lora": "Set model.adapter.name: lora.",
    "use_peft": "Set model.adapter.name: lora, or another adapter.",
    "peft_config": "Set model.adapter.name: lora, and its r, alpha, dropout and target_modules.",
    "lora_r": "Set model.adapter.name: lora and model.adapter.r.",
    "lora_alpha": "Set model.adapter.name: lora and model.adapter.alpha.",
    "lora_dropout": "Set model.adapter.name: lora and model.adapter.dropout.",
    "lora_target_modules": "Set model.adapter.name: lora and model.adapter.target_modules.",
    "freeze_encoder": "Set model.freeze: [encoder].",
    "freeze_embeds": "Set model.freeze: [shared].",
    "load_in_8bit": "Set model.adapter.name: qlora, which keeps the matrices of the base in 4 bits.",
    "load_in_4bit": "Set model.adapter.name: qlora.",
    "fsdp": "Set strategy.name: fsdp.",
    "fsdp_config": "Set strategy.name: fsdp.",
    "ddp_backend": "Set strategy.name: ddp; NCCL on GPUs and gloo on CPUs are chosen by the device.",
    "deepspeed": "DeepSpeed is not offered; strategy.name: fsdp shards weights and optimizer.",
    "parallelism_config": "Set strategy.name and launch.nproc.",
    "accelerator_config": "Set strategy.name, launch.nproc and train.precision.",
    "data_seed": "run.seed seeds weights, data order and dropout.",
    "full_determinism": "Runs on a CPU are deterministic; on a GPU that depends on train.forward and the kernels.",
    "eval_delay": "Set eval.at_start: false and eval.every_steps.",
    "generation_config": "Set eval.num_beams, eval.max_new_tokens, eval.length_penalty and so on.",
    "lr_scheduler_kwargs": "Set the options of the schedule: schedule.final_fraction and so on.",
    "ema": "Set train.ema: 0.999, the decay of a moving average of the weights.",
    "use_ema": "Set train.ema: 0.999, the decay of a moving average of the weights.",
    "swa": "Set checkpoint.average_best: 3, or train.ema: 0.999 (docs/optimizers.md).",
    "use_swa": "Set checkpoint.average_best: 3, or train.ema: 0.999 (docs/optimizers.md).",
    "optim_args": "Set the options of the optimizer: optimizer.beta1 and so on.",
    "optim_target_modules": "One optimizer trains all weights.",
    "neftune_noise_alpha": "Noise on the embeddings is not offered; model.dropout regularises.",
    "use_liger_kernel": "FiveTune has kernels of its own for T5 (train.forward).",
    "liger_kernel_config": "FiveTune has kernels of its own for T5 (train.forward).",
    "torch_compile_backend": "torch.compile is not offered; train.capture replays steps as CUDA graphs instead.",
    "torch_compile_mode": "torch.compile is not offered; train.capture replays steps as CUDA graphs instead.",
    "tf32": "Set train.precision: tf32; fp32 stays full fp32.",
    "train_sampling_strategy": "Set data.bucket_pool: 1 draws at random, more batches examples of similar length.",
    "enable_jit_checkpoint": "SIGTERM and Ctrl-C always save before they stop; leave it out.",
    "debug": "fivetune check makes all checks; fivetune profile shows a few steps in detail.",
    "trackio_space_id": "Trackers are tensorboard, wandb and mlflow: report.sinks.",
    "trackio_bucket_id": "Trackers are tensorboard, wandb and mlflow: report.sinks.",
    "trackio_static_space_id": "Trackers are tensorboard, wandb and mlflow: report.sinks.",
}

DATASETS = {  # names that the hub once had without their owner
    "squad": "rajpurkar/squad",
    "squad_v2": "rajpurkar/squad_v2",
    "cnn_dailymail": "abisee/cnn_dailymail",
    "xsum": "EdinburghNLP/xsum",
    "samsum": "Samsung/samsum",
    "wmt14": "wmt/wmt14",
    "wmt16": "wmt/wmt16",
    "billsum": "FiscalNote/billsum",
    "opus_books": "Helsinki-NLP/opus_books",
    "glue": "nyu-mll/glue",
    "super_glue": "aps/super_glue",
    "boolq": "google/boolq",
    "imdb": "stanfordnlp/imdb",
    "ag_news": "fancyzhx/ag_news",
    "emotion": "dair-ai/emotion",
    "wikisql": "Salesforce/wikisql",
    "spider": "xlangai/spider",
    "gsm8k": "openai/gsm8k",
    "multi_news": "alexfabbri/multi_news",
}
_COMPOSED = {"dataset_name", "dataset_config_name"}
_SWITCHES = {
    "gradient_checkpointing", "activation_checkpointing", "eval_on_start", "version_2_with_negative",
    "auto_find_batch_size", "bf16", "use_cpu", "no_cuda", "adafactor", "do_sample",
}  # fmt: skip


class NoEquivalentError(ConfigError):
    """An argument of transformers, or its value, has no equivalent setting.

    Args:
        where: place of the argument.
        advice: what to do instead.
    """

    def __init__(self, name: str, *, where: str, advice: str) -> None:
        super().__init__(f"{where}: {name} has no setting of its own here. {advice}")
        self.where, self.advice = where, advice


def is_known(name: str) -> bool:
    """Whether a name is one of transformers' arguments."""
    return any(name in table for table in (ALIASES, UNCHANGED, NO_EFFECT, NO_EQUIVALENT, _COMPOSED))


def find_setting(name: str) -> str:
    """Find the setting that a name of a command line or a call stands for: transformers' name, or the setting itself.

    >>> find_setting("cache-dir"), find_setting("data.cache_dir")
    ('data.cache_dir', 'data.cache_dir')
    """
    return ALIASES.get(name.replace("-", "_"), name)


def complete_argument(name: str) -> str:
    """Complete an abbreviated argument, as argparse does in transformers' scripts, if one argument alone begins so.

    >>> complete_argument("dataset_config"), complete_argument("learning"), complete_argument("save")
    ('dataset_config_name', 'learning_rate', 'save')
    """
    known = {*ALIASES, *UNCHANGED, *NO_EFFECT, *NO_EQUIVALENT, *_COMPOSED}
    longer = [one for one in known if one.startswith(name)]
    return longer[0] if len(longer) == 1 and name not in known else name


def needs_no_value(name: str) -> bool:
    """Whether an argument may have no value: a switch of transformers, or one without a setting.

    >>> needs_no_value("do_train"), needs_no_value("learning_rate")
    (True, False)
    """
    return name in _SWITCHES or any(name in table for table in (UNCHANGED, NO_EFFECT, NO_EQUIVALENT))


def translate_argument(name: str, value: object, *, where: str, beside: Mapping[str, object]) -> JsonTable:
    """Translate one of transformers' arguments to settings; none if it has no effect.

    Args:
        where: place of the argument, for the message.
        beside: all arguments of the same file or command line, by name.

    Raises NoEquivalentError with the alternative for an argument or a value without an equivalent, ConfigError for a
    data set that cannot be named.

    >>> translate_argument("learning_rate", 1e-3, where="--learning_rate", beside={})
    {'optimizer.lr': 0.001}
    >>> translate_argument("doc_stride", 64, where="--doc_stride", beside={})
    {'data.window_overlap': 64, 'data.overlong': 'windows'}
    >>> translate_argument("predict_with_generate", True, where="--predict_with_generate", beside={})
    {}
    """
    if name in NO_EFFECT:
        return {}
    if name in UNCHANGED and value in UNCHANGED[name][0]:
        return {}
    advice = UNCHANGED[name][1] if name in UNCHANGED else NO_EQUIVALENT.get(name)
    if advice:
        raise NoEquivalentError(name, where=where, advice=advice)
    if name in _COMPOSED:
        return _translate_dataset(name, value, where=where, beside=beside)
    if name in ("do_sample", "top_p", *SAMPLING_DEFAULTS):
        return _translate_sampling(name, value, beside)
    if name == "doc_stride":
        return {ALIASES[name]: value, "data.overlong": "windows"}
    if name in ("question_column", "context_column", "answer_column"):
        own = ALIASES[name].rpartition(".")[2]
        return {} if value in (own, f"{own}s") else {ALIASES[name]: value}
    if name == "validation_split_percentage" and isinstance(value, int | float):
        return {ALIASES[name]: value / 100}
    if name == "ddp_timeout" and isinstance(value, int | float):
        return {ALIASES[name]: value / 60}
    if name == "warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return {"schedule.warmup_fraction": value}
    if name == "metric_for_best_model" and isinstance(value, str):
        value = value.removeprefix("eval_")
    if isinstance(value, str | int | float):
        value = VALUE_ALIASES.get(name, {}).get(value, value)
    if value is ANOTHER_DEFAULT:
        return {}
    if name == "report_to" and isinstance(value, str):
        value = [value]
    return {ALIASES[name]: value}


def _translate_sampling(name: str, value: object, beside: Mapping[str, object]) -> JsonTable:
    """Translate do_sample to transformers' defaults of what is not given; do_sample false switches the others off.

    >>> _translate_sampling("do_sample", True, {"do_sample": True, "top_k": 9})
    {'eval.temperature': 1.0}
    """
    if not beside.get("do_sample", True):
        return {}
    if name != "do_sample":
        return {ALIASES[name]: value}
    settings: JsonTable = {}
    for other, default in SAMPLING_DEFAULTS.items():
        if beside.get(other) is None:
            settings[ALIASES[other]] = default
    return settings


def _translate_dataset(name: str, value: object, *, where: str, beside: Mapping[str, object]) -> JsonTable:
    """Translate a data set of the hub to its splits `train` and `validation`, in the form org/name:config:split."""
    if name == "dataset_config_name":
        if "dataset_name" in beside:
            return {}
        raise ConfigError(f"{where}: {value!r} needs dataset_name. Or write data.train: org/name:{value}:train.")
    source = DATASETS.get(str(value), str(value))
    if "/" not in source:
        raise ConfigError(
            f"{where}: {value!r} has no owner. Names of the hub have the form org/name. Write "
            f"--dataset_name org/{value}."
        )
    config = beside.get("dataset_config_name") or ""
    return {"data.train": f"{source}:{config}:train", "data.eval": f"{source}:{config}:validation"}
