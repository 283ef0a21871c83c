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
from fivetune.importers import Argument, Computed, RawConfig
from fivetune.types import JsonValue

PANDAS_READERS = {"read_csv", "read_table", "read_json", "read_parquet", "read_excel"}
HUB_READERS = {"load_dataset", "load_from_disk"}
SAME_DATA = {  # methods and wrappers that return the data that they are given, with other columns or other rows
    "map", "remove_columns", "rename_column", "rename_columns", "shuffle", "filter", "with_format", "set_format",
    "cast_column", "flatten", "sort", "reset_index", "dropna", "drop_duplicates", "fillna", "copy", "rename", "astype",
    "drop", "from_pandas", "from_csv", "from_json", "from_dict", "DataFrame", "to_pandas", "head", "to_dict", "tolist",
}  # fmt: skip
SAME_TEXT = {"strip", "lstrip", "rstrip", "str", "join", "split", "lower", "tolist", "to_list", "replace", "list"}
ENUMERATIONS = {"SchedulerType", "IntervalStrategy", "EvaluationStrategy", "OptimizerNames", "HubStrategy"}
PARSERS = {"parse_args", "parse_known_args", "parse_args_into_dataclasses"}
OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.Gt: operator.gt, ast.LtE: operator.le, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip
MAX_DEPTH = 60  # of expressions inside expressions, names followed included
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


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
    """One value that a name gets: an expression and the steps to its part ("each", or an index)."""

    node: ast.expr
    steps: tuple[str | int, ...]
    position: tuple[int, int]
    conditions: tuple[tuple[ast.expr, bool], ...]
    is_certain: bool


@dataclass(slots=True)
class _Scope:
    """Names of a module, function, class or comprehension."""

    node: ast.AST
    parent: _Scope | None
    names: dict[str, list[_Binding]] = field(default_factory=dict[str, list[_Binding]])


@dataclass(slots=True)
class PythonSource:
    """The syntax tree of a source, and the names in it.

    Args:
        calls: all calls, in the order of the text. options: of the command line, by name, with their defaults.
        methods: class -> its functions. attributes: text such as `args.lr` -> expressions assigned to it.
        appended: name of a list -> expressions that are appended to it.
    """

    name: str
    tree: ast.Module
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

    def read_value(self, node: ast.expr) -> JsonValue | Computed:
        """Read a literal or a file of data; Computed for other expressions."""
        value = self.evaluate(node)
        if isinstance(value, Data):
            value = name_split(value)
        if isinstance(value, PurePath):
            value = str(value)
        if isinstance(value, Text | Row | Zip | Instance | Computed) or value is ...:
            return Computed(ast.unparse(self._resolve_name(node)))
        return cast("JsonValue", value)

    def read_call(self, call: ast.Call, positional: tuple[str, ...] = ()) -> dict[str, Argument]:
        """Read the arguments of a call; `positional` names those without a keyword. `**table` gives its entries."""
        pairs: list[tuple[str, ast.expr]] = [*zip(positional, call.args, strict=False)]
        found = {name: Argument(self.read_value(node), f"line {node.lineno}") for name, node in pairs}
        for one in call.keywords:
            if one.arg is None:
                found |= self.read_table(one.value) or {"**": Argument(Computed(ast.unparse(one.value)))}
            else:
                found[one.arg] = Argument(self.read_value(one.value), f"line {one.value.lineno}")
        return found

    def read_table(self, node: ast.expr) -> dict[str, Argument]:
        """Read a table of arguments: a dict, a call with keywords, or a name of either with its attributes."""
        found: dict[str, Argument] = {}
        name = ast.unparse(node)
        target = self._resolve_name(node)
        if isinstance(target, ast.Call) and get_last_name(target.func) not in PARSERS:
            found = self.read_call(target)
        elif isinstance(value := self.evaluate(node), dict):
            lines = _list_lines(target)
            for key, one in cast("dict[str, object]", value).items():
                known = not isinstance(one, Text | Row | Zip | Instance | Data | Computed) and one is not ...
                where = f"line {lines.get(key, node.lineno)}"
                found[str(key)] = Argument(cast("JsonValue", one) if known else Computed("..."), where)
        for attribute, values in self.attributes.items():
            if attribute.startswith(f"{name}."):
                where = f"line {values[-1].lineno}"
                found[attribute.removeprefix(f"{name}.")] = Argument(self.read_value(values[-1]), where)
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
            return Computed("...")
        self.depth += 1
        self.known[node] = Computed("...")  # of an expression that depends on itself
        try:
            value = self._evaluate(node)
        except (ArithmeticError, TypeError, ValueError, AttributeError, LookupError, MemoryError, RecursionError):
            value = Computed(ast.unparse(node))
        finally:
            self.depth -= 1
        self.known[node] = value
        return value

    def _evaluate(self, node: ast.expr) -> object:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._evaluate_name(node)
            case ast.JoinedStr():
                return join_texts([self.evaluate(part) for part in node.values])
            case ast.FormattedValue():
                value = self.evaluate(node.value)
                is_plain = isinstance(value, str | int | float | PurePath) and node.format_spec is None
                return str(value) if is_plain else value
            case ast.List() | ast.Tuple():
                return self._evaluate_list(node)
            case ast.Dict():
                return self._evaluate_dict(node)
            case ast.Attribute():
                return self._evaluate_attribute(node)
            case ast.Subscript():
                return self._take(self.evaluate(node.value), node.slice)
            case ast.BinOp():
                return self._evaluate_operation(node)
            case ast.UnaryOp(op=ast.USub()):
                return -cast("Any", self.evaluate(node.operand))
            case ast.UnaryOp(op=ast.Not()):
                value = self.evaluate(node.operand)
                return Computed(ast.unparse(node)) if is_unknown(value) else not value
            case ast.BoolOp():
                return self._evaluate_choice(node)
            case ast.Compare(ops=[one], comparators=[right]):
                values = (self.evaluate(node.left), self.evaluate(right))
                return Computed(ast.unparse(node)) if any(map(is_unknown, values)) else OPERATORS[type(one)](*values)
            case ast.IfExp():
                test = self.evaluate(node.test)
                if is_unknown(test):
                    values = self.evaluate(node.body), self.evaluate(node.orelse)
                    texts = [value for value in values if isinstance(value, Text)]
                    return texts[0] if texts else values[0] if values[0] == values[1] else Computed(ast.unparse(node))
                return self.evaluate(node.body if test else node.orelse)
            case ast.ListComp() | ast.GeneratorExp():
                return self.evaluate(node.elt)
            case ast.Call():
                return self._evaluate_call(node)
            case _:
                return Computed(ast.unparse(node))

    def _evaluate_list(self, node: ast.List | ast.Tuple) -> object:
        if isinstance(node, ast.List) and len(node.elts) == 1 and isinstance(self.evaluate(node.elts[0]), Text):
            return self.evaluate(node.elts[0])  # a batch of one text
        values = [self.evaluate(one) for one in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(values)
        unknown = any(isinstance(value, Computed | Instance) for value in values)
        return Computed(ast.unparse(node)) if unknown else values

    def _evaluate_dict(self, node: ast.Dict) -> object:
        found: dict[object, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.evaluate(value)
            if key is None:
                found |= cast("dict[object, object]", inner) if isinstance(inner, dict) else {"**": inner}
            else:
                found[self.evaluate(key)] = inner
        return found

    def _evaluate_operation(self, node: ast.BinOp) -> object:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        if isinstance(node.op, ast.Add) and (isinstance(left, Text) or isinstance(right, Text)):
            return join_texts([left, right])
        if isinstance(node.op, ast.Mod) and isinstance(left, str):
            values = list(right) if isinstance(right, tuple) else [right]
            return fill_text(re.split(r"%[sd]", left), values)
        if isinstance(node.op, ast.Div) and isinstance(left, PurePath):
            return left / str(right)
        if any(isinstance(one, int | float) and abs(one) > 1e9 for one in (left, right)):
            return Computed(ast.unparse(node))
        if is_unknown(left) or is_unknown(right):
            return Computed(ast.unparse(node))
        if isinstance(node.op, ast.Pow):
            return cast("Any", left) ** cast("Any", right) if abs(cast("int", right)) < 64 else Computed("**")
        return OPERATORS[type(node.op)](left, right)

    def _evaluate_choice(self, node: ast.BoolOp) -> object:
        value: object = None
        for one in node.values:
            value = self.evaluate(one)
            if is_unknown(value) or bool(value) is isinstance(node.op, ast.Or):
                break
        return Computed(ast.unparse(node)) if isinstance(value, Row) else value

    def _evaluate_name(self, node: ast.Name) -> object:
        if node.id == "__name__":
            return "__main__"
        binding = self._find_binding(node)
        if binding is None:
            if node.id in self.classes:
                return self._read_class(node.id)
            value = self._evaluate_parameter(node)
            return Computed(node.id) if value is None else value
        value = self.evaluate(binding.node)
        for step in binding.steps:
            value = self._take_step(value, step)
        if value == [] and node.id in self.appended:
            return self.evaluate(self.appended[node.id][0])
        return value

    def _find_binding(self, node: ast.Name) -> _Binding | None:
        """The last assignment before a use, without branches that are not taken; None if it is not known."""
        own = scope = self.scopes.get(node)
        while scope is not None:
            found = scope.names.get(node.id, [])
            if scope is own and not isinstance(scope.node, ast.ListComp | ast.GeneratorExp):
                found = [one for one in found if one.position < (node.lineno, node.col_offset)] or found[:0]
            possible = [one for one in found if not self._is_dead(one)]
            if possible:
                last = possible[-1]
                certain = last.is_certain or len(possible) == 1
                same = {ast.unparse(one.node) for one in possible}
                return last if certain or len(same) == 1 else None
            if found or (isinstance(scope.node, Function) and node.id in _list_parameters(scope.node)):
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
        while scope is not None:
            function = scope.node
            if isinstance(function, Function) and node.id in _list_parameters(function):
                values = [self.evaluate(one) for one in self._find_given(function, scope, node.id)]
                if not values:
                    return Row()
                same = all(value == values[0] or isinstance(value, Data) for value in values)
                return values[0] if same else Computed(node.id)
            scope = scope.parent
        return None

    def _find_given(self, function: Function, scope: _Scope, name: str) -> list[ast.expr]:
        """Find the expressions that the calls of a function give to a parameter, or its default."""
        arguments = function.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        called = getattr(function, "name", "")
        if scope.parent and isinstance(scope.parent.node, ast.ClassDef):
            names = names[1:]
            called = scope.parent.node.name if called == "__init__" else called
        found: list[ast.expr] = []
        for call in self.find_calls(re.escape(called)) if called else ():
            given = next((one.value for one in call.keywords if one.arg == name), None)
            if given is None and name in names and names.index(name) < len(call.args):
                given = call.args[names.index(name)]
            if given is not None:
                found.append(given)
        if not found:
            places: dict[str, ast.expr | None] = dict(zip(names[::-1], arguments.defaults[::-1], strict=False))
            places |= {one.arg: value for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
            default = places.get(name)
            found = [default] if default else []
        return found

    def _evaluate_attribute(self, node: ast.Attribute) -> object:
        written = ast.unparse(node)
        scope = self.scopes.get(node)
        if written.startswith("self.") and scope:
            written = f"{_find_class(scope)}:{written}"
        given = self.attributes.get(written)
        value = self.evaluate(node.value)
        if given and not isinstance(value, Data):
            return self.evaluate(given[-1])
        if written.endswith(f":self.{node.attr}"):
            return Row()  # of a base class, or given from outside
        if get_last_name(node.value) in ENUMERATIONS:
            return node.attr.lower()
        if isinstance(value, dict):
            table = cast("dict[str, object]", value)
            return table[node.attr] if node.attr in table else Computed(written)
        if isinstance(value, Instance):
            given = self.attributes.get(f"{value.name}:self.{node.attr}")
            fields = cast("dict[str, object]", self._read_class(value.name))
            return self.evaluate(given[-1]) if given else fields.get(node.attr, Computed(written))
        if isinstance(value, Data | Row):
            same = {"iloc", "loc", "at", "values", "index", "columns"}
            return value if node.attr in same else Text((Column(node.attr),))
        if isinstance(value, Text) and node.attr in ("values", "str", "iloc"):
            return value
        return Computed(written)

    def _take(self, value: object, part: ast.expr) -> object:
        """Take an entry of a value: a key, an index, a column or a split."""
        key = self.evaluate(part)
        if isinstance(value, Data):
            if isinstance(key, str) and (key in value.files or (not value.half and value.share is not None)):
                return self._take_split(value, key)
            if isinstance(key, str) and value.hub and not value.split and not value.half:
                return value._replace(split=key)
            if isinstance(key, list):
                return value  # some of its columns
            return Text((Column(key),)) if isinstance(key, str) else value
        if isinstance(value, Row):
            return Text((Column(key),)) if isinstance(key, str) else value
        if isinstance(value, Text) and len(value.parts) == 1 and isinstance(value.parts[0], Column):
            return Text((Column(f"{value.parts[0].name}.{key}"),)) if isinstance(key, str) else value
        if isinstance(value, Text):
            return value
        if isinstance(part, ast.Slice):
            return Computed("[:]")
        return cast("Any", value)[key]

    def _take_split(self, value: Data, key: str) -> Data:
        if value.share is not None and not value.half and key in ("train", "test"):
            return value._replace(half=key)
        return value._replace(split=key)

    def _take_step(self, value: object, step: str | int) -> object:
        if step == "each":
            if isinstance(value, Zip):
                return value.members
            return value if isinstance(value, Text) else Row() if isinstance(value, Data | Row) else Computed("each")
        if isinstance(value, dict):  # the dataclasses of HfArgumentParser, by place
            return Computed("part")
        return cast("Any", value)[step] if isinstance(value, list | tuple) else Computed("part")

    def _read_class(self, name: str) -> object:
        """The fields of a class with their defaults, as a table; dataclasses and classes of constants are such."""
        found: dict[str, object] = {}
        for base in self.classes[name].bases:
            if isinstance(base, ast.Name) and base.id in self.classes and base.id != name:
                found |= cast("dict[str, object]", self._read_class(base.id))
        for one in self.classes[name].body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found[one.target.id] = self._read_default(one.value) if one.value else Computed(one.target.id)
            elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                found[one.targets[0].id] = self.evaluate(one.value)
        given = {key: one.value for key, one in self.options.items() if key in found}
        return {**found, **given}

    def _read_default(self, node: ast.expr) -> object:
        """The default of a dataclass's field, which may be in a call of `field`."""
        if isinstance(node, ast.Call) and get_last_name(node.func) in ("field", "Field"):
            named = {one.arg: one.value for one in node.keywords}
            factory = named.get("default_factory")
            if isinstance(factory, ast.Lambda):
                return self.evaluate(factory.body)
            return self.evaluate(named["default"]) if "default" in named else Computed("field")
        return self.evaluate(node)

    def _evaluate_call(self, node: ast.Call) -> object:
        name = get_last_name(node.func)
        owner = self.evaluate(node.func.value) if isinstance(node.func, ast.Attribute) else None
        keywords = {one.arg: one.value for one in node.keywords if one.arg}
        if isinstance(owner, Data) or name in PANDAS_READERS | HUB_READERS | {"train_test_split"} | SAME_DATA:
            found = self._evaluate_data(node, name, owner, keywords)
            if found is not None:
                return found
        values = [self.evaluate(one) for one in node.args]
        if re.search(r"(^|\.)(getenv|environ\.get)$", ast.unparse(node.func)):
            return values[1] if len(values) > 1 else Computed(ast.unparse(node))
        if isinstance(owner, str) and name == "format":
            return fill_text(re.split(r"\{\d*\}", owner), values) if not keywords else Computed(ast.unparse(node))
        if name in SAME_TEXT and isinstance(owner, Text):
            return owner
        if name in SAME_TEXT and isinstance(owner, str | None) and values and isinstance(values[0], Text):
            return values[0]
        if isinstance(owner, str | dict) and name in ("split", "rsplit", "lower", "replace", "strip", "get", "format"):
            return Computed(ast.unparse(node)) if any(map(is_unknown, values)) else getattr(owner, name)(*values)
        if name in ("dict", "Namespace", "SimpleNamespace", "EasyDict", "AttrDict", "create", "vars"):
            base = dict(values[0]) if values and isinstance(values[0], dict) else {}
            for one in node.keywords:
                inner = self.evaluate(one.value)
                base |= cast("Any", inner) if one.arg is None and isinstance(inner, dict) else {one.arg: inner}
            return base
        if name in ("int", "float", "str", "bool") and len(values) == 1 and not is_unknown(values[0]):
            return {"int": int, "float": float, "str": str, "bool": bool}[name](cast("Any", values[0]))
        if name in ("Path", "PurePath", "join") and values and all(isinstance(one, str | PurePath) for one in values):
            return PurePath(*cast("list[str]", values)) if name != "join" or owner is not None else None
        if name in ("zip", "enumerate"):
            return Zip((*([Computed("index")] if name == "enumerate" else []), *values))
        if name in ("iterrows", "itertuples") or (name == "items" and isinstance(owner, Row)):
            return Zip((Computed("index"), Row())) if name == "iterrows" else Row()
        if name in PARSERS:
            return self._evaluate_parser(node, name)
        return self._evaluate_own(node, name, keywords)

    def _evaluate_parser(self, node: ast.Call, name: str) -> object:
        """The arguments of argparse, or the dataclasses of HfArgumentParser."""
        if name == "parse_args_into_dataclasses":
            built = next(iter(self.find_calls("HfArgumentParser")), None)
            given = built.args[0] if built and built.args else node
            named = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
            return tuple(
                self.evaluate(one) if get_last_name(one) in self.classes else Computed("given") for one in named
            )
        table = {key: one.value for key, one in self.options.items()}
        return (table, []) if name == "parse_known_args" else table

    def _evaluate_own(self, node: ast.Call, name: str, keywords: Mapping[str, ast.expr]) -> object:
        """Objects and functions of the source; a Dataset made from data is that data."""
        if name in self.classes:
            if any(get_last_name(one) in ("dataclass", "BaseModel") for one in _list_markers(self.classes[name])):
                given = {key: self.evaluate(value) for key, value in keywords.items()}
                return {**cast("dict[str, object]", self._read_class(name)), **given}
            inner = [self.evaluate(one) for one in (*node.args, *keywords.values())]
            return next((one for one in inner if isinstance(one, Data)), Instance(name))
        function = self.functions.get(name)
        if isinstance(function, ast.FunctionDef) and not isinstance(node.func, ast.Attribute):
            returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
            if len(returned) == 1:
                return self.evaluate(returned[0])
        return Computed(ast.unparse(node))

    def _evaluate_data(self, node: ast.Call, name: str, owner: object, keywords: Mapping[str, ast.expr]) -> object:
        """Data that a call reads, divides or changes; None for other calls."""
        if name in PANDAS_READERS | {"from_csv", "from_json"} and not isinstance(owner, Data):
            first = self.evaluate(node.args[0] if node.args else next(iter(keywords.values())))
            return Data({"": str(first)}) if isinstance(first, str | PurePath) else Computed(ast.unparse(node))
        if name in HUB_READERS:
            return self._read_dataset(node, name, keywords)
        if name == "train_test_split":
            first = owner if isinstance(owner, Data) else self.evaluate(node.args[0])
            share = self.evaluate(keywords.get("test_size") or (node.args[:1] if owner else node.args[1:] or [None])[0])
            share = share if isinstance(share, float) else None
            if not isinstance(first, Data):
                return None
            if isinstance(owner, Data):
                return owner._replace(share=0.25 if share is None else share)
            return tuple(first._replace(half=half, share=share or 0.25) for half in ("train", "test"))
        if isinstance(owner, Data):
            fraction = self.evaluate(keywords.get("frac"))
            if name == "sample" and isinstance(fraction, float) and fraction < 1:
                return owner._replace(half="train", share=round(1 - fraction, 6))
            if name == "drop" and node.args and get_last_name(node.args[0]) == "index":
                return owner._replace(half="test")
            return owner if name in SAME_DATA | {"select", "sample", "batch", "repeat"} else None
        first = self.evaluate(node.args[0]) if node.args else None
        return first if isinstance(first, Data) else None

    def _read_dataset(self, node: ast.Call, name: str, keywords: Mapping[str, ast.expr]) -> object:
        """`load_dataset`: files of a format, or a name of the hub with its configuration and split."""
        positional = dict(zip(("path", "name"), node.args, strict=False))
        given = {key: self.evaluate(value) for key, value in {**positional, **keywords}.items()}
        path, split = given.get("path"), given.get("split")
        if not isinstance(path, str) or name == "load_from_disk":
            return Data({"": str(path)}) if isinstance(path, str) else Computed(ast.unparse(node))
        chosen = re.sub(r"\[.*", "", split) if isinstance(split, str) else ""
        if path in ("csv", "json", "parquet", "text", "pandas"):
            files = given.get("data_files")
            if isinstance(files, str | list | PurePath):
                files = {
                    "train" if split else "": [str(one) for one in files] if isinstance(files, list) else str(files)
                }
            return Data(files, split=chosen) if isinstance(files, dict) else Computed(ast.unparse(node))
        config = given.get("name")
        return Data({}, f"{path}:{config if isinstance(config, str) else ''}", chosen)


def is_unknown(value: object) -> bool:
    """Whether a value is not a literal."""
    return isinstance(value, Computed | Text | Row | Zip | Instance | Data)


def join_texts(values: list[object]) -> object:
    """Join texts, of which some have columns.

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
            return Computed("text")
    return Text(tuple(parts)) if any(isinstance(part, Column) for part in parts) else "".join(cast("list[str]", parts))


def fill_text(literals: list[str], values: list[object]) -> object:
    """Put values between literal parts."""
    if len(literals) != len(values) + 1:
        return Computed("text")
    inner = [str(value) if isinstance(value, int | float | PurePath) else value for value in values]
    return join_texts([one for pair in zip(literals, [*inner, ""], strict=True) for one in pair])


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
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _list_parameters(function: ast.AST) -> list[str]:
    assert isinstance(function, Function)
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _list_markers(node: ast.ClassDef) -> list[ast.expr]:
    return [*node.decorator_list, *node.bases]


def _list_lines(node: ast.expr) -> dict[str, int]:
    """The line of each key of a dict."""
    if not isinstance(node, ast.Dict):
        return {}
    return {one.value: one.lineno for one in node.keys if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def _find_class(scope: _Scope) -> str:
    """Name of the class that a scope is in; "" for none."""
    inner: _Scope | None = scope
    while inner is not None:
        if isinstance(inner.node, ast.ClassDef):
            return inner.node.name
        inner = inner.parent
    return ""


def parse_python(source: RawConfig, given: Mapping[str, JsonValue | Computed] | None = None) -> PythonSource:
    """Parse a script or notebook. Raises ConfigError with the line for text that is not Python.

    Args:
        given: options of the command line that starts the script, which win over their defaults.
    """
    text = _join_cells(source) if source.name.endswith(".ipynb") else source.text
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ConfigError(
            f"{source.name}:{line}: not valid Python: {getattr(error, 'msg', error)}. Correct it."
        ) from None
    found = PythonSource(source.name, tree)
    _Reader(found).visit(tree)
    found.calls.sort(key=lambda call: (call.lineno, call.col_offset))
    for call in found.find_calls("add_argument"):
        _add_option(found, call)
    for name, value in (given or {}).items():
        found.options[name] = Argument(value)
    return found


def _add_option(found: PythonSource, call: ast.Call) -> None:
    """Read the default of an option of argparse."""
    flags = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if not flags:
        return
    keywords = {one.arg: one.value for one in call.keywords}
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
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if isinstance(node, ast.ClassDef):
                    self.found.classes[node.name] = node
                else:
                    self.found.functions[node.name] = node
                for one in (*node.decorator_list, *getattr(node, "bases", ())):
                    self.visit(one)
                self._visit_inside(node, node.body)
            case ast.Lambda():
                self._visit_inside(node, [node.body])
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._visit_comprehension(node)
            case ast.If():
                self.visit(node.test)
                for body, wanted in ((node.body, True), (node.orelse, False)):
                    before, self.conditions = self.conditions, (*self.conditions, (node.test, wanted))
                    self._visit_all(body)
                    self.conditions = before
            case _:
                self._collect(node)
                self.generic_visit(node)

    def _visit_all(self, nodes: list[Any]) -> None:
        for one in nodes:
            self.visit(one)

    def _visit_inside(self, node: Any, body: list[Any]) -> None:
        if hasattr(node, "args"):  # defaults are values of the outer scope
            self._visit_all([one for one in (*node.args.defaults, *node.args.kw_defaults) if one])
        outer, self.scope = self.scope, _Scope(node, self.scope)
        conditions, self.conditions = self.conditions, ()
        self._visit_all(body)
        self.scope, self.conditions = outer, conditions

    def _visit_comprehension(self, node: Any) -> None:
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
                added = ast.BinOp(ast.Name(target.id, ast.Load()), node.op, node.value)
                ast.copy_location(added, node)
                ast.copy_location(added.left, node)
                self.found.scopes[added] = self.found.scopes[added.left] = self.scope
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
        if isinstance(target, ast.Name):
            position = (value.end_lineno or value.lineno, value.end_col_offset or 0)
            binding = _Binding(value, steps, position, self.conditions, not self.conditions)
            self.scope.names.setdefault(target.id, []).append(binding)
        elif isinstance(target, ast.Tuple | ast.List):
            own = value.elts if isinstance(value, ast.Tuple) and not steps else []
            for place, inner in enumerate(target.elts):
                if len(own) == len(target.elts):
                    self._bind(inner, own[place], ())
                else:
                    self._bind(inner, value, (*steps, place))
        elif isinstance(target, ast.Attribute) and not steps:
            written = ast.unparse(target)
            owner = f"{_find_class(self.scope)}:" if written.startswith("self.") else ""
            self.found.attributes.setdefault(f"{owner}{written}", []).append(value)


def _join_cells(source: RawConfig) -> str:
    """The code cells of a notebook; lines with ! and % are those of IPython."""
    try:
        cells = json.loads(source.text)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{source.name}: not a notebook of Jupyter (format 4). Give the code as a .py file."
        ) from None
    code = [one for one in code if not one.lstrip().startswith("%%")]  # cells of another language
    return re.sub(r"^(\s*)[!%].*$", r"\1pass", "\n".join(code), flags=re.MULTILINE)
