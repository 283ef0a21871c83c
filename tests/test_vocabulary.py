"""The vocabulary of the package: functions are verbs, one name for one thing, errors are errors, no private dialect."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from test_layers import FILES, parse_file

from fivetune.plugins import KINDS

VERBS = set(
    re.findall(
        r"\w+",
        """
    accumulate add adopt advise align all_reduce allocate answer append apply assign attach attend average begin
    benchmark bind broadcast build calibrate call capitalise cast catch check choose classify clean clear clip close
    collate collect compare complete compute concatenate connect construct continue convert copy corrupt count create
    cut decide decode defer delete derive describe detect diagnose discard dispatch divide downsample draw drop dump
    embed encode end ensure enter escape estimate evaluate exclude expand explain export extend extract fail fetch
    fill filter find finish fit flatten flush forget format freeze fsync gather generate get give group guard handle
    hash hide identify ignore import index infer initialize insert inspect install interrupt iter join keep kill
    launch leave list load locate lock log make map mark mask measure merge monitor move multiply name normalize
    number open order pack pad pair parse patch pause peek pick plan predict prepare prevent print probe profile
    project prune publish put query quote raise rank rate read rebuild receive recompute record redact reduce refuse
    register reject release remove rename render replace replay report represent require resample reset resolve
    restore restrict resume retry return round run sample save scale scatter score search seed select send separate
    serve set shard shift shorten show shrink shuffle skip slice smooth sort split stack stamp start step stop store
    stratify stream strip submit subtract suggest sum summarise suppress swap sync synchronize take test thin time
    tokenize track train translate trim truncate try tune unescape unlock unpack update upload validate verify visit
    wait walk warn watch weigh widen withhold wrap write yield zero
    """,
    )
)
"""First words of function names, in alphabetical order; one verb per action."""

PREFIXES = {"is", "are", "has", "have", "can", "should", "needs", "supports", "rewards", "to", "as", "from", "with"}
"""Beginnings of predicates and conversions."""

CONTRACTS = {
    "to_text", "from_text", "head_of", "plugin_name", "model_dump", "model_copy",  # a task, and what pydantic gives it
    "effective_lr", "factor", "elapsed_time", "evaluation", "error", "barrier",  # of optimizers, schedules, sinks ...
    "cat_file", "pipe_file", "rm_file", "exists",  # of fsspec's file systems
    "connection_made", "data_received", "on_response_complete",  # of asyncio's and uvicorn's protocols
    "_repr_html_",  # of IPython's displays
    "forward", "backward", "state_dict", "main",  # torch.autograd and torch.optim; the entry point
    "new",  # of the command
}  # fmt: skip
"""Names of plugin contracts and of methods that a library calls."""

OPERATIONS = {
    "rms_norm",
    "expit",
    "mul_",
    "forward_backward",
    "all_reduce",
    "all_gather_object",
    "rendezvous",
    "isend",
    "recv",
    "new_group",
}
"""Operations of the literature, by the names that torch and scipy give them."""

BANNED = {
    r"mend(s|ed|ing)?": "fix",
    r"tells?(?! .{0,20}apart)|told": "report, print, record",
    r"said": "reported; `message`",
    r"anew": "again, new",
    r"lent": "filler",
    r"nobody|anybody": "no process, no user",
    r"by heart": "memorised",
    r"made again|goes? on with": "repeat, resume",
    r"held against": "compared with",
    r"on its way": "then",
    r"speaks? (of|from)": "threshold, refers to",
    r"nats of": "token losses",
}
"""Words of a private dialect in docstrings and messages, with the terms that replace them."""
ANY_BANNED = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)


def iter_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(qualified name, node) of module functions and methods; properties, nested functions and kernels left out."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                if not re.search(r"property|setter|triton\.jit", decorators):
                    yield f"{prefix}{node.name}", node

    yield from visit(tree.body, "")


def begins_with_verb(name: str) -> bool:
    bare = name.strip("_")
    first = bare.split("_")[0]
    return first in VERBS | PREFIXES or any(bare.startswith(f"{verb}_") for verb in VERBS if "_" in verb)


def iter_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings and messages: strings of more than one word; names in backticks are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, re.sub(r"`[^`]*`|>>> .*", "", node.value)


def test_functions_begin_with_a_verb():
    allowed = CONTRACTS | OPERATIONS
    wrong = [
        f"{FILES[name]}:{node.lineno}: {function} does not begin with a verb"
        for name in FILES
        for function, node in iter_functions(parse_file(name))
        for last in [function.rpartition(".")[2]]
        if not (last.startswith("__") or last in allowed or begins_with_verb(last))
    ]
    assert wrong == []


def test_exceptions_end_in_error():
    """Known by their base: a class whose base is an Error or Exception; warnings and signals are none."""
    for name in FILES:
        for node in ast.walk(parse_file(name)):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                if any(re.search(r"(Error|Exception|KeyboardInterrupt)$", base) for base in bases):
                    assert node.name.endswith("Error"), f"{FILES[name]}:{node.lineno}: {node.name}"


def test_one_public_name_in_one_module():
    """Plugins of a kind share their contract's names, and programs their `main`."""
    places: dict[str, list[str]] = defaultdict(list)
    for name in FILES:
        if name.startswith(tuple(f"{package}." for package in KINDS.values())):
            continue
        for node in parse_file(name).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    del places["main"]
    assert {public: names for public, names in places.items() if len(names) > 1} == {}


def test_docstrings_and_messages_use_the_field_s_terms():
    found = [
        f"{FILES[name]}:{line}: {match[0]!r} -> {BANNED[word]}"
        for name in FILES
        if not name.startswith("fivetune.data.corpus")  # its corpora are stories
        for line, text in iter_texts(parse_file(name))
        if ANY_BANNED.search(text)
        for word in BANNED
        for match in re.finditer(rf"\b({word})\b", text, re.IGNORECASE)
    ]
    assert found == []


def test_a_name_is_judged_by_its_first_word():
    good = ("write_checkpoint", "_is_best", "all_reduce_sum", "from_json")
    assert all(map(begins_with_verb, good)) and not any(map(begins_with_verb, ("told", "_kept", "best_eval", "alone")))
