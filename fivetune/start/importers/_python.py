"""Values in Python source, read from its syntax tree; nothing is executed.

In: a script, or a notebook, whose cells are joined without their magic lines. Out: what an expression is: a literal, a
text over columns of the data, data of a file or of the hub, or Computed, which is an expression that is not known.
Names are followed through assignments, arguments of the only call of a function, defaults of argparse and fields.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple, cast

from fivetune.errors import ConfigError
from fivetune.start.importers import NOT_PYTHON, Argument, Computed, RawConfig
from fivetune.types import JsonValue

PANDAS_READERS = {"read_csv", "read_table", "read_json", "read_parquet", "read_excel"}
HUB_READERS = {"load_dataset", "load_from_disk"}
FORMATS = {"csv", "json", "parquet", "text", "pandas"}  # of `load_dataset`, whose files follow
WRAPPERS = {"from_pandas", "from_csv", "from_json", "from_dict", "DataFrame"}  # of the data that they are given
ITERATIONS = {"iterrows", "itertuples", "items"}
SAME_TEXT = {"strip", "lstrip", "rstrip", "str", "join", "split", "lower", "tolist", "to_list", "replace", "list"}
TEXT_METHODS = {"join", "split", "rsplit", "lower", "replace", "strip", "get"}
TABLES = {"dict", "Namespace", "SimpleNamespace", "EasyDict", "AttrDict", "create", "vars"}
TYPES: dict[str, Callable[[Any], object]] = {"int": int, "float": float, "str": str, "bool": bool}
ENUMERATIONS = {"SchedulerType", "IntervalStrategy", "EvaluationStrategy", "OptimizerNames", "HubStrategy"}
PARSERS = {"parse_args", "parse_known_args", "parse_args_into_dataclasses"}
OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
TIMERS = {"time", "timeit", "capture", "prun"}  # magics of IPython before a cell of Python
MARKED = re.compile(r"\s*([!%?]|[\w, ]+=\s*[!%]|[\w.]+\?+\s*$)")  # commands of IPython and its shell
SHELL = "pip3?|conda|mamba|apt|apt-get|cd|ls|cp|mv|rm|mkdir|cat|pwd|git|wget|curl|unzip|tar|nvidia-smi|python3?|wandb"
COMMAND = re.compile(rf"{MARKED.pattern}|\s*({SHELL})(\s+[^\s=(]|\s*$)")  # `pip install` is read without a mark, too
MAX_DEPTH = 60  # of expressions inside expressions, names followed included
MAX_NUMBER = 1e9
MAX_POWER = 64
UNKNOWN = Computed("...")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
NOT_PARSED = (SyntaxError, ValueError, RecursionError, MemoryError)
NOT_READ = (ArithmeticError, TypeError, ValueError, AttributeError, LookupError, RecursionError)


class Column(NamedTuple):
    """A column of the data; a dotted name is nested."""

    name: str


class Text(NamedTuple):
    """A text over columns: literal parts and columns."""

    parts: tuple[str | Column, ...]


class Row(NamedTuple):
    """A record, or anything else whose attributes and entries are columns."""


class Zip(NamedTuple):
    """Several things of which loops take one element at a time."""

    members: tuple[object, ...]


class Instance(NamedTuple):
    """An object of a class of the source."""

    name: str


class Data(NamedTuple):
    """Records of files or of the hub.

    Args:
        files: split -> file or files; "" for one that has no splits. hub: org/name:config, instead of files.
        split: the chosen split. half: "train" or "test" after a random division. share: of "test" in it.
    """

    files: Mapping[str, Any]
    hub: str = ""
    split: str = ""
    half: str = ""
    share: float | None = None


class _Binding(NamedTuple):
    """One value that a name gets: an expression, the steps to its part ("each", or an index), and its place.

    Args:
        conditions: the tests of the branches around it, and what they have to be.
    """

    node: ast.expr
    steps: tuple[str | int, ...]
    position: tuple[int, int]
    conditions: tuple[tuple[ast.expr, bool], ...]


@dataclass(slots=True, eq=False)
class _Scope:
    """Names of a module, function, class or comprehension."""

    node: ast.AST
    parent: _Scope | None
    names: dict[str, list[_Binding]] = field(default_factory=dict[str, list[_Binding]])

    def find_class(self) -> str:
        """Name of the class around; "" for none."""
        if isinstance(self.node, ast.ClassDef):
            return self.node.name
        return self.parent.find_class() if self.parent else ""


@dataclass(slots=True)
class PythonSource:
    """The syntax tree of a source, and the names in it.

    Args:
        skipped: commands and cells of a notebook that are not Python, with their places -> why they are not read.
        calls: all calls, in the order of the text. options: of the command line, by name, with their defaults.
        attributes: text such as `args.lr` -> expressions assigned to it; of `self`, the name of the class before.
        appended: name of a list -> expressions that are appended to it. known: values of expressions.
    """

    name: str
    tree: ast.Module
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    scopes: dict[ast.AST, _Scope] = field(default_factory=dict[ast.AST, _Scope])
    calls: list[ast.Call] = field(default_factory=list[ast.Call])
    functions: dict[str, Function] = field(default_factory=dict[str, Function])
    classes: dict[str, ast.ClassDef] = field(default_factory=dict[str, ast.ClassDef])
    attributes: dict[str, list[ast.expr]] = field(default_factory=dict[str, list[ast.expr]])
    appended: dict[str, list[ast.expr]] = field(default_factory=dict[str, list[ast.expr]])
    options: dict[str, Argument] = field(default_factory=dict[str, Argument])
    known: dict[ast.expr, object] = field(default_factory=dict[ast.expr, object])
    depth: int = 0

    def find_calls(self, pattern: str) -> list[ast.Call]:
        """Find the calls whose function ends in a name that matches a pattern, in the order of the text.

        >>> len(parse_python(RawConfig("a.py", "model.train(x)\\nT5Model('t5')")).find_calls("T5Model|fit"))
        1
        """
        return [call for call in self.calls if re.fullmatch(pattern, get_last_name(call.func))]

    def list_scopes(self) -> list[_Scope]:
        """The scopes, each once, in the order of the text."""
        return list(dict.fromkeys(self.scopes.values()))

    def list_numbers(self) -> dict[str, Argument]:
        """The numbers that names, attributes and entries of tables get, with their lines; the last of each."""
        given: dict[str, ast.expr] = {}
        for scope in self.list_scopes():
            given |= {name: found[-1].node for name, found in scope.names.items() if not found[-1].steps}
        given |= {written: values[-1] for written, values in self.attributes.items()}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                given |= {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
        read = {name: self.read_argument(node) for name, node in given.items()}
        return {name: one for name, one in read.items() if type(one.value) in (int, float)}

    def read_value(self, node: ast.expr) -> JsonValue | Computed:
        """Read a literal or a file of data; Computed for other expressions."""
        value = self.evaluate(node)
        if isinstance(value, Data):
            value = name_split(value)
        if isinstance(value, PurePath):
            return str(value)
        if is_unknown(value) or value is ...:
            return Computed(ast.unparse(self._resolve_name(node)))
        return cast("JsonValue", value)

    def read_argument(self, node: ast.expr) -> Argument:
        """Read a value with its line."""
        return Argument(self.read_value(node), f"line {node.lineno}")

    def read_call(self, call: ast.Call, positional: tuple[str, ...] = ()) -> dict[str, Argument]:
        """Read the arguments of a call; `positional` names those without a keyword. `**table` gives its entries."""
        found = {name: self.read_argument(node) for name, node in zip(positional, call.args, strict=False)}
        for one in call.keywords:
            if one.arg is None:
                found |= self.read_table(one.value) or {"**": Argument(Computed(ast.unparse(one.value)))}
            else:
                found[one.arg] = self.read_argument(one.value)
        return found

    def read_table(self, node: ast.expr) -> dict[str, Argument]:
        """Read a table of arguments: a dict, a call with keywords, or a name of either with its attributes."""
        found: dict[str, Argument] = {}
        target = self._resolve_name(node)
        if isinstance(target, ast.Dict):
            for key, value in zip(target.keys, target.values, strict=True):
                found |= self.read_table(value) if key is None else {str(self.evaluate(key)): self.read_argument(value)}
        elif isinstance(target, ast.Call) and get_last_name(target.func) not in PARSERS:
            found = self.read_call(target)
        elif isinstance(table := self.evaluate(node), dict):
            for key, value in cast("dict[str, JsonValue]", table).items():
                found[key] = Argument(
                    Computed(key) if is_unknown(value) or value is ... else value, f"line {node.lineno}"
                )
        owner = f"{ast.unparse(node)}."
        for attribute, values in self.attributes.items():
            if attribute.startswith(owner):
                found[attribute.removeprefix(owner)] = self.read_argument(values[-1])
        return found

    def _resolve_name(self, node: ast.expr) -> ast.expr:
        """Follow a name to the expression that it stands for."""
        for _ in range(MAX_DEPTH):
            binding = self._find_binding(node) if isinstance(node, ast.Name) else None
            if binding is None or binding.steps:
                break
            node = binding.node
        return node

    def evaluate(self, node: ast.expr | None) -> object:
        """Find what an expression is; Computed for one that is known only when the program runs."""
        if node is None:
            return None
        if node in self.known:
            return self.known[node]
        if self.depth > MAX_DEPTH:
            return UNKNOWN
        self.depth += 1
        self.known[node] = UNKNOWN  # of an expression that depends on itself
        try:
            value = self._evaluate(node)
        except NOT_READ:
            value = UNKNOWN
        finally:
            self.depth -= 1
        self.known[node] = Computed(ast.unparse(node)) if value is UNKNOWN else value
        return self.known[node]

    def _evaluate_literal(self, node: ast.expr) -> Any:
        """Return a literal. Raises LookupError for another expression."""
        value = self.evaluate(node)
        if is_unknown(value):
            raise LookupError(node)
        return value

    def _evaluate(self, node: ast.expr) -> object:
        """Find what an expression is. Raises one of NOT_READ, or returns UNKNOWN, for one that is not known."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._evaluate_name(node)
            case ast.JoinedStr():
                return join_texts([self.evaluate(part) for part in node.values])
            case ast.FormattedValue():
                value = self.evaluate(node.value)
                return value if is_unknown(value) or node.format_spec else str(value)
            case ast.List(elts=[one]) if isinstance(self.evaluate(one), Text):
                return self.evaluate(one)  # a batch of one text
            case ast.List():
                return [self._evaluate_literal(one) for one in node.elts]
            case ast.Tuple():
                return tuple(self.evaluate(one) for one in node.elts)
            case ast.Dict():
                return self._evaluate_dict(node)
            case ast.Attribute():
                return self._evaluate_attribute(node)
            case ast.Subscript():
                return self._take(self.evaluate(node.value), node.slice)
            case ast.BinOp():
                return self._evaluate_operation(node)
            case ast.UnaryOp(op=ast.USub()):
                return -self._evaluate_literal(node.operand)
            case ast.UnaryOp(op=ast.Not()):
                return not self._evaluate_literal(node.operand)
            case ast.BoolOp():
                return self._evaluate_choice(node)
            case ast.Compare(ops=[one], comparators=[right]):
                return OPERATORS[type(one)](self._evaluate_literal(node.left), self._evaluate_literal(right))
            case ast.IfExp():
                return self._evaluate_condition(node)
            case ast.ListComp() | ast.GeneratorExp():
                return self.evaluate(node.elt)
            case ast.Call():
                return self._evaluate_call(node)
            case _:
                return UNKNOWN

    def _evaluate_dict(self, node: ast.Dict) -> object:
        found: dict[object, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                found |= self._evaluate_literal(value)
            else:
                found[self.evaluate(key)] = self.evaluate(value)
        return found

    def _evaluate_operation(self, node: ast.BinOp) -> object:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        if isinstance(node.op, ast.Add) and (isinstance(left, Text) or isinstance(right, Text)):
            return join_texts([left, right])
        if isinstance(node.op, ast.Mod) and isinstance(left, str):
            return fill_text(re.split(r"%[sd]", left), right if isinstance(right, tuple) else (right,))
        if isinstance(left, int | float) and isinstance(right, int | float):
            limit = MAX_POWER if isinstance(node.op, ast.Pow) else MAX_NUMBER
            return UNKNOWN if max(abs(left), abs(right)) > limit else OPERATORS[type(node.op)](left, right)
        if isinstance(node.op, ast.Mult):
            return UNKNOWN  # a long text or list
        return OPERATORS[type(node.op)](self._evaluate_literal(node.left), self._evaluate_literal(node.right))

    def _evaluate_choice(self, node: ast.BoolOp) -> object:
        value: object = None
        for one in node.values:
            value = self.evaluate(one)
            if is_unknown(value) or bool(value) is isinstance(node.op, ast.Or):
                break
        return UNKNOWN if isinstance(value, Row) else value

    def _evaluate_condition(self, node: ast.IfExp) -> object:
        """The value of the branch that is taken; where that is not known, a text, or the value of both branches."""
        test = self.evaluate(node.test)
        if not is_unknown(test):
            return self.evaluate(node.body if test else node.orelse)
        body, other = self.evaluate(node.body), self.evaluate(node.orelse)
        if isinstance(body, Text) or body == other:
            return body
        return other if isinstance(other, Text) else UNKNOWN

    def _evaluate_name(self, node: ast.Name) -> object:
        if node.id == "__name__":
            return "__main__"
        binding = self._find_binding(node)
        if binding is None:
            return self._read_class(node.id) if node.id in self.classes else self._evaluate_parameter(node)
        value = self.evaluate(binding.node)
        for step in binding.steps:
            value = _take_step(value, step)
        if value == [] and node.id in self.appended:
            return self.evaluate(self.appended[node.id][0])
        return value

    def _find_binding(self, node: ast.Name) -> _Binding | None:
        """The last assignment before a use, without branches that are not taken; None if it is not known."""
        own = scope = self.scopes.get(node)
        while scope is not None:
            found = scope.names.get(node.id, [])
            if scope is own and not isinstance(scope.node, Comprehension):
                found = [one for one in found if one.position < (node.lineno, node.col_offset)]
            possible = [one for one in found if not self._is_dead(one)]
            if possible:
                last = possible[-1]
                different = {ast.unparse(one.node) for one in possible}
                return None if last.conditions and len(different) > 1 else last
            if found or node.id in _list_parameters(scope.node):
                return None
            scope = scope.parent
        return None

    def _is_dead(self, binding: _Binding) -> bool:
        """Whether a condition of an assignment is known not to hold."""
        for test, wanted in binding.conditions:
            value = self.evaluate(test)
            if not is_unknown(value) and bool(value) is not wanted:
                return True
        return False

    def _evaluate_parameter(self, node: ast.Name) -> object:
        """The value of a function's parameter: by the calls of the function, its default, or a record."""
        scope = self.scopes.get(node)
        while scope is not None and node.id not in _list_parameters(scope.node):
            scope = scope.parent
        if scope is None:
            return UNKNOWN
        values = [self.evaluate(one) for one in self._find_given(scope, node.id)]
        if not values:
            return Row()
        is_same = all(value == values[0] or isinstance(value, Data) for value in values)
        return values[0] if is_same else UNKNOWN

    def _find_given(self, scope: _Scope, name: str) -> list[ast.expr]:
        """Find the expressions that the calls of a function give to a parameter, or its default."""
        arguments = cast("Function", scope.node).args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        called = getattr(scope.node, "name", "")
        defaults: dict[str, ast.expr | None] = dict(zip(names[::-1], arguments.defaults[::-1], strict=False))
        defaults |= {one.arg: value for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
        if scope.parent and isinstance(scope.parent.node, ast.ClassDef):
            names = names[1:]
            called = scope.parent.node.name if called == "__init__" else called
        place = names.index(name) if name in names else len(names)
        calls = self.find_calls(re.escape(called)) if called else []
        given = [get_argument(call, name, place) for call in calls]
        found = [one for one in given if one is not None] or [defaults.get(name)]
        return [one for one in found if one is not None]

    def _evaluate_attribute(self, node: ast.Attribute) -> object:
        written = ast.unparse(node)
        if get_last_name(node.value) in ENUMERATIONS:
            return node.attr.lower()
        value = self.evaluate(node.value)
        is_own = written == f"self.{node.attr}"
        name = f"{self.scopes[node].find_class()}:{written}" if is_own else written
        if name in self.attributes and not isinstance(value, Data):
            return self.evaluate(self.attributes[name][-1])
        if is_own:
            return Row()  # of a base class, or given from outside
        if isinstance(value, Instance):
            name = f"{value.name}:self.{node.attr}"
            return (
                self.evaluate(self.attributes[name][-1])
                if name in self.attributes
                else self._read_class(value.name)[node.attr]
            )
        if isinstance(value, Data | Row):
            is_part = node.attr in ("iloc", "loc", "at", "values", "index", "columns")
            return value if is_part else Text((Column(node.attr),))
        if isinstance(value, Text) and node.attr in ("values", "str", "iloc"):
            return value
        return cast("dict[str, object]", value)[node.attr]

    def _take(self, value: object, part: ast.expr) -> object:
        """Take an entry of a value: a key, an index, a column or a split."""
        key = self.evaluate(part)
        match value, key:
            case Data(), str() if value.share is not None and not value.half and key in ("train", "test"):
                return value._replace(half=key)
            case Data(), str() if key in value.files or (value.hub and not value.split and not value.half):
                return value._replace(split=key)
            case Data() | Row(), str():
                return Text((Column(key),))
            case Text(parts=(Column(name),)), str():
                return Text((Column(f"{name}.{key}"),))
            case Data() | Row() | Text(), _:
                return value  # some of its columns or rows
            case _:
                return cast("Any", value)[key]

    def _read_class(self, name: str) -> dict[str, object]:
        """The fields of a class with their defaults, as a table; dataclasses and classes of constants are such."""
        found: dict[str, object] = {}
        for base in self.classes[name].bases:
            if isinstance(base, ast.Name) and base.id in self.classes and base.id != name:
                found |= self._read_class(base.id)
        for one in self.classes[name].body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found[one.target.id] = self._read_default(one.value) if one.value else Computed(one.target.id)
            elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                found[one.targets[0].id] = self.evaluate(one.value)
        return found | {key: one.value for key, one in self.options.items() if key in found}

    def _read_default(self, node: ast.expr) -> object:
        """The default of a dataclass's field, which may be in a call of `field`."""
        if not isinstance(node, ast.Call) or get_last_name(node.func) not in ("field", "Field"):
            return self.evaluate(node)
        factory = get_argument(node, "default_factory")
        if isinstance(factory, ast.Lambda):
            return self.evaluate(factory.body)
        default = get_argument(node, "default")
        return self.evaluate(default) if default else UNKNOWN

    def _evaluate_call(self, node: ast.Call) -> object:
        name = get_last_name(node.func)
        owner = self.evaluate(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, Data) and name not in ITERATIONS:
            return self._evaluate_method(node, name, owner)
        if name in PANDAS_READERS | HUB_READERS | WRAPPERS | {"train_test_split"}:
            return self._evaluate_data(node, name)
        if name in PARSERS:
            return self._evaluate_parser(name)
        values = [self.evaluate(one) for one in node.args]
        match name, owner, values:
            case (("getenv" | "get"), _, [_, default]) if re.search(r"getenv$|environ\.get$", ast.unparse(node.func)):
                return default
            case "format", str(), _ if not node.keywords:
                return fill_text(re.split(r"\{\d*\}", owner), tuple(values))
            case _, Text(), _ if name in SAME_TEXT:
                return owner
            case _, (str() | None), [Text(), *_] if name in SAME_TEXT:
                return values[0]
            case _, (str() | dict()), _ if name in TEXT_METHODS:
                return getattr(owner, name)(*map(self._evaluate_literal, node.args))
            case (("iterrows"), _, _):
                return Zip((UNKNOWN, Row()))
            case (("itertuples" | "items"), _, _):
                return Row()
            case "zip", _, _:
                return Zip(tuple(values))
            case "enumerate", _, _:
                return Zip((UNKNOWN, *values))
            case (("Path" | "PurePath" | "join"), _, [_, *_]):
                return PurePath(*map(self._evaluate_literal, node.args))
            case _ if name in TYPES:
                return TYPES[name](*map(self._evaluate_literal, node.args))
            case _ if name in TABLES:
                table: dict[str, object] = dict(self._evaluate_literal(node.args[0])) if node.args else {}
                for one in node.keywords:
                    table |= {one.arg: self.evaluate(one.value)} if one.arg else self._evaluate_literal(one.value)
                return table
            case _:
                return self._evaluate_own(node, name)

    def _evaluate_parser(self, name: str) -> object:
        """The arguments of argparse, or the dataclasses of HfArgumentParser."""
        if name == "parse_args_into_dataclasses":
            given = self.find_calls("HfArgumentParser")[0].args[0]
            named = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
            return tuple(self.evaluate(one) for one in named)
        table = {key: one.value for key, one in self.options.items()}
        return (table, []) if name == "parse_known_args" else table

    def _evaluate_own(self, node: ast.Call, name: str) -> object:
        """Objects and functions of the source; a Dataset made from data is that data."""
        if name in self.classes:
            markers = (*self.classes[name].decorator_list, *self.classes[name].bases)
            if any(get_last_name(one) in ("dataclass", "BaseModel") for one in markers):
                return self._read_class(name) | {key: self.evaluate(one) for key, one in get_keywords(node).items()}
            inner = [self.evaluate(one) for one in (*node.args, *get_keywords(node).values())]
            return next((one for one in inner if isinstance(one, Data)), Instance(name))
        function = self.functions.get(name)
        if isinstance(function, ast.FunctionDef) and not isinstance(node.func, ast.Attribute):
            returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
            if len(returned) == 1:
                return self.evaluate(returned[0])
        return UNKNOWN

    def _evaluate_method(self, node: ast.Call, name: str, data: Data) -> Data:
        """The data after one of its methods: divided, or with other rows and columns."""
        if name == "train_test_split":
            share = self.evaluate(get_argument(node, "test_size", 0))
            return data._replace(share=share if isinstance(share, float) else 0.25)
        fraction = self.evaluate(get_argument(node, "frac"))
        if name == "sample" and isinstance(fraction, float) and fraction < 1:
            return data._replace(half="train", share=round(1 - fraction, 6))
        if name == "drop" and node.args and get_last_name(node.args[0]) == "index":
            return data._replace(half="test")
        return data

    def _evaluate_data(self, node: ast.Call, name: str) -> object:
        """Data that a function reads, divides or wraps."""
        if name in HUB_READERS:
            return self._read_dataset(node, name)
        keywords = get_keywords(node)
        first = self.evaluate(node.args[0] if node.args else next(iter(keywords.values()), None))
        if name == "train_test_split" and isinstance(first, Data):
            share = self.evaluate(keywords.get("test_size"))
            share = share if isinstance(share, float) else 0.25
            return tuple(first._replace(half=half, share=share) for half in ("train", "test"))
        if isinstance(first, str | PurePath) and name != "from_dict":
            return Data({"": str(first)})
        return first if isinstance(first, Data) else UNKNOWN

    def _read_dataset(self, node: ast.Call, name: str) -> object:
        """`load_dataset`: files of a format, or a name of the hub with its configuration and split."""
        given = dict(zip(("path", "name"), node.args, strict=False)) | get_keywords(node)
        table = {key: self.evaluate(value) for key, value in given.items()}
        path, config, split, files = (table.get(key) for key in ("path", "name", "split", "data_files"))
        if not isinstance(path, str):
            return UNKNOWN
        if name == "load_from_disk":
            return Data({"": path})
        chosen = re.sub(r"\[.*", "", split) if isinstance(split, str) else ""
        if path not in FORMATS:
            return Data({}, f"{path}:{config if isinstance(config, str) else ''}", chosen)
        if isinstance(files, list):
            files = [str(one) for one in cast("list[object]", files)]
        elif isinstance(files, PurePath):
            files = str(files)
        if isinstance(files, str | list):
            files = {"train" if split else "": files}
        return Data(cast("dict[str, Any]", files), split=chosen) if isinstance(files, dict) else UNKNOWN


def is_unknown(value: object) -> bool:
    """Whether a value is not a literal."""
    return isinstance(value, Computed | Text | Row | Zip | Instance | Data)


def _take_step(value: object, step: str | int) -> object:
    """The part of a value that an assignment to several names, or a loop, takes."""
    match value:
        case Zip() if step == "each":
            return value.members
        case Text() if step == "each":
            return value
        case Data() | Row() if step == "each":
            return Row()
        case list() | tuple() if isinstance(step, int) and not is_unknown(value):
            return cast("tuple[object, ...]", value)[step]
        case _:
            return UNKNOWN


def join_texts(values: list[object]) -> object:
    """Join texts, of which some have columns. Raises LookupError for anything else.

    >>> join_texts(["a: ", Text((Column("b"),))])
    Text(parts=('a: ', Column(name='b')))
    """
    parts: list[str | Column] = []
    for value in values:
        if isinstance(value, Text):
            parts += value.parts
        elif isinstance(value, str):
            parts.append(value)
        else:
            raise LookupError(value)
    has_columns = any(isinstance(part, Column) for part in parts)
    return Text(tuple(parts)) if has_columns else "".join(cast("list[str]", parts))


def fill_text(literals: list[str], values: tuple[object, ...]) -> object:
    """Put values between literal parts. Raises LookupError where their number is another."""
    if len(literals) != len(values) + 1:
        raise LookupError(values)
    texts: list[object] = [literals[0]]
    for value, literal in zip(values, literals[1:], strict=True):
        texts += [str(value) if isinstance(value, int | float | PurePath) else value, literal]
    return join_texts(texts)


def name_split(data: Data) -> JsonValue | Computed:
    """The setting of data: the file, or org/name:config:split; Computed where the split is not named.

    >>> name_split(Data({"": "a.csv"})), name_split(Data({}, "org/name:", "train"))
    ('a.csv', 'org/name::train')
    """
    if data.hub:
        return f"{data.hub}:{data.split or 'train'}"
    files = list(data.files.values())
    return data.files.get(data.split, files[0] if len(files) == 1 else Computed("a split"))


def get_last_name(node: ast.AST) -> str:
    """The last part of a dotted name, also of one that is called."""
    if isinstance(node, ast.Call):
        return get_last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def get_keywords(call: ast.Call) -> dict[str, ast.expr]:
    """The arguments of a call that have a keyword."""
    return {one.arg: one.value for one in call.keywords if one.arg}


def get_argument(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """The argument of a call by keyword or place; None for one that is not given."""
    positional = call.args[place] if place is not None and place < len(call.args) else None
    return get_keywords(call).get(name, positional)


def _list_parameters(node: ast.AST) -> list[str]:
    """The parameters of a function; of another node none."""
    if not isinstance(node, Function):
        return []
    return [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def parse_python(source: RawConfig, given: Mapping[str, JsonValue | Computed] | None = None) -> PythonSource:
    """Parse a script or notebook, whose cells that are not Python are left out. Raises ConfigError with the line for a
    script that is not Python.

    Args:
        given: options of the command line that starts the script, which win over their defaults.
    """
    skipped: dict[str, str] = {}
    if source.name.endswith(".ipynb"):
        text = _join_cells(source, skipped)
    else:
        text = source.text if _is_python(source.text) else _replace_commands(source.text, source.name, skipped)
    try:
        tree = ast.parse(text)
    except NOT_PARSED as error:
        line, reason = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
        raise ConfigError(f"{source.name}:{line}: not valid Python: {reason}. Correct it.") from None
    found = PythonSource(source.name, tree, skipped)
    _Reader(found).visit(tree)
    found.calls.sort(key=_get_position)
    for call in found.find_calls("add_argument"):
        _add_option(found, call)
    found.options |= {name: Argument(value) for name, value in (given or {}).items()}
    return found


def _get_position(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _add_option(found: PythonSource, call: ast.Call) -> None:
    """Read the default of an option of argparse."""
    flags = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if not flags:
        return
    keywords = get_keywords(call)
    longest = next((flag for flag in flags if flag.startswith("--")), flags[0])
    name = str(found.evaluate(keywords.get("dest")) or longest.lstrip("-").replace("-", "_"))
    action = found.evaluate(keywords.get("action"))
    value = found.read_value(keywords["default"]) if "default" in keywords else None
    if value is None and action in ("store_true", "store_false"):
        value = action == "store_false"
    if found.evaluate(keywords.get("required")):
        value = Computed(f"--{name}, which the command line gives")
    found.options[name] = Argument(value, f"line {call.lineno}")


class _Reader(ast.NodeVisitor):
    """Collects names, calls and scopes of a syntax tree."""

    def __init__(self, found: PythonSource) -> None:
        self.found, self.scope = found, _Scope(found.tree, None)
        self.conditions: tuple[tuple[ast.expr, bool], ...] = ()

    def visit(self, node: ast.AST) -> None:
        self.found.scopes[node] = self.scope
        match node:
            case ast.ClassDef():
                self.found.classes[node.name] = node
                self._visit_all([*node.decorator_list, *node.bases])
                self._visit_inside(node, node.body)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.found.functions[node.name] = node
                self._visit_all([*node.decorator_list, *_list_defaults(node)])
                self._visit_inside(node, node.body)
            case ast.Lambda():
                self._visit_all(_list_defaults(node))
                self._visit_inside(node, [node.body])
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._visit_comprehension(node)
            case ast.If():
                self.visit(node.test)
                self._visit_branch(node.body, node.test, True)
                self._visit_branch(node.orelse, node.test, False)
            case _:
                self._collect(node)
                self.generic_visit(node)

    def _visit_all(self, nodes: list[Any]) -> None:
        for one in nodes:
            self.visit(one)

    def _visit_inside(self, node: ast.AST, body: list[Any]) -> None:
        outer, self.scope = self.scope, _Scope(node, self.scope)
        conditions, self.conditions = self.conditions, ()
        self._visit_all(body)
        self.scope, self.conditions = outer, conditions

    def _visit_branch(self, body: list[ast.stmt], test: ast.expr, wanted: bool) -> None:
        before, self.conditions = self.conditions, (*self.conditions, (test, wanted))
        self._visit_all(body)
        self.conditions = before

    def _visit_comprehension(self, node: Comprehension) -> None:
        outer, self.scope = self.scope, _Scope(node, self.scope)
        for one in node.generators:
            self.visit(one.iter)
            self._bind(one.target, one.iter, ("each",))
            self._visit_all(one.ifs)
        self._visit_all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self.scope = outer

    def _collect(self, node: ast.AST) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value, ())
            case ast.AnnAssign(value=ast.expr() as value):
                self._bind(node.target, value, ())
            case ast.AugAssign(target=ast.Name() as target):
                before = ast.copy_location(ast.Name(target.id, ast.Load()), node)
                added = ast.copy_location(ast.BinOp(before, node.op, node.value), node)
                self.found.scopes |= {before: self.scope, added: self.scope}
                self._bind(target, added, ())
            case ast.For():
                self._bind(node.target, node.iter, ("each",))
            case ast.Call():
                self.found.calls.append(node)
                function = node.func
                if isinstance(function, ast.Attribute) and function.attr == "append" and node.args:
                    self.found.appended.setdefault(ast.unparse(function.value), []).append(node.args[0])
            case _:
                pass

    def _bind(self, target: ast.expr, value: ast.expr, steps: tuple[str | int, ...]) -> None:
        """Bind a name, each name of several, or an attribute to a value."""
        if isinstance(target, ast.Name):
            position = (value.end_lineno or value.lineno, value.end_col_offset or 0)
            binding = _Binding(value, steps, position, self.conditions)
            self.scope.names.setdefault(target.id, []).append(binding)
        elif isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple) and not steps else []
            if len(values) == len(target.elts):
                for inner, own in zip(target.elts, values, strict=True):
                    self._bind(inner, own, ())
                return
            for place, inner in enumerate(target.elts):
                self._bind(inner, value, (*steps, place))
        elif isinstance(target, ast.Attribute) and not steps:
            written = ast.unparse(target)
            if written.startswith("self."):
                written = f"{self.scope.find_class()}:{written}"
            self.found.attributes.setdefault(written, []).append(value)


def _list_defaults(function: Function) -> list[ast.expr]:
    """The defaults of parameters, which are values of the scope around."""
    return [one for one in (*function.args.defaults, *function.args.kw_defaults) if one]


def _join_cells(source: RawConfig, skipped: dict[str, str]) -> str:
    """The code cells of a notebook, one after the other; what is not Python is blank, and named in `skipped`."""
    try:
        cells = json.loads(source.text)["cells"]
        code = {number: "".join(cell["source"]) for number, cell in enumerate(cells, 1) if cell["cell_type"] == "code"}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{source.name}: not a notebook of Jupyter (format 4). Give the code as a .py file."
        ) from None
    return "\n".join(_read_cell(text, number, skipped) for number, text in code.items())


def _read_cell(text: str, number: int, skipped: dict[str, str]) -> str:
    """The Python of a cell, line by line."""
    magic = re.match(r"\s*%%(\w*)", text)
    if magic and magic[1] in TIMERS:
        text = text.replace("%%", "#", 1)
    elif magic:
        skipped[f"{text.strip().splitlines()[0]} (cell {number})"] = "the cell is not Python, and is not read"
        return "\n" * text.count("\n")
    if _is_python(text):
        return text
    found = _replace_commands(text, f"cell {number}", skipped)
    try:
        ast.parse(found)
    except NOT_PARSED as error:
        line, reason = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
        wrong = [*text.splitlines(), ""][min(line, len(text.splitlines())) - 1].strip()
        skipped[f"{wrong} (cell {number}, its line {line})"] = f"{NOT_PYTHON}, {reason}: the whole cell is not read"
        return "\n" * text.count("\n")
    return found


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except NOT_PARSED:
        return False
    return True


def _replace_commands(text: str, place: str, skipped: dict[str, str]) -> str:
    """Put `pass` in place of the commands of IPython and of its shell; those without a mark are named in `skipped`."""
    lines = text.splitlines()
    is_continued = False
    for i, line in enumerate(lines):
        if not is_continued and not COMMAND.match(line):
            continue
        if is_continued:
            lines[i] = ""
            is_continued = line.rstrip().endswith("\\")
            continue
        if not MARKED.match(line):
            skipped[f"{line.strip()} ({place}, its line {i + 1})"] = "a command of the shell, not Python: not read"
        is_continued = line.rstrip().endswith("\\")
        target = re.match(r"(\s*[\w, ]+=)\s*[!%]", line)
        lines[i] = f"{target[1]} ..." if target else re.sub(r"\S.*", "pass", line)
    return "\n".join(lines)
