"""Values in Python source, read from its syntax tree; nothing is executed.

In: a script, or a notebook. Out: what an expression is: a literal, a text over columns of the data, data of a file or
of the hub, or Computed, which is an expression that is not known. Names are followed through assignments, arguments of
the calls of a function, defaults of argparse and fields of classes.

A text over columns is a string in which a column stands between two characters that no text has. So Python's own
operators join and format texts with columns as they do without.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple, cast

from fivetune.config.aliases import DATASETS
from fivetune.start.importers import Argument, Computed, RawConfig
from fivetune.start.importers._cells import read_code
from fivetune.types import JsonValue

COLUMN = re.compile("\ufdd0(.*?)\ufdd1")  # two code points that Unicode keeps out of all texts
PANDAS_READERS = {"read_csv", "read_table", "read_json", "read_parquet", "read_excel"}
FORMATS = {"csv", "json", "parquet", "text", "pandas"}  # of `load_dataset`, whose files follow
WRAPPERS = {"from_pandas", "from_csv", "from_json", "from_dict", "DataFrame"}  # of the data that they are given
ITERATIONS = {"iterrows", "itertuples", "items"}
SAME_TEXT = {"strip", "lstrip", "rstrip", "str", "join", "split", "lower", "tolist", "to_list", "replace", "list"}
TEXT_METHODS = {"join", "split", "rsplit", "lower", "replace", "strip", "get"}
TABLES = {"dict", "Namespace", "SimpleNamespace", "EasyDict", "AttrDict", "vars"}
TYPES: dict[str, Callable[..., object]] = {"int": int, "float": float, "str": str, "bool": bool, "Path": PurePath}
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
}
MAX_DEPTH = 60  # of expressions inside expressions, names followed included
MAX_NUMBER = 1e9
MAX_POWER = 64
UNKNOWN = Computed("...")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
Scope = ast.Module | ast.ClassDef | Function | Comprehension
NOT_READ = (ArithmeticError, TypeError, ValueError, AttributeError, LookupError, RecursionError)


class Row(NamedTuple):
    """A record, or anything else whose attributes and entries are columns."""


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
    """One value that a name gets: an expression, and the steps to its part ("each", or an index)."""

    node: ast.expr
    steps: tuple[str | int, ...]


@dataclass(slots=True)
class PythonSource:
    """The syntax tree of a source, and the names in it.

    Args:
        skipped: commands and cells of a notebook that are not Python, with their places -> why they are not read.
        parents: the node around each node. calls: all calls, in the order of the text.
        names: what a name in a scope gets. attributes: text such as `args.lr` -> expressions assigned to it; of `self`,
            the name of the class before. appended: name of a list -> expressions that are appended to it.
        options: of the command line, by name, with their defaults. known: values of expressions.
    """

    name: str
    tree: ast.Module
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict[ast.AST, ast.AST])
    calls: list[ast.Call] = field(default_factory=list[ast.Call])
    functions: dict[str, Function] = field(default_factory=dict[str, Function])
    classes: dict[str, ast.ClassDef] = field(default_factory=dict[str, ast.ClassDef])
    names: dict[tuple[ast.AST, str], list[_Binding]] = field(default_factory=dict[tuple[ast.AST, str], list[_Binding]])
    attributes: dict[str, list[ast.expr]] = field(default_factory=dict[str, list[ast.expr]])
    appended: dict[str, list[ast.expr]] = field(default_factory=dict[str, list[ast.expr]])
    options: dict[str, Argument] = field(default_factory=dict[str, Argument])
    known: dict[ast.expr, object] = field(default_factory=dict[ast.expr, object])
    depth: int = 0

    # --- what importers ask ---

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
            return str(value)
        if is_unknown(value) or value is ...:
            return Computed(ast.unparse(self._resolve_name(node)))
        return cast("JsonValue", value)

    def read_argument(self, node: ast.expr) -> Argument:
        """Read a value with its line."""
        return Argument(self.read_value(node), f"line {node.lineno}")

    def read_table(self, node: ast.expr, positional: tuple[str, ...] = ()) -> dict[str, Argument]:
        """Read a table of arguments: a dict, the arguments of a call, or a name of either with its attributes.

        Args:
            positional: names of the arguments of a call that have no keyword.
        """
        found: dict[str, Argument] = {}
        target = self._resolve_name(node)
        entries: list[tuple[str | None, ast.expr]] = []
        if isinstance(target, ast.Dict):
            for key, value in zip(target.keys, target.values, strict=True):
                entries.append((str(self.evaluate(key)) if key else None, value))
        elif isinstance(target, ast.Call) and get_last_name(target) not in PARSERS:
            entries += zip(positional, target.args, strict=False)
            entries += [(one.arg, one.value) for one in target.keywords]
        elif isinstance(table := self.evaluate(node), dict):
            for key, value in cast("dict[str, JsonValue]", table).items():
                is_read = not is_unknown(value) and value is not ...
                found[key] = Argument(value if is_read else Computed(key), f"line {node.lineno}")
        for name, value in entries:
            if name is None:  # **table
                found |= self.read_table(value) or {"**": Argument(Computed(ast.unparse(value)))}
            else:
                found[name] = self.read_argument(value)
        owner = f"{ast.unparse(node)}."
        for attribute, values in self.attributes.items():  # what is assigned afterwards wins
            if attribute.startswith(owner):
                found[attribute.removeprefix(owner)] = self.read_argument(values[-1])
        return found

    # --- names ---

    def climb(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Give each node around a node, the innermost first, with the part of it that holds the node before it."""
        while node in self.parents:
            yield self.parents[node], node
            node = self.parents[node]

    def list_scopes(self, node: ast.AST) -> list[Scope]:
        """List the functions, classes and comprehensions around a node, the innermost first, and the module."""
        found: list[Scope] = []
        for outer, inner in self.climb(node):
            # The default of a parameter is a value of the scope around its function.
            if isinstance(outer, Scope) and inner is not getattr(outer, "args", None):
                found.append(outer)
        return found

    def list_targets(self, node: ast.expr) -> list[ast.expr]:
        """List the names, attributes and keys whose value an expression is a part of."""
        found: list[ast.expr] = []
        for outer, inner in self.climb(node):
            if isinstance(outer, ast.Dict):
                found += [key for key, value in zip(outer.keys, outer.values, strict=True) if key and value is inner]
            elif isinstance(outer, ast.Assign):
                found += outer.targets
            if isinstance(outer, ast.stmt):
                break
        return found

    def find_class(self, node: ast.AST) -> str:
        """Find the name of the class around a node; "" for none."""
        return next((one.name for one in self.list_scopes(node) if isinstance(one, ast.ClassDef)), "")

    def bind(self, target: ast.expr, value: ast.expr, steps: tuple[str | int, ...] = ()) -> None:
        """Bind a name, each name of several, or an attribute to a value."""
        if isinstance(target, ast.Name):
            self.names.setdefault((self.list_scopes(target)[0], target.id), []).append(_Binding(value, steps))
        elif isinstance(target, ast.Tuple | ast.List):
            is_pairwise = isinstance(value, ast.Tuple) and not steps and len(value.elts) == len(target.elts)
            for place, inner in enumerate(target.elts):
                if is_pairwise:
                    self.bind(inner, cast("ast.Tuple", value).elts[place])
                else:
                    self.bind(inner, value, (*steps, place))
        elif isinstance(target, ast.Attribute) and not steps:
            written = ast.unparse(target)
            if written.startswith("self."):
                written = f"{self.find_class(target)}:{written}"
            self.attributes.setdefault(written, []).append(value)

    def _resolve_name(self, node: ast.expr) -> ast.expr:
        """Follow a name to the expression that it stands for."""
        for _ in range(MAX_DEPTH):
            binding = self._find_binding(node) if isinstance(node, ast.Name) else None
            if binding is None or binding.steps:
                break
            node = binding.node
        return node

    def _find_binding(self, node: ast.Name) -> _Binding | None:
        """Find the last assignment before a use, without branches that are not taken; None if it is not known."""
        for i, scope in enumerate(self.list_scopes(node)):
            found = self.names.get((scope, node.id), [])
            if i == 0 and not isinstance(scope, Comprehension):
                found = [one for one in found if _get_end(one.node) < (node.lineno, node.col_offset)]
            possible = [one for one in found if not self._is_dead(one)]
            if possible:
                last = possible[-1]
                different = {ast.unparse(one.node) for one in possible}
                return None if self._list_conditions(last.node) and len(different) > 1 else last
            if found or node.id in _list_parameters(scope):
                return None
        return None

    def _list_conditions(self, node: ast.AST) -> list[tuple[ast.expr, bool]]:
        """List the tests of the branches around a statement, and what they have to be."""
        found: list[tuple[ast.expr, bool]] = []
        for outer, inner in self.climb(node):
            if isinstance(outer, Scope):
                break
            if isinstance(outer, ast.If) and inner is not outer.test:
                found.append((outer.test, inner in outer.body))
        return found

    def _is_dead(self, binding: _Binding) -> bool:
        """Whether a condition of an assignment is known not to hold."""
        for test, wanted in self._list_conditions(binding.node):
            value = self.evaluate(test)
            if not is_unknown(value) and bool(value) is not wanted:
                return True
        return False

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

    def _evaluate_parameter(self, node: ast.Name) -> object:
        """Find the value of a function's parameter: by the calls of the function, its default, or a record."""
        functions = [one for one in self.list_scopes(node) if node.id in _list_parameters(one)]
        if not functions:
            return UNKNOWN
        values = [self.evaluate(one) for one in self._find_given(cast("Function", functions[0]), node.id)]
        if not values:
            return Row()
        is_same = all(value == values[0] or isinstance(value, Data) for value in values)
        return values[0] if is_same else UNKNOWN

    def _find_given(self, function: Function, name: str) -> list[ast.expr]:
        """Find the expressions that the calls of a function give to a parameter, or its default."""
        names = _list_parameters(function)
        defaults = dict(zip(names[::-1], _list_defaults(function)[::-1], strict=False))
        called = getattr(function, "name", "")
        owner = self.parents[function]
        if isinstance(owner, ast.ClassDef):
            names = names[1:]
            called = owner.name if called == "__init__" else called
        calls = self.find_calls(re.escape(called)) if called else []
        place = names.index(name) if name in names else None
        given = [get_argument(call, name, place) for call in calls]
        found = [one for one in given if one is not None]
        return found or [one for one in (defaults.get(name),) if one]

    def _read_class(self, name: str) -> dict[str, object]:
        """Read the fields of a class with their defaults; dataclasses and classes of constants are tables."""
        found: dict[str, object] = {}
        for base in self.classes[name].bases:
            if isinstance(base, ast.Name) and base.id in self.classes and base.id != name:
                found |= self._read_class(base.id)
        for one in self.classes[name].body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                default = one.value
                if isinstance(default, ast.Call) and get_last_name(default) in ("field", "Field"):
                    default = get_argument(default, "default")
                found[one.target.id] = self.evaluate(default) if default else Computed(one.target.id)
            elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                found[one.targets[0].id] = self.evaluate(one.value)
        return found | {key: one.value for key, one in self.options.items() if key in found}

    # --- expressions ---

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
                return "".join(cast("list[str]", [self.evaluate(part) for part in node.values]))
            case ast.FormattedValue():
                value = self.evaluate(node.value)
                return value if node.format_spec else _check_shown(value)
            case ast.List(elts=[one]) if has_columns(self.evaluate(one)):
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
                return _take(self.evaluate(node.value), self.evaluate(node.slice))
            case ast.BinOp():
                return self._evaluate_operation(node)
            case ast.UnaryOp(op=ast.USub()):
                return -self._evaluate_literal(node.operand)
            case ast.UnaryOp(op=ast.Not()):
                return not self._evaluate_literal(node.operand)
            case ast.BoolOp():
                return self._evaluate_choice(node)
            case ast.Compare(ops=[ast.In() | ast.NotIn() as one], comparators=[right]):
                is_in = self._evaluate_literal(node.left) in self._evaluate_literal(right)
                return is_in is isinstance(one, ast.In)
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
            found |= {self.evaluate(key): self.evaluate(value)} if key else self._evaluate_literal(value)
        return found

    def _evaluate_operation(self, node: ast.BinOp) -> object:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        match node.op, left, right:
            case ast.Mod(), str(), _:
                values = right if isinstance(right, tuple) else (right,)
                return left.replace("%d", "%s") % tuple(_check_shown(one) for one in cast("tuple[object]", values))
            case ast.Mult(), (str() | list()), _:
                return UNKNOWN  # a long text or list
            case _, (int() | float()), (int() | float()):
                limit = MAX_POWER if isinstance(node.op, ast.Pow) else MAX_NUMBER
                return UNKNOWN if max(abs(left), abs(right)) > limit else OPERATORS[type(node.op)](left, right)
            case ast.Add(), str(), str():
                return left + right  # with columns or without
            case _:
                return OPERATORS[type(node.op)](self._evaluate_literal(node.left), self._evaluate_literal(node.right))

    def _evaluate_choice(self, node: ast.BoolOp) -> object:
        value: object = None
        for one in node.values:
            value = self.evaluate(one)
            if is_unknown(value) or bool(value) is isinstance(node.op, ast.Or):
                break
        return UNKNOWN if isinstance(value, Row) else value

    def _evaluate_condition(self, node: ast.IfExp) -> object:
        """Evaluate the branch that is taken; where that is not known, the text, or what both branches are."""
        test = self.evaluate(node.test)
        if not is_unknown(test):
            return self.evaluate(node.body if test else node.orelse)
        body, other = self.evaluate(node.body), self.evaluate(node.orelse)
        if has_columns(body) or body == other:
            return body
        return other if has_columns(other) else UNKNOWN

    def _evaluate_attribute(self, node: ast.Attribute) -> object:
        written, owner = ast.unparse(node), ""
        if get_last_name(node.value) in ENUMERATIONS:
            return node.attr.lower()
        value = self.evaluate(node.value)
        if written == f"self.{node.attr}":
            owner = self.find_class(node)
        elif isinstance(value, Instance):
            owner = value.name
        name = f"{owner}:self.{node.attr}" if owner else written
        if name in self.attributes and not isinstance(value, Data):
            return self.evaluate(self.attributes[name][-1])
        if isinstance(value, Instance):
            return self._read_class(value.name)[node.attr]
        if owner:
            return Row()  # of a base class, or given from outside
        if isinstance(value, Data | Row):
            is_part = node.attr in ("iloc", "loc", "at", "values", "index", "columns")
            return value if is_part else write_column(node.attr)
        if has_columns(value) and node.attr in ("values", "str", "iloc"):
            return value
        return cast("dict[str, object]", value)[node.attr]

    # --- calls ---

    def _evaluate_call(self, node: ast.Call) -> object:
        name = get_last_name(node)
        owner = self.evaluate(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, Data) and name not in ITERATIONS:
            return self._evaluate_method(node, name, owner)
        if name in PARSERS:
            return self._evaluate_parser(name)
        given = [self.evaluate(one) for one in node.args]
        match name, owner, given:
            case "load_dataset" | "load_from_disk", _, _:
                return self._read_dataset(node, name)
            case _ if name in PANDAS_READERS | WRAPPERS | {"train_test_split"}:
                return self._read_data(node, name)
            case (("getenv" | "get"), _, [_, default]) if re.search(r"getenv$|environ\.get$", ast.unparse(node.func)):
                return default
            case "format", str(), _:
                return owner.format(*map(_check_shown, given))
            case _ if has_columns(owner) and name in SAME_TEXT:
                return owner
            case _, (str() | None), [one, *_] if has_columns(one) and name in SAME_TEXT:
                return one
            case _, (str() | dict()), _ if name in TEXT_METHODS:
                return getattr(owner, name)(*map(self._evaluate_literal, node.args))
            case "iterrows", _, _:
                return [(UNKNOWN, Row())]
            case (("itertuples" | "items"), _, _):
                return Row()
            case "zip", _, _:
                return [tuple(given)]
            case "enumerate", _, _:
                return [(UNKNOWN, *given)]
            case "join", _, [_, *_]:  # os.path.join
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
            keywords = {key: self.evaluate(one) for key, one in get_keywords(node).items()}
            markers = (*self.classes[name].decorator_list, *self.classes[name].bases)
            if any(get_last_name(one) in ("dataclass", "BaseModel") for one in markers):
                return self._read_class(name) | keywords
            inner = [*(self.evaluate(one) for one in node.args), *keywords.values()]
            return next((one for one in inner if isinstance(one, Data)), Instance(name))
        function = self.functions.get(name)
        if isinstance(function, ast.FunctionDef) and not isinstance(node.func, ast.Attribute):
            returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
            if len(returned) == 1:
                return self.evaluate(returned[0])
        return UNKNOWN

    # --- data ---

    def _read_share(self, node: ast.expr | None) -> float:
        share = self.evaluate(node)
        return share if isinstance(share, float) else 0.25  # the default of scikit-learn and of datasets

    def _evaluate_method(self, node: ast.Call, name: str, data: Data) -> Data:
        """The data after one of its methods: divided, or with other rows and columns."""
        if name == "train_test_split":
            return data._replace(share=self._read_share(get_argument(node, "test_size", 0)))
        fraction = self.evaluate(get_argument(node, "frac"))
        if name == "sample" and isinstance(fraction, float) and fraction < 1:
            return data._replace(half="train", share=round(1 - fraction, 6))
        if name == "drop" and node.args and get_last_name(node.args[0]) == "index":
            return data._replace(half="test")  # the records that `sample` did not draw
        return data

    def _read_data(self, node: ast.Call, name: str) -> object:
        """Data that a function reads, divides or wraps."""
        first = self.evaluate([*node.args, *get_keywords(node).values()][0])
        if isinstance(first, str | PurePath) and name != "from_dict":
            return Data({"": str(first)})
        if not isinstance(first, Data):
            return UNKNOWN
        if name != "train_test_split":
            return first
        share = self._read_share(get_argument(node, "test_size"))
        return tuple(first._replace(half=half, share=share) for half in ("train", "test"))

    def _read_dataset(self, node: ast.Call, name: str) -> object:
        """Files of a format, or a name of the hub with its configuration and split."""
        given = dict(zip(("path", "name"), node.args, strict=False)) | get_keywords(node)
        table = {key: self.evaluate(value) for key, value in given.items()}
        path, config, split, files = (table.get(key) for key in ("path", "name", "split", "data_files"))
        if not isinstance(path, str):
            return UNKNOWN
        if name == "load_from_disk":
            return Data({"": path})
        chosen = re.sub(r"\[.*", "", split) if isinstance(split, str) else ""
        if path not in FORMATS:
            return Data({}, f"{DATASETS.get(path, path)}:{config if isinstance(config, str) else ''}", chosen)
        if isinstance(files, str | list | PurePath):
            files = {"train" if split else "": files}
        return Data(cast("dict[str, Any]", files), split=chosen) if isinstance(files, dict) else UNKNOWN


def write_column(name: str) -> str:
    """Write a column of the data as a text; a dotted name is nested."""
    return f"\ufdd0{name}\ufdd1"


def has_columns(value: object) -> bool:
    """Whether a value is a text over columns."""
    return isinstance(value, str) and COLUMN.search(value) is not None


def is_unknown(value: object) -> bool:
    """Whether a value is not a literal."""
    if type(value) in (list, tuple):
        return any(is_unknown(one) for one in cast("list[object]", value))
    return isinstance(value, Computed | Row | Instance | Data) or has_columns(value)


def _check_shown(value: object) -> str:
    """Format what stands inside a text. Raises LookupError for what is neither a text nor a literal."""
    if is_unknown(value) and not isinstance(value, str):
        raise LookupError(value)
    return str(value)


def _take(value: object, key: object) -> object:
    """Take an entry of a value: a key, an index, a column or a split."""
    is_name = isinstance(key, str) and not has_columns(key)
    if not is_name and (isinstance(value, Data | Row) or has_columns(value)):
        return value  # some of its columns or rows
    match value, key:
        case Data(), str() if value.share is not None and not value.half and key in ("train", "test"):
            return value._replace(half=key)
        case Data(), str() if key in value.files or (value.hub and not value.split and not value.half):
            return value._replace(split=key)
        case ((Data() | Row()), str()):
            return write_column(key)
        case str(), str() if column := COLUMN.fullmatch(value):
            return write_column(f"{column[1]}.{key}")
        case _:
            return cast("Any", value)[key]


def _take_step(value: object, step: str | int) -> object:
    """Take the part of a value that an assignment to several names, or a loop, takes."""
    if step != "each":
        return cast("Any", value)[step] if type(value) in (list, tuple) else UNKNOWN
    if isinstance(value, Data | Row):
        return Row()
    if isinstance(value, list) and len(cast("list[object]", value)) == 1:  # what `zip` and `enumerate` give
        return cast("list[object]", value)[0]
    return value if has_columns(value) else UNKNOWN


def name_split(data: Data) -> JsonValue | Computed:
    """The setting of data: the file, or org/name:config:split; Computed where owner or split are not named.

    >>> name_split(Data({"": "a.csv"})), name_split(Data({}, "org/name:", "train"))
    ('a.csv', 'org/name::train')
    """
    if data.hub and "/" not in data.hub.partition(":")[0]:
        return Computed(f"{data.hub}, which has no owner (org/name)")
    if data.hub:
        return f"{data.hub}:{data.split or 'train'}"
    files = list(data.files.values())
    found = data.files.get(data.split, files[0] if len(files) == 1 else Computed("a split"))
    if isinstance(found, list):
        return [str(one) for one in cast("list[object]", found)]
    return str(found) if isinstance(found, PurePath) else found


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


def _list_defaults(node: Function) -> list[ast.expr | None]:
    """The defaults of the last parameters."""
    return [*node.args.defaults, *node.args.kw_defaults]


def _get_end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def parse_python(source: RawConfig, given: Mapping[str, JsonValue | Computed] | None = None) -> PythonSource:
    """Parse a script or notebook. Raises ConfigError with the line for a script that is not Python.

    Args:
        given: options of the command line that starts the script, which win over their defaults.
    """
    found = PythonSource(source.name, *read_code(source))
    for node in ast.walk(found.tree):
        found.parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
    placed = [node for node in ast.walk(found.tree) if hasattr(node, "lineno")]
    for node in sorted(placed, key=lambda one: (one.lineno, one.col_offset)):
        _collect(found, node)
    for call in found.find_calls("add_argument"):
        _add_option(found, call)
    found.options |= {name: Argument(value) for name, value in (given or {}).items()}
    return found


def _collect(found: PythonSource, node: ast.AST) -> None:
    """Collect the names that a node binds, and calls, functions and classes."""
    match node:
        case ast.ClassDef():
            found.classes[node.name] = node
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            found.functions[node.name] = node
        case ast.Assign():
            for target in node.targets:
                found.bind(target, node.value)
        case ast.AnnAssign(value=ast.expr() as value):
            found.bind(node.target, value)
        case ast.AugAssign(target=ast.Name() as target):  # a += b is a = a + b
            before = ast.copy_location(ast.Name(target.id, ast.Load()), node)
            added = ast.copy_location(ast.BinOp(before, node.op, node.value), node)
            found.parents |= {before: node, added: node}
            found.bind(target, added)
        case ast.For():
            found.bind(node.target, node.iter, ("each",))
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for one in node.generators:
                found.bind(one.target, one.iter, ("each",))
        case ast.Call():
            found.calls.append(node)
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr == "append" and node.args:
                found.appended.setdefault(ast.unparse(function.value), []).append(node.args[0])
        case _:
            pass


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
