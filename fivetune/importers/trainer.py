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
from typing import ClassVar, cast

from fivetune.config.aliases import DATASETS
from fivetune.errors import ConfigError
from fivetune.importers import (
    Argument,
    Computed,
    Finding,
    ImportedRecipe,
    Importer,
    RawConfig,
    Rules,
    read_source_file,
    set_plain_task,
)
from fivetune.importers._arguments import (
    ACCUMULATION,
    EXAMPLE,
    ROUGE,
    apply_arguments,
    complete_training,
    read_launcher,
)
from fivetune.importers._changes import Script, format_text, read_changes, resolve_changes
from fivetune.importers._python import Data, PythonSource, Text, get_last_name, name_split, parse_python
from fivetune.importers._shell import find_command, parse_flags
from fivetune.types import JsonValue

ARGUMENTS = "Seq2SeqTrainingArguments|TrainingArguments"
TRAINERS = r"\w*Trainer"
MODELS = r"AutoModelFor(Seq2SeqLM|ConditionalGeneration)|\w*ForConditionalGeneration|T5\w*Model|AutoModelWithLMHead"
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
LIGHTNING_ONLY = {"logger", "callbacks", "checkpoint_callback", "precision", "accelerator", "gpus", "devices"}
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adamw", "Adafactor": "adafactor", "Lion": "lion", "SGD": "sgd"}
OPTIMIZER_ARGUMENTS = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
SCHEDULES = {
    "get_linear_schedule_with_warmup": "linear",
    "get_cosine_schedule_with_warmup": "cosine",
    "get_constant_schedule": "constant",
    "get_constant_schedule_with_warmup": "constant",
    "get_inverse_sqrt_schedule": "inverse_sqrt",
}
GENERATION = ("num_beams", "length_penalty", "repetition_penalty", "num_return_sequences", "min_length")
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
        recipe = ImportedRecipe(f"{self.title}, {source.name}")
        values = apply_arguments(recipe, OWN_RULES, script.arguments)
        complete_training(recipe, values, defaults={}, by="the Trainer")
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
    named = values.get("metrics", "exact_match" if is_short else "rouge")
    metrics, score = METRICS[str(named)]
    inputs, targets = str(values.get("inputs", "{inputs}")), str(values.get("targets", "{targets}"))
    columns = {**_list_nested(inputs), **_list_nested(targets)}
    for plain, nested in columns.items():
        inputs = inputs.replace(f"{{{nested}}}", f"{{{plain}}}")
        targets = targets.replace(f"{{{nested}}}", f"{{{plain}}}")
    if columns:
        recipe.set("data.columns", columns, "columns inside others")
    set_plain_task(recipe, inputs, targets, metrics=[metrics], score=score, reason="pairs of texts")
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
    place = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    if place < 0:
        return None
    path = Path(source.name).parent / words[place]
    is_readable = path.is_file() and READABLE.search(path.read_text(encoding="utf-8", errors="replace"))
    return (path, words[:place], words[place + 1 :]) if is_readable else None


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
    _read_arguments(script, given)
    _read_model(script)
    _read_data(script)
    _read_texts(script)
    _read_callbacks(script)
    _read_metrics(script)
    _read_adapters(script)
    _read_own_code(script)
    return script


def _read_arguments(script: Script, given: Mapping[str, JsonValue | Computed]) -> None:
    """Read the arguments of the Trainer, or those of Lightning's, or of a loop."""
    python = script.python
    calls = python.find_calls(ARGUMENTS)
    own = [
        name
        for name, node in python.classes.items()
        if any(re.fullmatch(ARGUMENTS, get_last_name(b)) for b in node.bases)
    ]
    for call in calls[:1]:
        script.arguments |= python.read_call(call, ("output_dir",))
        for target in _list_targets(python, call):
            if isinstance(target, ast.Name):  # what is assigned to its attributes afterwards wins
                script.arguments |= python.read_table(target)
    for call in calls[1:]:
        script.report(call, "a second table of arguments; the first counts")
    for name in own:
        fields = cast("dict[str, object]", python.evaluate(ast.Name(name, ast.Load())))
        script.arguments |= {key: Argument(cast("JsonValue", value)) for key, value in fields.items()}
    if not calls and python.find_calls("HfArgumentParser"):
        script.arguments |= {key: Argument(value) for key, value in given.items()}
        if not given:
            built = python.find_calls("HfArgumentParser")[0]
            script.report(built, "the command line gives these: fivetune import-config 'python SCRIPT.py --flags ...'")
    if not calls:
        _read_loop(script)
    given_optimizers = any(one.arg == "optimizers" for call in python.find_calls(TRAINERS) for one in call.keywords)
    if not calls or given_optimizers:
        _read_optimizer(script)


def _read_loop(script: Script) -> None:
    """Read Lightning's Trainer, or the optimizer, schedule, batch and epochs of a loop."""
    python = script.python
    for call in python.find_calls("Trainer")[:1]:
        for name, one in python.read_call(call).items():
            if name in ("gpus", "devices") and isinstance(one.value, int) and one.value > 1:
                script.arguments["launcher: num_processes"] = one
            elif name in LIGHTNING:
                script.arguments.setdefault(LIGHTNING[name], one)
            elif name == "precision" and str(one.value) not in ("32", "32-true"):
                script.arguments["bf16" if "bf16" in str(one.value) else "fp16"] = one._replace(value=True)
            elif name not in LIGHTNING_ONLY:
                script.findings.append(Finding(f"{name} ({one.where})", "left out", (), "of Lightning's Trainer"))
    for call in (*python.find_calls("DataLoader"), *python.calls):
        given = python.read_call(call, ("dataset", "batch_size") if get_last_name(call.func) == "DataLoader" else ())
        if size := given.get("batch_size") or given.get("train_batch_size"):
            script.arguments["per_device_train_batch_size"] = size
            break
    for node in ast.walk(python.tree):
        if not isinstance(node, ast.For) or not re.search("epoch", ast.unparse(node.target), re.IGNORECASE):
            continue
        if get_last_name(node.iter) in ("range", "trange", "tqdm"):
            inner = cast("ast.Call", node.iter).args[-1]
            inner = inner.args[-1] if isinstance(inner, ast.Call) and inner.args else inner
            script.add("num_train_epochs", python.read_value(inner), node)
    for call in python.find_calls("generate")[-1:]:
        for name, one in python.read_call(call).items():
            if name in (*GENERATION, "max_length", "max_new_tokens"):
                script.arguments[f"generate: {name}"] = one


def _read_optimizer(script: Script) -> None:
    """Read an optimizer and a schedule that the code builds; they win over the arguments of the Trainer."""
    python = script.python
    for call in python.find_calls("|".join(OPTIMIZERS))[:1]:
        script.arguments["optim"] = Argument(OPTIMIZERS[get_last_name(call.func)], f"line {call.lineno}")
        for name, one in python.read_call(call, ("params", "lr")).items():
            if name in OPTIMIZER_ARGUMENTS:
                script.arguments[OPTIMIZER_ARGUMENTS[name]] = one
    for call in python.find_calls("|".join(SCHEDULES))[:1]:
        script.arguments.pop("lr_scheduler_type", None)
        script.arguments["schedule"] = Argument(SCHEDULES[get_last_name(call.func)], f"line {call.lineno}")
        if warmup := python.read_call(call, ("optimizer", "num_warmup_steps")).get("num_warmup_steps"):
            script.arguments["num_warmup_steps"] = warmup


def _read_model(script: Script) -> None:
    """Read the names of model and tokenizer."""
    python = script.python
    for name, pattern in (("model", MODELS), ("tokenizer", TOKENIZERS)):
        calls = [
            call
            for call in python.find_calls("from_pretrained")
            if isinstance(call.func, ast.Attribute) and re.fullmatch(pattern, get_last_name(call.func.value))
        ]
        for call in calls:
            given = python.read_call(call, ("path",))
            path = given.get("path") or given.get("pretrained_model_name_or_path") or given.get("model_name")
            before = script.arguments.get(name)
            if path and (not before or isinstance(before.value, Computed)):
                script.arguments[name] = path
    model, tokenizer = (script.arguments.get(name) for name in ("model", "tokenizer"))
    if model and tokenizer and (tokenizer.value == model.value or isinstance(tokenizer.value, Computed)):
        del script.arguments["tokenizer"]


def _read_data(script: Script) -> None:
    """Read which data the Trainer trains on and evaluates, and what is done to its columns."""
    python = script.python
    given: dict[str, ast.expr] = {}
    for call in python.find_calls(rf"{TRAINERS}|fit"):
        given |= {one.arg: one.value for one in call.keywords if one.arg in ("train_dataset", "eval_dataset")}
    for call in python.find_calls("read_csv|read_table"):
        names = next((python.read_value(one.value) for one in call.keywords if one.arg == "names"), None)
        if names is not None:
            script.add("names", names, call)
    for call in python.find_calls("load_dataset"):
        for one in call.keywords:
            if one.arg == "split" and "[" in str(python.evaluate(one.value)):
                script.report(one.value, "a part of a split: set data.max_train_examples, or data.eval_share")
    train = python.evaluate(given.get("train_dataset"))
    held = python.evaluate(given.get("eval_dataset"))
    read = [found for call in python.calls if isinstance(found := python.evaluate(call), Data)]
    if isinstance(held, dict):
        script.report(given["eval_dataset"], "several evaluation sets: name them in data.eval")
        held = None
    if not isinstance(train, Data) and read:
        if "train_dataset" in given:
            train = _choose_part(read, "train")
        else:
            train, held = _choose_part(read, "train"), _choose_part(read, "val|dev|test|eval")
            held = held if held != train else None
            if train and train.hub and not train.split:
                train, held = train._replace(split="train"), train._replace(split="validation")
            elif train and train.half == "" and any(one.share for one in read):
                train = train._replace(half="train", share=next(one.share for one in read if one.share))
    if not isinstance(train, Data):
        node = given.get("train_dataset")
        if node is not None:
            script.add("train_dataset", Computed(ast.unparse(node)), node)
        return
    _add_data(script, train, held, given)
    read_changes(script)


def _choose_part(read: list[Data], pattern: str) -> Data | None:
    """The data whose split or file has a name like a pattern; for training the first data of all."""
    for one in read:
        for split, file in (*one.files.items(), (one.split, "")):
            if re.search(pattern, f"{split} {file}".lower()):
                return one._replace(split=split if split in one.files else one.split)
    return read[0] if pattern == "train" else None


def _add_data(script: Script, train: Data, held: object, given: Mapping[str, ast.expr]) -> None:
    place: ast.AST = given.get("train_dataset") or script.python.tree
    train = _name_owner(train)
    is_divided = isinstance(held, Data) and held.half == "test"
    if train.hub and "/" not in train.hub.partition(":")[0]:
        script.add("train_dataset", Computed(f"{train.hub}, which has no owner (org/name)"), place)
        held = None
    else:
        script.add("train_dataset", train, place)
    share = train.share if train.share is not None else getattr(held, "share", None)
    if (is_divided or (train.half and held is None)) and share:
        script.add("eval_share", share, given.get("eval_dataset", place))
    elif isinstance(held, Data):
        held = _name_owner(held)
        if name_split(held) != name_split(train):
            script.add("eval_dataset", held, given.get("eval_dataset", place))
        else:
            script.report(place, "trained and evaluated on the same records; give data.eval or data.eval_share")
    elif "eval_dataset" in given:
        script.add("eval_dataset", Computed(ast.unparse(given["eval_dataset"])), given["eval_dataset"])


def _name_owner(data: Data) -> Data:
    """Data of the hub by the name with its owner."""
    name, _, config = data.hub.partition(":")
    return data._replace(hub=f"{DATASETS.get(name, name)}:{config}") if data.hub else data


def _read_texts(script: Script) -> None:
    """Read the texts that are tokenised: which columns, with which prefix, up to which length."""
    python = script.python
    targets_of = _find_target_blocks(python)
    for call in python.find_calls(r"\w*tok\w*|encode_plus|batch_encode_plus|encode|__call__"):
        keywords = {one.arg: one.value for one in call.keywords if one.arg}
        name = get_last_name(call.func)
        if re.fullmatch(TOKENIZERS, name) or name in ("from_pretrained", "tokenize"):
            continue
        given = [*call.args[:2], *(keywords[key] for key in ("text", "text_target") if key in keywords)]
        texts = [(node, python.evaluate(node)) for node in given]
        texts = [(node, text) for node, text in texts if isinstance(text, Text)]
        role = _find_role(python, call, targets_of, keywords, script)
        for node, text in texts:
            own = "targets" if keywords.get("text_target") is node else role
            _add_text(script, own, text, node, is_second=node is not texts[0][0] and own == "inputs")
        if texts or "max_length" in keywords:
            length = python.read_value(keywords["max_length"]) if "max_length" in keywords else None
            if length is not None and (texts or not isinstance(length, Computed)):
                is_target = role == "targets" or ("text_target" in keywords and len(texts) == 1)
                script.add(f"max_{'target' if is_target else 'source'}_length", length, keywords["max_length"])
                if "text_target" in keywords and len(texts) == 2:
                    script.add("max_target_length", length, keywords["max_length"])


def _add_text(script: Script, role: str, text: Text, node: ast.AST, *, is_second: bool) -> None:
    template = format_text(resolve_changes(script, text))
    if template.endswith("</s>"):
        template = template.removesuffix("</s>").rstrip()
        script.report(node, "the end token, which FiveTune adds by itself")
    if is_second and isinstance(before := script.arguments.get(role), Argument) and template != before.value:
        script.arguments[role] = before._replace(value=f"{before.value} {template}")
        reason = "two texts of one call: a space between them, where the tokenizer puts </s>"
        script.findings.append(
            Finding(f"{template} (line {getattr(node, 'lineno', 0)})", "set", ("task.inputs",), reason)
        )
        return
    script.add(role, template, node)


def _find_target_blocks(python: PythonSource) -> set[ast.AST]:
    """Calls inside `with tokenizer.as_target_tokenizer():`."""
    found: set[ast.AST] = set()
    for node in ast.walk(python.tree):
        if isinstance(node, ast.With) and "as_target_tokenizer" in ast.unparse(node.items[0].context_expr):
            found |= set(ast.walk(node))
    return found


def _find_role(
    python: PythonSource, call: ast.Call, blocks: set[ast.AST], keywords: Mapping[str, ast.expr], script: Script
) -> str:
    """Whether a call of the tokenizer makes inputs or targets."""
    if call in blocks or ("text_target" in keywords and not call.args and "text" not in keywords):
        return "targets"
    if "text_target" in keywords:
        return "inputs"
    names = [ast.unparse(target) for target in _list_targets(python, call)]
    if any(TARGET_WORDS.search(name) for name in names) and "inputs" in script.arguments:
        return "targets"
    text = python.evaluate(call.args[0]) if call.args else None
    known = script.arguments.get("inputs")
    if known and isinstance(text, Text) and format_text(resolve_changes(script, text)) != known.value:
        return "targets"
    return "targets" if any(TARGET_WORDS.search(name) for name in names) and not known else "inputs"


def _list_targets(python: PythonSource, call: ast.Call) -> list[ast.expr]:
    """What an expression with a call is assigned to."""
    found: list[ast.expr] = []
    for node in ast.walk(python.tree):
        if isinstance(node, ast.Assign) and any(one is call for one in ast.walk(node.value)):
            found += node.targets
        elif isinstance(node, ast.keyword | ast.DictComp):
            continue
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                found += [key] if key is not None and any(one is call for one in ast.walk(value)) else []
    return found


def _read_callbacks(script: Script) -> None:
    """Read early stopping, of transformers and of Lightning."""
    python = script.python
    for call in python.find_calls("EarlyStoppingCallback|EarlyStopping")[:1]:
        given = python.read_call(call, ("early_stopping_patience", "early_stopping_threshold"))
        is_lightning = get_last_name(call.func) == "EarlyStopping"
        patience = given.get(
            "patience" if is_lightning else "early_stopping_patience", Argument(3 if is_lightning else 1)
        )
        script.arguments["early_stopping_patience"] = patience
        if (threshold := given.get("early_stopping_threshold")) and threshold.value != 0:
            script.arguments["early_stopping_threshold"] = threshold
    for call in python.find_calls(TRAINERS):
        for one in call.keywords:
            own = get_last_name(one.value) in {*python.classes, *python.functions}
            if one.arg == "data_collator" and own:
                script.report(one.value, f"a collator of one's own, {UNREAD}")
            elif one.arg == "compute_metrics" and own and not any(_list_metrics(python)):
                script.report(one.value, f"a metric of one's own, {UNREAD}: docs/tasks.md shows how to write one")
    for name, node in python.classes.items():
        bases = " ".join(ast.unparse(base) for base in node.bases)
        if re.search(r"Trainer\b", bases):
            own = ", ".join(one.name for one in node.body if isinstance(one, ast.FunctionDef))
            reason = f"a Trainer of one's own ({own or 'no methods'}), {UNREAD}"
            script.findings.append(Finding(f"class {name} (line {node.lineno})", "left out", (), reason))
        elif re.search(r"Callback\b", bases):
            reason = f"a callback of one's own, {UNREAD}"
            script.findings.append(Finding(f"class {name} (line {node.lineno})", "left out", (), reason))


def _list_metrics(python: PythonSource) -> Iterator[tuple[ast.Call, str]]:
    """Calls that load a metric, or compute one of scikit-learn and others, with its name."""
    for call in python.calls:
        name = get_last_name(call.func)
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if (name == "load_metric" or (name == "load" and owner == "evaluate")) and call.args:
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
    quantized = [
        call
        for call in python.find_calls(r"BitsAndBytesConfig|from_pretrained|prepare_model_for_\w+_training")
        if "prepare" in get_last_name(call.func)
        or any((one.arg or "").startswith("load_in_") and python.evaluate(one.value) is True for one in call.keywords)
    ]
    for call in python.find_calls("|".join(ADAPTERS))[:1]:
        name = ADAPTERS[get_last_name(call.func)]
        given = python.read_call(call)
        variants = {"use_dora": "dora", "use_rslora": "rslora"}
        for flag, variant in variants.items():
            name = variant if flag in given and given.pop(flag).value is True else name
        script.add("peft", "qlora" if quantized and name == "lora" else name, call)
        script.arguments |= {f"peft: {key}": one for key, one in given.items() if key != "lora"}
    if quantized and "peft" not in script.arguments:
        script.report(quantized[0], "weights in 8 or 4 bits are trained by model.adapter.name: qlora")
    for node in ast.walk(python.tree):
        if isinstance(node, ast.For) and "requires_grad = False" in ast.unparse(node):
            parts = re.findall(r"\.(?:get_)?(encoder|decoder|shared|input_embeddings)\b", ast.unparse(node.iter))
            if parts:
                frozen: list[JsonValue] = [part.replace("input_embeddings", "shared") for part in parts]
                script.add("freeze", frozen, node)
            elif "peft" not in script.arguments:
                script.report(node, "set model.freeze: parts of the names of the weights that are not trained")


def _read_own_code(script: Script) -> None:
    """Report what code does to model and tokenizer."""
    python = script.python
    for call in python.calls:
        name = get_last_name(call.func)
        if name in MODEL_CHANGES:
            script.report(call, "the vocabulary is changed here; FiveTune trains the one of model.path")
        elif name == "gradient_checkpointing_enable":
            script.arguments["gradient_checkpointing"] = Argument(True, f"line {call.lineno}")
    for written, values in python.attributes.items():
        if re.search(r"model\.(config|generation_config)\.", written) and not written.endswith("use_cache"):
            for value in values:
                name = written.rpartition(".")[2]
                where = f"{written} (line {value.lineno})"
                script.findings.append(Finding(where, "left out", (), f"{name} of the model's own configuration"))
