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
from pathlib import PurePath
from typing import Any, NamedTuple, cast

from fivetune.config.aliases import DATASETS
from fivetune.start.importers import Argument, Computed, RawConfig
from fivetune.start.importers._cells import read_code
from fivetune.types import JsonValue

COLUMN = re.compile("\ufdd0(.*?)\ufdd1")  # two code points that Unicode keeps out of all texts
PANDAS_READERS = {"read_csv", "read_table", "read_json", "read_parquet", "read_excel", "load_from_disk"}
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
    ast.Mod: operator.mod,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
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
MAX_DEPTH = 60  # of expressions inside expressions, names followed included
MAX_NUMBER = 1e9
UNKNOWN = Computed("...")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
Scope = ast.Module | ast.ClassDef | Function | Comprehension
NOT_READ = (ArithmeticError, TypeError, ValueError, AttributeError, LookupError, RecursionError)


class Row(NamedTuple):
    """A record, or anything else whose attributes and entries are columns."""


class Fields(dict[str, Any]):
    """Fields of a class or object of the source."""


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


class PythonSource:
    """The syntax tree of a source, and the names in it. Raises ConfigError with the line for one that is not Python.

    Attributes:
        skipped: commands and cells of a notebook that are not Python, with their places -> why they are not read.
        parents: the node around each node. calls: all calls, in the order of the text.
        names: what a name in a scope gets. attributes: text such as `args.lr` -> expressions assigned to it; of `self`,
            the name of the class before. appended: name of a list -> the first expression appended to it.
        options: of the command line, by name, with their defaults.
    """

    def __init__(self, source: RawConfig, given: Mapping[str, JsonValue | Computed] | None = None) -> None:
        """Parse a script or notebook.

        Args:
            given: options of the command line that starts the script, which win over their defaults.
        """
        self.name = source.name
        self.tree, self.skipped = read_code(source)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.calls: list[ast.Call] = []
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.names: dict[tuple[ast.AST, str], list[_Binding]] = {}
        self.attributes: dict[str, list[ast.expr]] = {}
        self.appended: dict[str, ast.expr] = {}
        self.options: dict[str, Argument] = {}
        self._known: dict[ast.expr, Any] = {}
        self._depth = 0
        # The scope of a name needs the nodes around it, so the tree is walked before names are bound.
        nodes = list(ast.walk(self.tree))
        for node in nodes:
            self.parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
        for node in sorted(nodes, key=_get_start):
            self._collect(node)
        for call in self.find_calls("add_argument"):
            self._add_option(call)
        self.options |= {name: Argument(value) for name, value in (given or {}).items()}

    def _collect(self, node: ast.AST) -> None:
        """Collect the names that a node binds, and calls, functions and classes."""
        match node:
            case ast.ClassDef():
                self.classes[node.name] = node
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions[node.name] = node
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, node.value)
            case ast.AnnAssign(value=ast.expr() as value):
                self._bind(node.target, value)
            case ast.AugAssign(target=ast.Name() as target):  # a += b is a = a + b
                before = ast.copy_location(ast.Name(target.id, ast.Load()), node)
                added = ast.copy_location(ast.BinOp(before, node.op, node.value), node)
                self.parents |= {before: node, added: node}
                self._bind(target, added)
            case ast.For():
                self._bind(node.target, node.iter, ("each",))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for one in node.generators:
                    self._bind(one.target, one.iter, ("each",))
            case ast.Call():
                self.calls.append(node)
                if isinstance(node.func, ast.Attribute) and node.func.attr == "append" and node.args:
                    self.appended.setdefault(ast.unparse(node.func.value), node.args[0])
            case _:
                pass

    def _bind(self, target: ast.expr, value: ast.expr, steps: tuple[str | int, ...] = ()) -> None:
        """Bind a name, each name of several, or an attribute to a value."""
        match target:
            case ast.Name():
                self.names.setdefault((self.list_scopes(target)[0], target.id), []).append(_Binding(value, steps))
            case ast.Tuple() | ast.List():
                values = value.elts if isinstance(value, ast.Tuple) and not steps else []
                for place, inner in enumerate(target.elts):
                    if len(values) == len(target.elts):  # a, b = 1, 2
                        self._bind(inner, values[place])
                    else:
                        self._bind(inner, value, (*steps, place))
            case ast.Attribute() if not steps:
                self.attributes.setdefault(self._write_attribute(target), []).append(value)
            case _:
                pass

    def _write_attribute(self, node: ast.Attribute) -> str:
        """Write an attribute as in the text; one of `self` with its class before it."""
        written = ast.unparse(node)
        return f"{self._find_class(node)}:{written}" if written == f"self.{node.attr}" else written

    def _add_option(self, call: ast.Call) -> None:
        """Read the default of an option of argparse."""
        flags: list[str] = []
        for one in call.args:
            flag = self.evaluate(one)
            if isinstance(flag, str):
                flags.append(flag)
        if not flags:
            return
        # As argparse does, the option is named by its first long flag.
        flags.sort(key=lambda flag: not flag.startswith("--"))
        name = flags[0].lstrip("-").replace("-", "_")
        keywords = get_keywords(call)
        action = self.evaluate(keywords.get("action"))
        value = self.read_value(keywords["default"]) if "default" in keywords else None
        if value is None and action in ("store_true", "store_false"):
            value = action == "store_false"
        if self.evaluate(keywords.get("required")):
            value = Computed(f"--{name}, which the command line gives")
        self.options[name] = Argument(value, f"line {call.lineno}")

    # --- what importers ask ---

    def find_calls(self, pattern: str) -> list[ast.Call]:
        """Find the calls whose function ends in a name that matches a pattern, in the order of the text.

        >>> len(PythonSource(RawConfig("a.py", "model.train(x)\\nT5Model('t5')")).find_calls("T5Model|fit"))
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
        if isinstance(target, ast.Dict | ast.Call) and get_last_name(target) not in PARSERS:
            for name, value in self._list_entries(target, positional):
                if name is None:
                    found |= self.read_table(value) or {"**": Argument(Computed(ast.unparse(value)))}
                else:
                    found[str(name)] = self.read_argument(value)
        elif isinstance(table := self.evaluate(node), dict):
            for key, value in cast("dict[str, JsonValue]", table).items():
                is_read = not is_unknown(value) and value is not ...
                found[key] = Argument(value if is_read else Computed(key), f"line {node.lineno}")
        owner = f"{ast.unparse(node)}."
        for attribute, values in self.attributes.items():  # what is assigned afterwards wins
            if attribute.startswith(owner):
                found[attribute.removeprefix(owner)] = self.read_argument(values[-1])
        return found

    def _list_entries(self, node: ast.Dict | ast.Call, positional: tuple[str, ...] = ()) -> list[tuple[Any, ast.expr]]:
        """List names and values of a table or of a call's arguments; the name of a table that is spread is None."""
        if isinstance(node, ast.Dict):
            return [*zip(map(self.evaluate, node.keys), node.values, strict=True)]
        found: list[tuple[Any, ast.expr]] = [*zip(positional, node.args, strict=False)]
        for one in node.keywords:
            found.append((one.arg, one.value))
        return found

    # --- names ---

    def list_around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """List each node around a node, the innermost first, with the part of it that holds the node before it."""
        while node in self.parents:
            yield self.parents[node], node
            node = self.parents[node]

    def list_scopes(self, node: ast.AST) -> list[Scope]:
        """List the functions, classes and comprehensions around a node, the innermost first, and the module."""
        found: list[Scope] = []
        for outer, inner in self.list_around(node):
            # The default of a parameter is a value of the scope around its function.
            if isinstance(outer, Scope) and inner is not getattr(outer, "args", None):
                found.append(outer)
        return found

    def list_targets(self, node: ast.expr) -> list[ast.expr]:
        """List the names and attributes whose value an expression is a part of."""
        statement = next(outer for outer, _ in self.list_around(node) if isinstance(outer, ast.stmt))
        return statement.targets if isinstance(statement, ast.Assign) else []

    def _find_class(self, node: ast.AST) -> str:
        """Find the name of the class around a node; "" for none."""
        for scope in self.list_scopes(node):
            if isinstance(scope, ast.ClassDef):
                return scope.name
        return ""

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
            # In the scope of the use, only what stands before it counts; functions run after the module's end is read.
            if i == 0 and not isinstance(scope, Comprehension):
                found = [one for one in found if _get_end(one.node) < (node.lineno, node.col_offset)]
            possible = [one for one in found if self._is_possible(one)]
            if possible:
                last = possible[-1]
                is_conditional = bool(self._list_conditions(last.node))
                # Of several values under a condition that is not known, none can be chosen.
                if is_conditional and len({ast.unparse(one.node) for one in possible}) > 1:
                    return None
                return last
            if found or node.id in _list_parameters(scope):
                return None
        return None

    def _list_conditions(self, node: ast.AST) -> list[tuple[ast.expr, bool]]:
        """List the tests of the branches around a statement, and what they have to be."""
        found: list[tuple[ast.expr, bool]] = []
        for outer, inner in self.list_around(node):
            if isinstance(outer, Scope):
                break
            if isinstance(outer, ast.If) and inner is not outer.test:
                found.append((outer.test, inner in outer.body))
        return found

    def _is_possible(self, binding: _Binding) -> bool:
        """Whether no condition of an assignment is known not to hold."""
        for test, wanted in self._list_conditions(binding.node):
            value = self.evaluate(test)
            if not is_unknown(value) and bool(value) is not wanted:
                return False
        return True

    def _evaluate_name(self, node: ast.Name) -> Any:
        if node.id == "__name__":
            return "__main__"
        binding = self._find_binding(node)
        if binding is None and node.id in self.classes:
            return self._read_class(node.id)
        if binding is None:
            return self._evaluate_parameter(node)
        value = self.evaluate(binding.node)
        for step in binding.steps:
            value = _take_step(value, step)
        # A list that a loop fills is its first element, as a column of texts is one text.
        if value == [] and node.id in self.appended:
            return self.evaluate(self.appended[node.id])
        return value

    def _evaluate_parameter(self, node: ast.Name) -> Any:
        """Find the value of a function's parameter: by the calls of the function, its default, or a record."""
        functions = [one for one in self.list_scopes(node) if node.id in _list_parameters(one)]
        if not functions:
            return UNKNOWN
        function = cast("Function", functions[0])
        names = _list_parameters(function)
        place = names.index(node.id)
        called = getattr(function, "name", None)
        owner = self.parents[function]
        if isinstance(owner, ast.ClassDef):  # a method: calls do not give its first parameter
            place -= 1
            if called == "__init__":
                called = owner.name
        values: list[Any] = []
        for call in self.calls:
            given = get_argument(call, node.id, place) if get_last_name(call) == called else None
            if given:
                values.append(self.evaluate(given))
        if not values:
            defaults = [*function.args.defaults, *function.args.kw_defaults]
            default = dict(zip(names[::-1], defaults[::-1], strict=False)).get(node.id)
            return self.evaluate(default) if default else Row()
        # A function that is called for training and evaluation data is read with the first, the training data.
        for value in values:
            if value != values[0] and not isinstance(value, Data):
                return UNKNOWN
        return values[0]

    def _read_class(self, name: str) -> Fields:
        """Read the fields of a class with their defaults, and what is assigned to the attributes of its objects."""
        table = Fields()
        for (scope, key), bound in self.names.items():
            if scope is self.classes[name]:
                table[key] = self.evaluate(bound[-1].node)
        own = f"{name}:self."
        for written, values in self.attributes.items():
            if written.startswith(own):
                table[written.removeprefix(own)] = self.evaluate(values[-1])
        # An option of the command line wins over a default.
        for key, option in self.options.items():
            if key in table:
                table[key] = option.value
        return table

    # --- expressions ---

    def evaluate(self, node: ast.expr | None) -> Any:
        """Find what an expression is; Computed for one that is known only when the program runs."""
        if node is None:
            return None
        if node in self._known:
            return self._known[node]
        if self._depth > MAX_DEPTH:
            return UNKNOWN
        self._depth += 1
        self._known[node] = UNKNOWN  # of an expression that depends on itself
        try:
            value = self._evaluate(node)
        except NOT_READ:
            value = UNKNOWN
        finally:
            self._depth -= 1
        self._known[node] = Computed(ast.unparse(node)) if value is UNKNOWN else value
        return self._known[node]

    def _evaluate_literal(self, node: ast.expr) -> Any:
        """Return a literal. Raises LookupError for another expression."""
        value = self.evaluate(node)
        if is_unknown(value):
            raise LookupError(node)
        return value

    def _evaluate(self, node: ast.expr) -> Any:
        """Find what an expression is. Raises one of NOT_READ, or returns UNKNOWN, for one that is not known."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._evaluate_name(node)
            case ast.JoinedStr():
                return "".join([self.evaluate(part) for part in node.values])
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
                return self._merge_entries(self._list_entries(node))
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

    def _merge_entries(self, entries: list[tuple[Any, ast.expr]]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in entries:
            found |= self.evaluate(value) if key is None else {key: self.evaluate(value)}
        return found

    def _evaluate_operation(self, node: ast.BinOp) -> Any:
        left = self.evaluate(node.left)
        right = self.evaluate(node.right)
        operate = OPERATORS[type(node.op)]
        if isinstance(node.op, ast.Mod):
            values = right if isinstance(right, tuple) else (right,)
            return left.replace("%d", "%s") % tuple(map(_check_shown, values))
        if isinstance(left, str) and isinstance(right, str):
            return operate(left, right)  # with columns or without
        if is_unknown(left) or is_unknown(right):
            return UNKNOWN
        # A product of a text or list may be too long to build.
        if isinstance(node.op, ast.Mult):
            for one in (left, right):
                if not isinstance(one, int | float) or abs(one) >= MAX_NUMBER:
                    return UNKNOWN
        return operate(left, right)

    def _evaluate_choice(self, node: ast.BoolOp) -> Any:
        value: object = None
        for one in node.values:
            value = self.evaluate(one)
            if is_unknown(value) or bool(value) is isinstance(node.op, ast.Or):
                break
        return UNKNOWN if isinstance(value, Row) else value

    def _evaluate_condition(self, node: ast.IfExp) -> Any:
        """Evaluate the branch that is taken; where that is not known, the text, or what both branches are."""
        test = self.evaluate(node.test)
        if not is_unknown(test):
            return self.evaluate(node.body if test else node.orelse)
        body = self.evaluate(node.body)
        other = self.evaluate(node.orelse)
        if has_columns(body) or body == other:
            return body
        return other if has_columns(other) else UNKNOWN

    def _evaluate_attribute(self, node: ast.Attribute) -> Any:
        if get_last_name(node.value) in ENUMERATIONS:
            return node.attr.lower()
        name = self._write_attribute(node)
        value = self.evaluate(node.value)
        # An assignment to a column of data changes the data, and is read with its changes.
        if name in self.attributes and not isinstance(value, Data):
            return self.evaluate(self.attributes[name][-1])
        if ":" in name:
            return Row()  # of a base class, or given from outside
        if has_columns(value) and node.attr in ("values", "str", "iloc"):
            return value
        if isinstance(value, Data | Row):
            is_part = node.attr in ("iloc", "loc", "at", "values", "index", "columns")
            return value if is_part else write_column(node.attr)
        return value[node.attr]

    # --- calls ---

    def _evaluate_call(self, node: ast.Call) -> Any:
        name = get_last_name(node)
        owner = self.evaluate(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, Data) and name not in ITERATIONS:
            return self._evaluate_method(node, name, owner)
        if name in PARSERS:
            return self._evaluate_parser(name)
        given = [self.evaluate(one) for one in node.args]
        match name, owner, given:
            case "load_dataset", _, _:
                return self._read_dataset(node)
            case (("getenv" | "get"), _, [_, default]) if "env" in ast.unparse(node.func):
                return default
            case _ if name in PANDAS_READERS | WRAPPERS | {"train_test_split"}:
                return self._read_data(node, name)
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
                return self._merge_entries([(None, one) for one in node.args] + self._list_entries(node))
            case (("field" | "Field"), None, _):
                return self.evaluate(get_keywords(node)["default"])
            case _:
                return self._evaluate_own(node, name)

    def _evaluate_parser(self, name: str) -> Any:
        """The arguments of argparse, or the dataclasses of HfArgumentParser."""
        if name == "parse_args_into_dataclasses":
            given = self.find_calls("HfArgumentParser")[0].args[0]
            named = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
            return tuple(self.evaluate(one) for one in named)
        table = {key: one.value for key, one in self.options.items()}
        return (table, []) if name == "parse_known_args" else table

    def _evaluate_own(self, node: ast.Call, name: str) -> Any:
        """Objects and functions of the source; a Dataset made from data is that data."""
        if name in self.classes:
            keywords = {key: self.evaluate(one) for key, one in get_keywords(node).items()}
            for one in (*map(self.evaluate, node.args), *keywords.values()):
                if isinstance(one, Data):
                    return one
            return Fields(self._read_class(name) | keywords)
        function = self.functions.get(name)
        if not isinstance(function, ast.FunctionDef) or isinstance(node.func, ast.Attribute):
            return UNKNOWN
        returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
        # Of several results, which one it is depends on values that are not known.
        return self.evaluate(returned[0]) if len(returned) == 1 else UNKNOWN

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

    def _read_data(self, node: ast.Call, name: str) -> Any:
        """Data that a function reads, divides or wraps."""
        first = self.evaluate([*node.args, *get_keywords(node).values()][0])
        if isinstance(first, str | PurePath) and name != "from_dict":
            return Data({"": str(first)})
        if not isinstance(first, Data):
            return UNKNOWN
        if name != "train_test_split":
            return first
        divided = first._replace(share=self._read_share(get_argument(node, "test_size")))
        return divided._replace(half="train"), divided._replace(half="test")

    def _read_dataset(self, node: ast.Call) -> Any:
        """Files of a format, or a name of the hub with its configuration and split."""
        path = self.evaluate(get_argument(node, "path", 0))
        config = self.evaluate(get_argument(node, "name", 1))
        split = self.evaluate(get_argument(node, "split"))
        files = self.evaluate(get_argument(node, "data_files"))
        if not isinstance(path, str):
            return UNKNOWN
        chosen = split.partition("[")[0] if isinstance(split, str) else ""  # a part of a split is told elsewhere
        if path not in FORMATS:
            hub = f"{DATASETS.get(path, path)}:"
            if isinstance(config, str):
                hub += config
            return Data({}, hub, chosen)
        if isinstance(files, str | list | PurePath):
            files = {"train" if split else "": files}
        return Data(files, split=chosen) if isinstance(files, dict) else UNKNOWN


def write_column(name: str) -> str:
    """Write a column of the data as a text; a dotted name is nested."""
    return f"\ufdd0{name}\ufdd1"


def has_columns(value: object) -> bool:
    """Whether a value is a text over columns."""
    return isinstance(value, str) and COLUMN.search(value) is not None


def is_unknown(value: Any) -> bool:
    """Whether a value is not a literal."""
    if type(value) in (list, tuple):
        return any(is_unknown(one) for one in value)
    return isinstance(value, Computed | Row | Data | Fields) or has_columns(value)


def _check_shown(value: Any) -> str:
    """Format what stands inside a text. Raises LookupError for what is neither a text nor a literal."""
    if is_unknown(value) and not isinstance(value, str):
        raise LookupError(value)
    return str(value)


def _take(value: Any, key: Any) -> Any:
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
            return value[key]


def _take_step(value: Any, step: str | int) -> Any:
    """Take the part of a value that an assignment to several names, or a loop, takes."""
    if step != "each":
        return value[step] if type(value) in (list, tuple) else UNKNOWN
    if isinstance(value, Data | Row):
        return Row()
    if isinstance(value, list) and len(value) == 1:  # what `zip` and `enumerate` give
        return value[0]
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
    only = files[0] if len(files) == 1 else Computed("a split")
    found = data.files.get(data.split, only)
    if isinstance(found, list):
        return [str(one) for one in found]
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
    positional = call.args[place] if place is not None and 0 <= place < len(call.args) else None
    return get_keywords(call).get(name, positional)


def _list_parameters(node: ast.AST) -> list[str]:
    """The parameters of a function; of another node none."""
    if not isinstance(node, Function):
        return []
    return [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _get_start(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _get_end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or 0
