"""Python scripts and notebooks that fine-tune a T5 with transformers: Seq2SeqTrainer, Trainer, Lightning, own loops.

In: a .py or .ipynb file, which is read and never executed, or the command line that starts it, whose options win over
the defaults of argparse and dataclasses. Out: arguments, model, data, the texts that preprocessing makes, lengths,
callbacks, metrics and adapters where they are literal; the rest is reported line by line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

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
from fivetune.start.importers._changes import PARAMETERS, Kind, Script, format_text, read_changes, resolve_changes
from fivetune.start.importers._python import (
    Data,
    PythonSource,
    get_argument,
    get_last_name,
    has_columns,
    name_split,
)
from fivetune.start.importers._shell import find_command, parse_flags, split_at_script
from fivetune.types import JsonValue

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
NESTED = re.compile(r"(?<!\{)\{([\w -]+(?:\.[\w -]+)+)\}")  # a dotted column of a template
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
OPTIMIZERS = {
    "AdamW": "adamw",
    "Adam": "adamw",
    "AdamWeightDecay": "adamw",
    "create_optimizer": "adamw",  # of transformers for Keras
    "Adafactor": "adafactor",
    "Lion": "lion",
    "SGD": "sgd",
}
KERAS_OPTIMIZERS = {name.lower(): value for name, value in OPTIMIZERS.items()}
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
DRAWING = ("do_sample", "temperature", "top_k", "top_p", "no_repeat_ngram_size")  # of generate, as on a command line
LENGTHS = ("max_source_length", "max_target_length")
MODEL_CHANGES = "resize_token_embeddings|add_tokens|add_special_tokens"
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

    title = "a script or notebook with transformers' Seq2SeqTrainer"
    rules = OWN_RULES

    def can_read(self, source: RawConfig) -> bool:
        if source.name.endswith((".py", ".ipynb")):
            return READABLE.search(source.text) is not None and not re.search(r"(?<!\w)T5Model\(", source.text)
        return _find_script(source) is not None

    def convert(self, source: RawConfig) -> ImportedRecipe:
        script = _read_script(source)
        title = KINDS.get(script.kind, self.title)
        if "Seq2Seq" not in ast.unparse(script.python.tree):
            title = title.replace("Seq2SeqTrainer", "Trainer")
        recipe = ImportedRecipe(f"{title}, {source.name}")
        values = apply_arguments(recipe, OWN_RULES, script.arguments)
        if script.kind == "trainer":
            complete_training(recipe, values, defaults=TRAINER_DEFAULTS, by="the Trainer")
        else:
            _complete_loop(recipe, values)
        _complete_task(recipe, values)
        recipe.resolve_findings()
        recipe.findings += script.findings
        for name in ("inputs", "targets"):
            if found := script.arguments.get(name):
                recipe.reasons[f"task.{name}"] = f"the text that is tokenised, {found.where}"
        return recipe


def _complete_task(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set the templates over the columns, and the metric."""
    templates: dict[str, str] = {}
    columns: dict[str, JsonValue] = {}
    for name in ("inputs", "targets"):
        templates[name] = str(values.get(name, f"{{{name}}}"))
        for nested in NESTED.findall(templates[name]):
            plain = nested.rpartition(".")[2]
            columns[plain] = nested
            templates[name] = templates[name].replace(f"{{{nested}}}", f"{{{plain}}}")
    if columns:
        recipe.set("data.columns", columns, "columns inside others")
    # A short answer is right or wrong; nothing else is taken that the script does not compute.
    length = values.get("max_target_length")
    is_short = TARGET_CODE.search(str(values.get("targets"))) or (isinstance(length, int) and length <= 16)
    named = values.get("metrics", "exact_match" if is_short else None)
    metric, score = METRICS.get(str(named), ("", ""))
    set_plain_task(recipe, **templates, metrics=[metric], score=score, reason="pairs of texts")
    if not named:
        recipe.drop("task.metrics", "task.main_metric")
        advice = "none that FiveTune has is computed; set task.metrics, such as [rouge], and task.main_metric"
        recipe.add("metrics", "left out", advice)
    for name in templates.keys() - values.keys():
        recipe.set(f"task.{name}", f"{{{name}}}", f"to be corrected: the {name} are computed by code")
    for name in templates:
        if name not in values:
            advice = f"no literal text over columns was found: correct task.{name}"
            recipe.add(f"{name} of the tokenizer", "left out", advice)


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


# --- the script ---


def _find_script(source: RawConfig) -> tuple[Path, list[str], list[str]] | None:
    """The file that a command line runs, the words before it, and its options."""
    if source.name.endswith((".py", ".ipynb", ".json", ".yaml", ".yml")) or EXAMPLE.search(source.text):
        return None
    try:
        before, script, options = split_at_script(find_command(source, r"\S+\.py\b", "a script"))
    except ConfigError:  # told by the importer of transformers' scripts
        return None
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
    python = PythonSource(source, given)
    script = Script(python, _find_kind(python), launcher)
    for code, reason in python.skipped.items():
        script.add_finding(code, reason)
    if python.find_calls(ARGUMENTS):
        _read_arguments(script)
    else:
        _read_other_arguments(script, given)
    _read_model(script)
    _read_data(script)
    _read_texts(script)
    _read_callbacks(script)
    _read_metrics(script)
    _read_adapters(script)
    _report_code(script)
    _report_numbers(script)
    return script


def _find_kind(python: PythonSource) -> Kind:
    """What trains: transformers' Trainer, Lightning's, Keras or a loop."""
    bases = [get_last_name(base) for node in python.classes.values() for base in node.bases]
    if python.find_calls(f"{ARGUMENTS}|HfArgumentParser") or any(re.fullmatch(ARGUMENTS, base) for base in bases):
        return "trainer"
    if "LightningModule" in bases or (python.find_calls("fit") and python.find_calls("Trainer")):
        return "lightning"
    if re.search(r"\b(TF\w+|keras)\.\w+\(", ast.unparse(python.tree)):
        return "keras"
    return "trainer" if python.find_calls(TRAINERS) else "loop"


def _read_arguments(script: Script) -> None:
    """Read the arguments of the Trainer, and an optimizer that the code gives it."""
    python = script.python
    first, *others = python.find_calls(ARGUMENTS)
    script.arguments |= python.read_table(first, ("output_dir",))
    for target in python.list_targets(first):
        if isinstance(target, ast.Name):  # what is assigned to its attributes afterwards wins
            script.arguments |= python.read_table(target)
    for call in others:
        script.report(call, "a second table of arguments; the first counts")
    if any(get_argument(call, "optimizers") for call in python.find_calls(TRAINERS)):
        _read_optimizer(script)


def _read_other_arguments(script: Script, given: Mapping[str, JsonValue | Computed]) -> None:
    """Read the arguments of a command line, of Lightning's Trainer, of Keras, or of a loop."""
    python = script.python
    for name, node in python.classes.items():
        if any(re.fullmatch(ARGUMENTS, get_last_name(base)) for base in node.bases):
            script.arguments |= python.read_table(ast.Name(name, ast.Load(), lineno=node.lineno))
    parsers = python.find_calls("HfArgumentParser")
    if parsers and given:
        script.arguments |= {key: Argument(value) for key, value in given.items()}
    elif parsers:
        advice = "the command line gives these: fivetune import-config 'python SCRIPT.py --flags ...'"
        script.report(parsers[0], advice)
    else:
        bound = {name for _, name in python.names}
        for call in python.find_calls(TRAINERS):
            node = get_argument(call, "args", 1)
            if isinstance(node, ast.Name) and node.id not in bound:
                reason = "is not defined in this file, and no other is read: the Trainer's defaults are taken"
                script.add_finding(f"args={node.id} (line {node.lineno})", reason)
    _read_loop(script)
    _read_optimizer(script)


def _read_loop(script: Script) -> None:
    """Read what Lightning's Trainer, Keras, the data loader, the loop over epochs and `generate` are given."""
    python = script.python
    if script.kind == "lightning":
        for call in script.read_call("Trainer"):
            for name, one in python.read_table(call).items():
                if name not in PARAMETERS:
                    script.arguments[f"Lightning: {name}"] = one
    for node in ast.walk(python.tree):
        if isinstance(node, ast.For) and "epoch" in ast.unparse(node.target).lower():
            script.add("num_train_epochs", _count_steps(python, node.iter), node)
    # The last that names a batch counts: a data loader, else a data module or model.
    for pattern in (r"\w*(Data|Model)\w*", "(to|prepare)_tf_dataset", "DataLoader"):
        for call in python.find_calls(pattern)[::-1]:
            found = python.read_table(call, ("dataset", "batch_size") if pattern == "DataLoader" else ())
            if size := found.get("batch_size") or found.get("train_batch_size"):
                script.arguments["per_device_train_batch_size"] = size
    if script.kind == "keras":
        for call in script.read_call("fit", "x", "y", "batch_size", "epochs"):
            script.report(call, "TensorFlow/Keras: loss, metrics, callbacks are not read; PyTorch weights are trained")
        for call in python.find_calls("compile"):
            named = str(python.evaluate(get_argument(call, "optimizer", 0))).lower()
            if named in KERAS_OPTIMIZERS:
                script.add("optim", KERAS_OPTIMIZERS[named], call)
    for call in python.find_calls("generate")[-1:]:
        for name, one in python.read_table(call).items():
            if name in DRAWING:
                script.arguments[name] = one
            elif f"generate: {name}" in OWN_RULES.settings:
                script.arguments[f"generate: {name}"] = one
    for call in python.find_calls(SEEDS):
        if call.args and isinstance(seed := python.read_value(call.args[0]), int):
            script.add("seed", seed, call)
    script.read_call("clip_grad_norm_?", "parameters", "max_norm")


def _count_steps(python: PythonSource, node: ast.expr) -> JsonValue | Computed:
    """The number of steps of a loop over a range, which may be in a progress bar."""
    if isinstance(node, ast.Call) and get_last_name(node) == "tqdm" and node.args:
        node = node.args[0]
    if isinstance(node, ast.Call) and get_last_name(node) in ("range", "trange"):
        bounds = [python.read_value(one) for one in node.args]
        if all(isinstance(one, int) for one in bounds):
            return len(range(*cast("list[int]", bounds)))
    return Computed(ast.unparse(node))


def _read_optimizer(script: Script) -> None:
    """Read an optimizer and a schedule that the code builds; they win over the arguments of the Trainer."""
    python = script.python
    first = ("lr",) if script.kind == "keras" else ("params", "lr")
    for call in script.read_call("|".join(OPTIMIZERS), *first):
        script.arguments["optim"] = Argument(OPTIMIZERS[get_last_name(call)], f"line {call.lineno}")
    for call in script.read_call("|".join(SCHEDULES), "optimizer", "num_warmup_steps"):
        script.arguments.pop("lr_scheduler_type", None)
        script.arguments["schedule"] = Argument(SCHEDULES[get_last_name(call)], f"line {call.lineno}")
    for call in python.find_calls(OTHER_SCHEDULES):
        name = get_last_name(call)
        named = str(python.evaluate(get_argument(call, "name", 0))).removesuffix("_with_warmup")
        if name == "get_scheduler" and named in SCHEDULES.values() and "schedule" not in script.arguments:
            script.add("schedule", named, call)
            script.read_call("get_scheduler", "name", "optimizer", "num_warmup_steps")
        elif name not in {*SCHEDULES, *OPTIMIZERS}:
            script.report(call, "a schedule without a counterpart: set schedule.name (fivetune list schedules)")


def _read_model(script: Script) -> None:
    """Read the names of model and tokenizer: the first that are known."""
    found = script.arguments
    for call in script.python.find_calls("from_pretrained"):
        owner = get_last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        for name, pattern in (("model", MODELS), ("tokenizer", TOKENIZERS)):
            is_open = name not in found or isinstance(found[name].value, Computed)
            if is_open and re.fullmatch(pattern, owner):
                script.read(name, get_argument(call, "pretrained_model_name_or_path", 0))
    # FiveTune takes the tokenizer of the model where no other is named.
    if {"model", "tokenizer"} <= found.keys():
        tokenizer = found["tokenizer"].value
        if tokenizer == found["model"].value or isinstance(tokenizer, Computed):
            del found["tokenizer"]


# --- the data ---


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
    train = python.evaluate(given.get("train_dataset"))
    held = python.evaluate(given.get("eval_dataset"))
    reading = [call for call in python.calls if isinstance(python.evaluate(call), Data)]
    read = [cast("Data", python.evaluate(call)) for call in reading]
    if not isinstance(train, Data) and read:
        train = _choose_part(read, "train") or read[0]
        if "train_dataset" not in given:
            train, held = _complete_parts(read, train)
    if isinstance(train, Data):
        place = given.get("train_dataset", reading[0])
        script.add("train_dataset", train, place)
        _add_held(script, train, held, given.get("eval_dataset"), place)
        read_changes(script)
    elif node := given.get("train_dataset"):
        script.add("train_dataset", Computed(ast.unparse(node)), node)


def _choose_part(read: list[Data], pattern: str) -> Data | None:
    """The data whose split or file has a name like a pattern."""
    for one in read:
        for split, file in (*one.files.items(), (one.split, "")):
            if re.search(pattern, f"{split} {file}".lower()):
                return one._replace(split=split)
    return None


def _complete_parts(read: list[Data], train: Data) -> tuple[Data, Data | None]:
    """The data of a script without a Trainer that names them: training and evaluation."""
    # Data of the hub are divided by their owner; files by their names or by the script.
    if train.hub and not train.split and not train.half:
        return train._replace(split="train"), train._replace(split="validation")
    held = _choose_part(read, "val|dev|test|eval")
    shares = [one.share for one in read if one.share]
    if shares and not train.half:
        train = train._replace(half="train", share=shares[0])
    return train, held if held != train else None


def _add_held(script: Script, train: Data, held: object, node: ast.expr | None, place: ast.expr) -> None:
    """Add the data of evaluation, which may be a share of the training data."""
    name = None
    share = train.share
    is_divided = bool(train.half)
    if isinstance(held, Data):
        name = name_split(held)
        share = share or held.share
        is_divided = held.half == "test"
    if share and is_divided:
        script.add("eval_share", share, node or place)
    elif isinstance(name, str | list):
        script.add("eval_dataset", name, node or place)
    elif node:
        script.add("eval_dataset", Computed(ast.unparse(node)), node)


# --- the texts ---


def _read_texts(script: Script) -> None:
    """Read the texts that are tokenised: which columns, with which prefix, up to which length."""
    python = script.python
    for call in python.find_calls(rf"(?!{TOKENIZERS}$|tokenize$)(\w*tok\w*|(batch_)?encode(_plus)?|__call__)"):
        target = get_argument(call, "text_target")
        role = "inputs" if target else _find_role(script, call)
        roles: list[str] = []  # of the texts over columns
        for node in (*call.args[:2], get_argument(call, "text"), target):
            if node and has_columns(python.evaluate(node)):
                own = "targets" if node is target else role
                _add_text(script, own, node, is_second=bool(roles) and own == "inputs")
                roles.append(own)
        limit = get_argument(call, "max_length")
        length = python.read_value(limit) if limit else None
        if limit is None or (isinstance(length, Computed) and not roles):
            continue
        for own in roles or ["targets" if target else role]:
            script.add("max_target_length" if own == "targets" else "max_source_length", length, limit)


def _find_role(script: Script, call: ast.Call) -> str:
    """Whether a call of the tokenizer makes inputs or targets: by its place, its name, or as the second text."""
    python = script.python
    for outer, _ in python.list_around(call):
        if isinstance(outer, ast.With) and "as_target_tokenizer" in ast.unparse(outer.items[0]):
            return "targets"
    if any(TARGET_WORDS.search(ast.unparse(target)) for target in python.list_targets(call)):
        return "targets"
    # The first text is the input; a later one is the target, unless it holds the first, which only counted tokens.
    known = script.arguments.get("inputs")
    text = python.evaluate(call.args[0]) if call.args else None
    if known is None or not isinstance(text, str) or not has_columns(text):
        return "inputs"
    return "inputs" if str(known.value) in format_text(resolve_changes(script, text)) else "targets"


def _add_text(script: Script, role: str, node: ast.expr, *, is_second: bool) -> None:
    """Add the text of a role; `is_second` for one that follows another one in the same call."""
    template = format_text(resolve_changes(script, str(script.python.evaluate(node))))
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
        counts = f"a part of the text of line {node.lineno}, which counts"
        script.add_finding(f"{before.value} ({before.where})", counts)
    elif template not in str(before.value):
        script.report(node, f"another text of the {role}, {template}; the one of {before.where} counts")


# --- what stands around them ---


def _read_callbacks(script: Script) -> None:
    """Read early stopping, of transformers and of Lightning or Keras; the patience of each where none is given."""
    for call in script.read_call("EarlyStoppingCallback", "early_stopping_patience", "early_stopping_threshold"):
        script.add("early_stopping_patience", 1, call)
    for call in script.read_call("EarlyStopping"):
        script.add("early_stopping_patience", 3, call)
    for call in script.python.find_calls("gradient_checkpointing_enable"):
        script.add("gradient_checkpointing", True, call)


def _read_metrics(script: Script) -> None:
    """Read the metric: the first that FiveTune has."""
    python = script.python
    loaded = 0
    for call in python.calls:
        name = get_last_name(call)
        if (name == "load_metric" or ast.unparse(call.func) == "evaluate.load") and call.args:
            name = str(python.evaluate(call.args[0]))
        elif name not in METRICS:
            continue
        loaded += 1
        if name in METRICS and "metrics" not in script.arguments:
            script.add("metrics", name, call)
        elif name != getattr(script.arguments.get("metrics"), "value", None):
            script.report(call, "FiveTune takes the first metric that it has; fivetune list metrics names all")
    own = python.classes.keys() | python.functions.keys()
    for call in python.find_calls(TRAINERS):
        collator = get_argument(call, "data_collator", 2)
        metric = get_argument(call, "compute_metrics")
        if collator and get_last_name(collator) in own:
            script.report(collator, f"a collator of one's own, {UNREAD}")
        if metric and get_last_name(metric) in own and not loaded:
            script.report(metric, f"a metric of one's own, {UNREAD}: docs/tasks.md shows how to write one")


def _read_adapters(script: Script) -> None:
    """Read peft's configuration, and weights that are frozen."""
    python = script.python
    # FiveTune quantizes the base by the adapter's name: qlora.
    quantized = python.find_calls(r"prepare_model_for_\w+_training")
    for call in python.calls:
        for name in ("load_in_8bit", "load_in_4bit"):
            if python.evaluate(get_argument(call, name)) is True:
                quantized.append(call)
    for call in python.find_calls("|".join(ADAPTERS))[:1]:
        given = python.read_table(call)
        name = ADAPTERS[get_last_name(call)]
        if name == "lora" and quantized:
            name = "qlora"
        for variant in ("dora", "rslora"):
            flag = given.pop(f"use_{variant}", None)
            name = variant if flag and flag.value is True else name
        script.add("peft", name, call)
        script.arguments |= {f"peft: {key}": one for key, one in given.items()}
    if quantized and "peft" not in script.arguments:
        first = min(quantized, key=lambda call: call.lineno)
        script.report(first, "weights in 8 or 4 bits are trained by model.adapter.name: qlora")
    for node in ast.walk(python.tree):
        if not isinstance(node, ast.For) or "requires_grad = False" not in ast.unparse(node):
            continue
        parts = re.findall(r"\.(?:get_)?(encoder|decoder|shared|input_embeddings)\b", ast.unparse(node.iter))
        if parts:
            script.add("freeze", [part.replace("input_embeddings", "shared") for part in parts], node)
        elif "peft" not in script.arguments:
            script.report(node, "set model.freeze: parts of the names of the weights that are not trained")


def _report_code(script: Script) -> None:
    """Report Trainers and callbacks of one's own, and what code does to model and tokenizer."""
    python = script.python
    for name, node in python.classes.items():
        kind = re.search(r"(Trainer|Callback)\b", " ".join(ast.unparse(base) for base in node.bases))
        if kind:
            methods = ", ".join(one.name for one in node.body if isinstance(one, ast.FunctionDef))
            reason = f"a {kind[1]} of one's own ({methods or 'no methods'}), {UNREAD}"
            script.add_finding(f"class {name} (line {node.lineno})", reason)
    for call in python.find_calls(MODEL_CHANGES):
        script.report(call, "the vocabulary is changed here; FiveTune trains the one of model.path")
    for written, values in python.attributes.items():
        if re.search(r"model\.(config|generation_config)\.", written) and not written.endswith("use_cache"):
            for value in values:
                name = written.rpartition(".")[2]
                script.add_finding(f"{written} (line {value.lineno})", f"{name} of the model's own configuration")


def _report_numbers(script: Script) -> None:
    """Report numbers whose names stand for settings, and which no line that is read gives to one."""
    python = script.python
    given: dict[str, ast.expr] = {}
    for (_, name), found in python.names.items():
        if not found[-1].steps:
            given[name] = found[-1].node
    for written, values in python.attributes.items():
        given[written] = values[-1]
    for node in ast.walk(python.tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    given[str(key.value)] = value
    # A number that has become a setting under another name is not told again.
    taken = {name: one.value for name, one in script.arguments.items()}
    for written, node in given.items():
        name = written.rpartition(".")[2].lower()
        number = python.read_value(node)
        rule = next((rule for rule in NUMBERS if re.fullmatch(rule[0], name)), None)
        if rule is None or type(number) not in (int, float) or not number:
            continue
        if name in python.options or re.search(r"(^|_)(val|valid|validation|test|eval|dev)_", name):
            continue
        _, argument, setting = rule
        names = LENGTHS if argument in LENGTHS else (argument,)
        if all(number != taken.get(one) for one in names):
            reason = f"looks like {setting}, but no line that is read uses it; set it yourself"
            script.add_finding(f"{written} = {number} (line {node.lineno})", reason)
