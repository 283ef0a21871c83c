"""Python scripts and notebooks that fine-tune a T5 with transformers: Seq2SeqTrainer, Trainer, Lightning, own loops.

In: a .py or .ipynb file, which is read and never executed, or the command line that starts it, whose options win over
the defaults of argparse and dataclasses. Out: arguments, model, data, the texts that preprocessing makes, lengths,
callbacks, metrics and adapters where they are literal; the rest is reported line by line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal, cast

from fivetune.config.aliases import DATASETS
from fivetune.errors import ConfigError
from fivetune.start.importers import (
    Argument,
    Computed,
    ImportedRecipe,
    Importer,
    RawConfig,
    Rules,
    read_source_file,
    set_plain_task,
)
from fivetune.start.importers._arguments import (
    ACCUMULATION,
    EXAMPLE,
    ROUGE,
    TRAINER_DEFAULTS,
    apply_arguments,
    complete_training,
    read_launcher,
)
from fivetune.start.importers._changes import Script, format_text, read_changes, resolve_changes
from fivetune.start.importers._python import (
    Data,
    PythonSource,
    get_argument,
    get_keywords,
    get_last_name,
    has_columns,
    name_split,
    parse_python,
)
from fivetune.start.importers._shell import find_command, parse_flags, split_at_script
from fivetune.types import JsonValue

Kind = Literal["trainer", "lightning", "keras", "loop"]
ARGUMENTS = "Seq2SeqTrainingArguments|TrainingArguments"
TRAINERS = r"\w*Trainer"
MODELS = (
    r"(TF|Flax)?AutoModelFor(Seq2SeqLM|ConditionalGeneration)|"
    r"\w*ForConditionalGeneration|T5\w*Model|AutoModelWithLMHead"
)
TOKENIZERS = r"\w*Tokenizer\w*"
READABLE = re.compile(rf"TrainingArguments|({MODELS})\.from_pretrained")
TARGET_WORDS = re.compile(r"label|target|summar|answer|output|decoder|response|y_|sql|highlight|tgt", re.IGNORECASE)
TARGET_CODE = re.compile(r"sql|query|code|label", re.IGNORECASE)  # ROUGE does not see operators
METRICS: dict[str, tuple[JsonValue, str]] = {  # of `evaluate`, datasets and scikit-learn
    "rouge": (ROUGE, "rougeLsum_f1"),
    "RougeScorer": (ROUGE, "rougeLsum_f1"),
    "sacrebleu": ("bleu", "bleu"),
    "bleu": ("bleu", "bleu"),
    "chrf": ("bleu", "chrf"),
    "corpus_bleu": ("bleu", "bleu"),
    "exact_match": ("exact_match", "exact_match"),
    "accuracy": ("exact_match", "exact_match"),
    "accuracy_score": ("exact_match", "exact_match"),
    "squad": ("squad", "f1"),
    "squad_v2": ("squad", "f1"),
}
ADAPTERS = {
    "LoraConfig": "lora",
    "AdaLoraConfig": "lora",
    "IA3Config": "ia3",
    "PromptTuningConfig": "prompt",
    "PrefixTuningConfig": "prefix",
}
LIGHTNING = {  # arguments of Lightning's Trainer -> transformers'
    "max_epochs": "num_train_epochs",
    "max_steps": "max_steps",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "gradient_clip_val": "max_grad_norm",
}
OPTIMIZERS = {
    "AdamW": "adamw",
    "Adam": "adamw",
    "AdamWeightDecay": "adamw",
    "create_optimizer": "adamw",  # of transformers for Keras
    "Adafactor": "adafactor",
    "Lion": "lion",
    "SGD": "sgd",
}
OPTIMIZER_ARGUMENTS = {
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
    "init_lr": "learning_rate",
    "weight_decay": "weight_decay",
    "weight_decay_rate": "weight_decay",
    "eps": "adam_epsilon",
    "epsilon": "adam_epsilon",
}
OPTIMIZER_LR = 1e-3  # default of Adam, AdamW and SGD in PyTorch and in Keras
SCHEDULES = {
    "get_linear_schedule_with_warmup": "linear",
    "get_cosine_schedule_with_warmup": "cosine",
    "get_constant_schedule": "constant",
    "get_constant_schedule_with_warmup": "constant",
    "get_inverse_sqrt_schedule": "inverse_sqrt",
    "create_optimizer": "linear",
}
OTHER_SCHEDULES = r"[A-Z]\w+(LR|LRScheduler|Decay)|ReduceLROnPlateau|get_\w+_schedule_with_\w+|get_scheduler"
SEEDS = "manual_seed|set_seed|seed_everything|seed|set_random_seed"
KINDS: dict[Kind, str] = {
    "lightning": "a script or notebook with PyTorch Lightning",
    "keras": "a TensorFlow/Keras script or notebook",
    "loop": "a script or notebook with a PyTorch loop of its own",
}
NUMBERS = (  # names of numbers that stand for settings -> the argument and the setting
    (r"(num_|n_|max_|train_|training_|total_)*epochs?", "num_train_epochs", "train.num_epochs"),
    (r"(per_device_)?(train_|training_)?(batch_?size|bs)", "per_device_train_batch_size", "train.batch_size"),
    (r"(base_|init_|initial_|max_)?(learning_?rate|lr)", "learning_rate", "optimizer.lr"),
    (r"(random_|manual_|global_)?seed", "seed", "run.seed"),
    (r"weight_decay", "weight_decay", "optimizer.weight_decay"),
    (r"(num_)?warm_?up_steps", "warmup_steps", "schedule.warmup_steps"),
    (r"(gradient_|grad_)?accum\w*", "gradient_accumulation_steps", "train.global_batch_size"),
    (r"max_grad_norm|grad(ient)?_clip\w*|clip_\w*norm", "max_grad_norm", "train.max_grad_norm"),
    (r"(?=.*len)\w*(target|tgt|output|out_|summ|label|answer|decoder)\w*", "max_target_length",
     "data.max_target_tokens"),
    (r"(?=.*len)\w*(max|source|src|input|seq|text)\w*", "max_source_length", "data.max_input_tokens"),
)  # fmt: skip
MODEL_CHANGES = {"resize_token_embeddings", "add_tokens", "add_special_tokens"}
UNREAD = "of the code, which is read and not executed"
OWN_RULES = Rules(
    settings={
        "model": "model.path",
        "tokenizer": "model.tokenizer",
        "train_dataset": "data.train",
        "names": "data.header",
        "eval_dataset": "data.eval",
        "eval_share": "data.eval_share",
        "max_source_length": "data.max_input_tokens",
        "max_target_length": "data.max_target_tokens",
        "freeze": "model.freeze",
        "peft": "model.adapter.name",
        "peft: r": "model.adapter.r",
        "peft: lora_alpha": "model.adapter.alpha",
        "peft: lora_dropout": "model.adapter.dropout",
        "peft: target_modules": "model.adapter.target_modules",
        "peft: num_virtual_tokens": "model.adapter.num_virtual_tokens",
        "generate: num_beams": "eval.num_beams",
        "generate: length_penalty": "eval.length_penalty",
        "generate: repetition_penalty": "eval.repetition_penalty",
        "generate: num_return_sequences": "eval.num_candidates",
        "generate: min_length": "eval.min_new_tokens",
        "generate: max_length": "eval.max_new_tokens",
        "generate: max_new_tokens": "eval.max_new_tokens",
        "schedule": "schedule.name",
        "num_warmup_steps": "schedule.warmup_steps",
    },
    values={},
    unchanged={
        "peft: bias": (("none",), "the biases of an adapter's base stay as they are"),
        "generate: num_return_sequences": ((1,), ""),
        "num_warmup_steps": ((0,), ""),
    },
    no_effect=("peft: task_type", "peft: inference_mode"),
    joint={
        "inputs": ("task.inputs", ""),
        "targets": ("task.targets", ""),
        "metrics": ("task.metrics", ""),
        **ACCUMULATION,
    },
)


class TrainerScripts(Importer):
    """Scripts and notebooks around transformers' Trainer."""

    title: ClassVar[str] = "a script or notebook with transformers' Seq2SeqTrainer"
    rules: ClassVar[Rules] = OWN_RULES

    def can_read(self, source: RawConfig) -> bool:
        if source.name.endswith((".py", ".ipynb")):
            return READABLE.search(source.text) is not None and not re.search(r"(?<!\w)T5Model\(", source.text)
        return _find_script(source) is not None

    def convert(self, source: RawConfig) -> ImportedRecipe:
        script = _read_script(source)
        kind = _find_kind(script.python)
        title = KINDS.get(kind, self.title)
        if "Seq2Seq" not in ast.unparse(script.python.tree):
            title = title.replace("Seq2SeqTrainer", "Trainer")
        recipe = ImportedRecipe(f"{title}, {source.name}")
        values = apply_arguments(recipe, OWN_RULES, script.arguments)
        if kind == "trainer":
            complete_training(recipe, values, defaults=TRAINER_DEFAULTS, by="the Trainer")
        else:
            _complete_loop(recipe, values)
        _complete_task(recipe, values)
        if values.get("peft") == "qlora" and "model.adapter.target_modules" not in recipe.settings:
            recipe.reasons["model.adapter.name"] = "LoRA beside a base in 8 or 4 bits; FiveTune takes 4"
        recipe.resolve_findings()
        recipe.findings += script.findings
        for name in ("inputs", "targets"):
            if found := script.arguments.get(name):
                recipe.reasons[f"task.{name}"] = f"the text that is tokenised, {found.where}"
        return recipe


def _complete_task(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set the templates over the columns, and the metric."""
    length = values.get("max_target_length")
    is_short = TARGET_CODE.search(str(values.get("targets"))) or (isinstance(length, int) and length <= 16)
    named = values.get("metrics", "exact_match" if is_short else None)
    metrics, score = METRICS[str(named)] if named else ("", "")
    inputs, targets = str(values.get("inputs", "{inputs}")), str(values.get("targets", "{targets}"))
    columns = {**_list_nested(inputs), **_list_nested(targets)}
    for plain, nested in columns.items():
        inputs = inputs.replace(f"{{{nested}}}", f"{{{plain}}}")
        targets = targets.replace(f"{{{nested}}}", f"{{{plain}}}")
    if columns:
        recipe.set("data.columns", columns, "columns inside others")
    set_plain_task(recipe, inputs, targets, metrics=[metrics], score=score, reason="pairs of texts")
    if not named:
        recipe.drop("task.metrics", "task.main_metric")
        recipe.add(
            "metrics",
            "left out",
            "none that FiveTune has is computed; set task.metrics, such as [rouge], and task.main_metric",
        )
    for name in ("inputs", "targets"):
        if name not in values:
            recipe.set(f"task.{name}", f"{{{name}}}", f"to be corrected: the {name} are computed by code")
            advice = f"no literal text over columns was found: correct task.{name}"
            recipe.add(f"{name} of the tokenizer", "left out", advice)


def _list_nested(template: str) -> dict[str, str]:
    """The dotted columns of a template, by their last parts.

    >>> _list_nested("a {translation.en} {b}")
    {'en': 'translation.en'}
    """
    return {name.rpartition(".")[2]: name for name in re.findall(r"(?<!\{)\{([\w -]+(?:\.[\w -]+)+)\}", template)}


def _find_script(source: RawConfig) -> tuple[Path, list[str], list[str]] | None:
    """The file that a command line runs, the words before it, and its options."""
    if source.name.endswith((".py", ".ipynb", ".json", ".yaml", ".yml")) or not re.search(r"\.py\b", source.text):
        return None
    if EXAMPLE.search(source.text):
        return None
    try:
        words = find_command(source, r"\S+\.py\b", "a script")
    except ConfigError:  # told by the importer of transformers' scripts
        return None
    before, script, options = split_at_script(words)
    path = Path(source.name).parent / script
    is_readable = path.is_file() and READABLE.search(path.read_text(encoding="utf-8", errors="replace"))
    return (path, before, options) if is_readable else None


def _read_script(source: RawConfig) -> Script:
    """Read a script, or the one that a command line starts."""
    given: dict[str, JsonValue | Computed] = {}
    launcher: dict[str, Argument] = {}
    if started := _find_script(source):
        path, before, options = started
        given = {name.replace("-", "_"): value for name, value in parse_flags(options).items()}
        launcher = read_launcher(before, source)
        source = read_source_file(str(path))
    script = Script(parse_python(source, given), launcher)
    for code, reason in script.python.skipped.items():
        script.add_finding(code, reason)
    _read_arguments(script, given)
    _read_model(script)
    _read_data(script)
    _read_texts(script)
    _read_callbacks(script)
    _read_metrics(script)
    _read_adapters(script)
    _read_own_code(script)
    _report_numbers(script)
    return script


def _find_kind(python: PythonSource) -> Kind:
    """What trains: transformers' Trainer, Lightning's, Keras or a loop."""
    bases = [get_last_name(base) for node in python.classes.values() for base in node.bases]
    if python.find_calls(f"{ARGUMENTS}|HfArgumentParser") or any(re.fullmatch(ARGUMENTS, base) for base in bases):
        return "trainer"
    if "LightningModule" in bases or (python.find_calls("fit") and python.find_calls("Trainer")):
        return "lightning"
    owners = {get_last_name(call.func.value) for call in python.calls if isinstance(call.func, ast.Attribute)}
    if any(re.fullmatch(r"TF\w+|keras", owner) for owner in owners):
        return "keras"
    return "trainer" if python.find_calls(TRAINERS) else "loop"


def _read_arguments(script: Script, given: Mapping[str, JsonValue | Computed]) -> None:
    """Read the arguments of the Trainer, or those of Lightning's, or of a loop."""
    python = script.python
    calls = python.find_calls(ARGUMENTS)
    for call in calls[:1]:
        script.arguments |= python.read_table(call, ("output_dir",))
        for target in _list_targets(python, call):
            if isinstance(target, ast.Name):  # what is assigned to its attributes afterwards wins
                script.arguments |= python.read_table(target)
    for call in calls[1:]:
        script.report(call, "a second table of arguments; the first counts")
    for name, node in python.classes.items():
        if any(re.fullmatch(ARGUMENTS, get_last_name(base)) for base in node.bases):
            script.arguments |= python.read_table(ast.Name(name, ast.Load(), lineno=node.lineno))
    parsers = python.find_calls("HfArgumentParser")
    if parsers and not calls:
        script.arguments |= {key: Argument(value) for key, value in given.items()}
        if not given:
            advice = "the command line gives these: fivetune import-config 'python SCRIPT.py --flags ...'"
            script.report(parsers[0], advice)
    if not calls:
        _report_absent_arguments(script)
        _read_loop(script)
    if not calls or any(get_argument(call, "optimizers") for call in python.find_calls(TRAINERS)):
        _read_optimizer(script)


def _read_loop(script: Script) -> None:
    """Read what Lightning's Trainer, the data loader, the loop over epochs and `generate` are given."""
    python = script.python
    if python.find_calls("fit"):
        for call in python.find_calls("Trainer")[:1]:
            for name, one in python.read_table(call).items():
                script.arguments[LIGHTNING.get(name, f"Lightning: {name}")] = one
    if _find_kind(python) == "keras":
        _read_keras(script)
    loaders = python.find_calls("DataLoader|to_tf_dataset|prepare_tf_dataset")
    for call in (*loaders, *python.find_calls(r"\w*(Data|Model)\w*")):
        found = python.read_table(call, ("dataset", "batch_size") if get_last_name(call) == "DataLoader" else ())
        if size := found.get("batch_size") or found.get("train_batch_size"):
            script.arguments["per_device_train_batch_size"] = size
            break
    for node in ast.walk(python.tree):
        if isinstance(node, ast.For) and "epoch" in ast.unparse(node.target).lower():
            script.add("num_train_epochs", _count_steps(python, node.iter), node)
    for call in python.find_calls("generate")[-1:]:
        found = {f"generate: {name}": one for name, one in python.read_table(call).items()}
        script.arguments |= {name: one for name, one in found.items() if name in OWN_RULES.settings}
    for call in python.find_calls(SEEDS):
        if call.args and isinstance(seed := python.read_value(call.args[0]), int):
            script.add("seed", seed, call)
    for call in python.find_calls("clip_grad_norm_?"):
        script.read("max_grad_norm", get_argument(call, "max_norm", 1))


def _read_keras(script: Script) -> None:
    """Read what `compile` and `fit` are given."""
    python = script.python
    for call in python.find_calls("fit")[:1]:
        script.read("num_train_epochs", get_argument(call, "epochs"))
        script.read("per_device_train_batch_size", get_argument(call, "batch_size"))
        script.report(call, "TensorFlow/Keras: loss, metrics, callbacks are not read; PyTorch weights are trained")
    for call in python.find_calls("compile"):
        named = python.evaluate(get_argument(call, "optimizer", 0))
        known = {name.lower(): value for name, value in OPTIMIZERS.items()}
        if isinstance(named, str) and named.lower() in known:
            script.add("optim", known[named.lower()], call)


def _report_absent_arguments(script: Script) -> None:
    """Report arguments of the Trainer that the source does not define."""
    python = script.python
    imports = [node for node in ast.walk(python.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    bound = {name for _, name in python.names}
    for call in python.find_calls(TRAINERS):
        node = get_argument(call, "args", 1)
        if isinstance(node, ast.Name) and node.id not in bound and not python.find_calls("HfArgumentParser"):
            how = "is imported, and its file is not read" if node.id in imported else "is not defined"
            script.add_finding(f"args={node.id} (line {node.lineno})", f"{how}: the Trainer's defaults are taken")


def _list_numbers(python: PythonSource) -> dict[str, Argument]:
    """The numbers that names, attributes and entries of tables get, with their lines; the last of each."""
    given = {name: found[-1].node for (_, name), found in python.names.items() if not found[-1].steps}
    given |= {written: values[-1] for written, values in python.attributes.items()}
    for node in ast.walk(python.tree):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            given |= {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
    read = {name: python.read_argument(node) for name, node in given.items()}
    return {name: one for name, one in read.items() if type(one.value) in (int, float)}


def _report_numbers(script: Script) -> None:
    """Report numbers whose names stand for settings, and which no line that is read gives to one."""
    lengths = ("max_source_length", "max_target_length")
    for written, number in _list_numbers(script.python).items():
        name = written.rpartition(".")[2]
        if name in script.python.options or re.search(r"(^|_)(val|valid|validation|test|eval|dev)_", name.lower()):
            continue
        for pattern, argument, setting in NUMBERS:
            if not re.fullmatch(pattern, name.lower()):
                continue
            names = lengths if argument in lengths else (argument,)
            taken = [script.arguments[one].value for one in names if one in script.arguments]
            if number.value and number.value not in taken:
                reason = f"looks like {setting}, but no line that is read uses it; set it yourself"
                script.add_finding(f"{written} = {number.value} ({number.where})", reason)
            break


def _complete_loop(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set what a loop without transformers' Trainer does by default, and report what it does not name."""
    recipe.set_defaults({"schedule.name": "constant"}, "no schedule is read: the rate is constant")
    if "optim" in values and values["optim"] != "adafactor":
        recipe.set_defaults({"optimizer.lr": OPTIMIZER_LR}, "default of the optimizer")
    recipe.set_defaults({"optimizer.name": "adamw"}, "no optimizer is read")
    if "max_grad_norm" not in values:
        recipe.set_defaults({"train.max_grad_norm": None}, "no gradient is clipped")
    complete_training(recipe, values, defaults={}, by="")
    if "per_device_train_batch_size" not in values and "train.global_batch_size" not in recipe.settings:
        recipe.drop("train.batch_size")
        recipe.add("batch size", "left out", "none is read: set train.batch_size")
    if not recipe.has("train.num_epochs") and not recipe.has("train.num_steps"):
        recipe.add("epochs", "left out", "none are read: set train.num_epochs")


def _count_steps(python: PythonSource, node: ast.expr) -> JsonValue | Computed:
    """The number of steps of a loop over a range, which may be in a progress bar."""
    if isinstance(node, ast.Call) and get_last_name(node) == "tqdm" and node.args:
        return _count_steps(python, node.args[0])
    if not isinstance(node, ast.Call) or get_last_name(node) not in ("range", "trange"):
        return Computed(ast.unparse(node))
    bounds = [python.read_value(one) for one in node.args]
    if all(isinstance(one, int) for one in bounds):
        return len(range(*cast("list[int]", bounds)))
    return bounds[0] if len(bounds) == 1 else Computed(ast.unparse(node))


def _read_optimizer(script: Script) -> None:
    """Read an optimizer and a schedule that the code builds; they win over the arguments of the Trainer."""
    python = script.python
    for call in python.find_calls("|".join(OPTIMIZERS))[:1]:
        script.arguments["optim"] = Argument(OPTIMIZERS[get_last_name(call)], f"line {call.lineno}")
        first = ("lr",) if _find_kind(python) == "keras" else ("params", "lr")
        for name, one in python.read_table(call, first).items():
            if name in OPTIMIZER_ARGUMENTS:
                script.arguments[OPTIMIZER_ARGUMENTS[name]] = one
    for call in python.find_calls("|".join(SCHEDULES))[:1]:
        script.arguments.pop("lr_scheduler_type", None)
        script.arguments["schedule"] = Argument(SCHEDULES[get_last_name(call)], f"line {call.lineno}")
        place = 2 if get_last_name(call) == "create_optimizer" else 1
        script.read("num_warmup_steps", get_argument(call, "num_warmup_steps", place))
    for call in python.find_calls(OTHER_SCHEDULES):
        named = python.evaluate(get_argument(call, "name", 0)) if get_last_name(call) == "get_scheduler" else ""
        named = str(named).removesuffix("_with_warmup")
        if named in SCHEDULES.values() and "schedule" not in script.arguments:
            script.add("schedule", named, call)
            script.read("num_warmup_steps", get_argument(call, "num_warmup_steps", 2))
        elif get_last_name(call) not in SCHEDULES.keys() | OPTIMIZERS.keys():
            script.report(call, "a schedule without a counterpart: set schedule.name (fivetune list schedules)")


def _read_model(script: Script) -> None:
    """Read the names of model and tokenizer: the first that are known."""
    python, found = script.python, script.arguments
    for call in python.find_calls("from_pretrained"):
        owner = get_last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        path = get_argument(call, "pretrained_model_name_or_path", 0)
        for name, pattern in (("model", MODELS), ("tokenizer", TOKENIZERS)):
            is_open = name not in found or isinstance(found[name].value, Computed)
            if is_open and re.fullmatch(pattern, owner):
                script.read(name, path)
    if {"model", "tokenizer"} <= found.keys():
        tokenizer = found["tokenizer"].value
        if tokenizer == found["model"].value or isinstance(tokenizer, Computed):
            del found["tokenizer"]


def _read_data(script: Script) -> None:
    """Read which data the Trainer trains on and evaluates, and what is done to its columns."""
    python = script.python
    for call in python.find_calls("read_csv|read_table"):
        if names := get_argument(call, "names"):
            script.add("names", python.read_value(names), call)
    for call in python.find_calls("load_dataset"):
        split = get_argument(call, "split")
        if split and "[" in str(python.evaluate(split)):
            script.report(split, "a part of a split: set data.max_train_examples, or data.eval_share")
    given: dict[str, ast.expr] = {}
    for call in python.find_calls(TRAINERS):
        for name, place in (("train_dataset", 3), ("eval_dataset", 4)):
            if node := get_argument(call, name, place):
                given[name] = node
    train, held = (python.evaluate(given.get(name)) for name in ("train_dataset", "eval_dataset"))
    if isinstance(held, dict):
        script.report(given["eval_dataset"], "several evaluation sets: name them in data.eval")
        held = None
    read = [found for call in python.calls if isinstance(found := python.evaluate(call), Data)]
    if not isinstance(train, Data) and read:
        train = _choose_part(read, "train")
        if "train_dataset" not in given:
            train, held = _complete_parts(read, train)
    if isinstance(train, Data):
        _add_data(script, train, held, given)
        read_changes(script)
    elif node := given.get("train_dataset"):
        script.add("train_dataset", Computed(ast.unparse(node)), node)


def _choose_part(read: list[Data], pattern: str) -> Data | None:
    """The data whose split or file has a name like a pattern; for training the first data of all."""
    for one in read:
        for split, file in (*one.files.items(), (one.split, "")):
            if re.search(pattern, f"{split} {file}".lower()):
                return one._replace(split=split)
    return read[0] if pattern == "train" else None


def _complete_parts(read: list[Data], train: Data | None) -> tuple[Data | None, Data | None]:
    """The data of a script without a Trainer that names them: training and evaluation."""
    held = _choose_part(read, "val|dev|test|eval")
    held = held if held != train else None
    if train is None or train.half:
        return train, held
    if train.hub and not train.split:
        return train._replace(split="train"), train._replace(split="validation")
    share = next((one.share for one in read if one.share), None)
    return (train._replace(half="train", share=share) if share else train), held


def _add_data(script: Script, train: Data, held: object, given: Mapping[str, ast.expr]) -> None:
    """Add the data of training and of evaluation, which may be a share of the first."""
    reading = next(call for call in script.python.calls if isinstance(script.python.evaluate(call), Data))
    place = given.get("train_dataset", reading)
    held_place = given.get("eval_dataset", place)
    train = _name_owner(train)
    held = _name_owner(held) if isinstance(held, Data) else None
    has_owner = not train.hub or "/" in train.hub.partition(":")[0]
    script.add("train_dataset", train if has_owner else Computed(f"{train.hub}, which has no owner (org/name)"), place)
    share = train.share or (held.share if held else None)
    if share and (train.half if held is None else held.half == "test"):
        script.add("eval_share", share, held_place)
    elif held and has_owner and name_split(held) == name_split(train):
        script.report(place, "trained and evaluated on the same records; give data.eval or data.eval_share")
    elif held and has_owner:
        script.add("eval_dataset", held, held_place)
    elif "eval_dataset" in given:
        script.add("eval_dataset", Computed(ast.unparse(held_place)), held_place)


def _name_owner(data: Data) -> Data:
    """Data of the hub by the name with its owner."""
    name, _, config = data.hub.partition(":")
    return data._replace(hub=f"{DATASETS.get(name, name)}:{config}") if data.hub else data


def _read_texts(script: Script) -> None:
    """Read the texts that are tokenised: which columns, with which prefix, up to which length."""
    python = script.python
    blocks = _list_target_blocks(python)
    for call in python.find_calls(r"\w*tok\w*|encode_plus|batch_encode_plus|encode|__call__"):
        if re.fullmatch(rf"{TOKENIZERS}|tokenize", get_last_name(call)):
            continue
        keywords = get_keywords(call)
        target = keywords.get("text_target")
        nodes = [*call.args[:2], *(keywords[key] for key in ("text", "text_target") if key in keywords)]
        texts = {node: text for node in nodes if has_columns(text := python.evaluate(node))}
        role = "inputs" if target else _find_role(script, call, blocks)
        roles: list[str] = []
        for node, text in texts.items():
            own = "targets" if node is target else role
            _add_text(script, own, text, node, is_second=own == "inputs" and own in roles)
            roles.append(own)
        limit = keywords.get("max_length")
        length = python.read_value(limit) if limit else None
        if limit is None or (isinstance(length, Computed) and not texts):
            continue
        for own in roles or [role if target is None else "targets"]:
            script.add("max_target_length" if own == "targets" else "max_source_length", length, limit)


def _add_text(script: Script, role: str, text: str, node: ast.expr, *, is_second: bool) -> None:
    """Add the text of a role; `is_second` for one that follows another one in the same call."""
    template = format_text(resolve_changes(script, text))
    if template.endswith("</s>"):
        template = template.removesuffix("</s>").rstrip()
        script.report(node, "the end token, which FiveTune adds by itself")
    before = script.arguments.get(role)
    if before is None:
        script.add(role, template, node)
    elif is_second and template != before.value:
        script.arguments[role] = before._replace(value=f"{before.value} {template}")
        reason = "two texts of one call: a space between them, where the tokenizer puts </s>"
        script.add_finding(f"{template} (line {node.lineno})", reason, "task.inputs")
    elif template != before.value and str(before.value) in template:  # the first call only counted tokens
        script.arguments[role] = Argument(template, f"line {node.lineno}")
        script.add_finding(
            f"{before.value} ({before.where})", f"a part of the text of line {node.lineno}, which counts"
        )
    elif template not in str(before.value):
        script.report(node, f"another text of the {role}, {template}; the one of {before.where} counts")


def _list_target_blocks(python: PythonSource) -> set[ast.AST]:
    """What is inside `with tokenizer.as_target_tokenizer():`."""
    found: set[ast.AST] = set()
    for node in ast.walk(python.tree):
        if isinstance(node, ast.With) and "as_target_tokenizer" in ast.unparse(node.items[0].context_expr):
            found |= set(ast.walk(node))
    return found


def _find_role(script: Script, call: ast.Call, blocks: set[ast.AST]) -> str:
    """Whether a call of the tokenizer makes inputs or targets: by its place, its name, or as the second text."""
    python = script.python
    names = [ast.unparse(target) for target in _list_targets(python, call)]
    if call in blocks or any(TARGET_WORDS.search(name) for name in names):
        return "targets"
    known = script.arguments.get("inputs")
    text = python.evaluate(call.args[0]) if call.args else None
    if known is None or not has_columns(text):
        return "inputs"
    return "inputs" if str(known.value) in format_text(resolve_changes(script, text)) else "targets"


def _list_targets(python: PythonSource, call: ast.Call) -> list[ast.expr]:
    """The names, attributes and keys that an expression with a call is assigned to."""
    found: list[ast.expr] = []
    for node in ast.walk(python.tree):
        if isinstance(node, ast.Assign) and call in ast.walk(node.value):
            found += node.targets
        elif isinstance(node, ast.Dict):
            found += [key for key, value in zip(node.keys, node.values, strict=True) if key and call in ast.walk(value)]
    return found


def _read_callbacks(script: Script) -> None:
    """Read early stopping, of transformers and of Lightning, and report the code of others."""
    python = script.python
    for call in python.find_calls("EarlyStoppingCallback|EarlyStopping")[:1]:
        is_lightning = get_last_name(call) == "EarlyStopping"
        patience = get_argument(call, "patience") if is_lightning else get_argument(call, "early_stopping_patience", 0)
        script.arguments["early_stopping_patience"] = Argument(3 if is_lightning else 1, f"line {call.lineno}")
        script.read("early_stopping_patience", patience)
        script.read("early_stopping_threshold", get_argument(call, "early_stopping_threshold", 1))
    own = python.classes.keys() | python.functions.keys()
    for call in python.find_calls(TRAINERS):
        collator, metric = get_argument(call, "data_collator", 2), get_argument(call, "compute_metrics")
        if collator and get_last_name(collator) in own:
            script.report(collator, f"a collator of one's own, {UNREAD}")
        if metric and get_last_name(metric) in own and not any(_list_metrics(python)):
            script.report(metric, f"a metric of one's own, {UNREAD}: docs/tasks.md shows how to write one")
    for name, node in python.classes.items():
        kind = re.search(r"(Trainer|Callback)\b", " ".join(ast.unparse(base) for base in node.bases))
        if kind:
            methods = ", ".join(one.name for one in node.body if isinstance(one, ast.FunctionDef))
            reason = f"a {kind[1]} of one's own ({methods or 'no methods'}), {UNREAD}"
            script.add_finding(f"class {name} (line {node.lineno})", reason)


def _list_metrics(python: PythonSource) -> Iterator[tuple[ast.Call, str]]:
    """Calls that load a metric, or compute one of scikit-learn and others, with its name."""
    for call in python.calls:
        name = get_last_name(call)
        is_loaded = name == "load_metric" or ast.unparse(call.func) == "evaluate.load"
        if is_loaded and call.args:
            yield call, str(python.evaluate(call.args[0]))
        elif name in METRICS:
            yield call, name


def _read_metrics(script: Script) -> None:
    """Read the metric: the first that FiveTune has."""
    for call, name in _list_metrics(script.python):
        if name in METRICS and "metrics" not in script.arguments:
            script.add("metrics", name, call)
        elif name != getattr(script.arguments.get("metrics"), "value", None):
            script.report(call, "FiveTune takes the first metric that it has; fivetune list metrics names all")


def _read_adapters(script: Script) -> None:
    """Read peft's configuration, and weights that are frozen."""
    python = script.python
    quantized = [call for call in python.calls if _is_quantization(python, call)]
    for call in python.find_calls("|".join(ADAPTERS))[:1]:
        given = python.read_table(call)
        name = "qlora" if quantized else "lora"
        for variant in ("dora", "rslora"):
            flag = given.pop(f"use_{variant}", None)
            name = variant if flag and flag.value is True else name
        kind = ADAPTERS[get_last_name(call)]
        script.add("peft", name if kind == "lora" else kind, call)
        script.arguments |= {f"peft: {key}": one for key, one in given.items()}
    if quantized and "peft" not in script.arguments:
        script.report(quantized[0], "weights in 8 or 4 bits are trained by model.adapter.name: qlora")
    for node in ast.walk(python.tree):
        if not isinstance(node, ast.For) or "requires_grad = False" not in ast.unparse(node):
            continue
        parts = re.findall(r"\.(?:get_)?(encoder|decoder|shared|input_embeddings)\b", ast.unparse(node.iter))
        if parts:
            script.add("freeze", [part.replace("input_embeddings", "shared") for part in parts], node)
        elif "peft" not in script.arguments:
            script.report(node, "set model.freeze: parts of the names of the weights that are not trained")


def _is_quantization(python: PythonSource, call: ast.Call) -> bool:
    """Whether a call loads weights in 8 or 4 bits, or prepares them for training."""
    if re.fullmatch(r"prepare_model_for_\w+_training", get_last_name(call)):
        return True
    flags = (get_argument(call, "load_in_8bit"), get_argument(call, "load_in_4bit"))
    return any(python.evaluate(flag) is True for flag in flags)


def _read_own_code(script: Script) -> None:
    """Report what code does to model and tokenizer."""
    python = script.python
    for call in python.calls:
        name = get_last_name(call)
        if name in MODEL_CHANGES:
            script.report(call, "the vocabulary is changed here; FiveTune trains the one of model.path")
        elif name == "gradient_checkpointing_enable":
            script.arguments["gradient_checkpointing"] = Argument(True, f"line {call.lineno}")
    for written, values in python.attributes.items():
        if re.search(r"model\.(config|generation_config)\.", written) and not written.endswith("use_cache"):
            for value in values:
                name = written.rpartition(".")[2]
                script.add_finding(f"{written} (line {value.lineno})", f"{name} of the model's own configuration")
