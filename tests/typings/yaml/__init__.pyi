# The names that FiveTune takes from PyYAML, with the types that the stubs of pyright leave out.
from collections.abc import Callable, Iterator
from re import Pattern
from typing import IO, Any, ClassVar, TypeVar

from yaml.error import MarkedYAMLError as MarkedYAMLError
from yaml.error import YAMLError as YAMLError

T = TypeVar("T")
Resolvers = dict[str, list[tuple[str, Pattern[str]]]]

class _Mark:
    index: int
    line: int

class Node:
    id: ClassVar[str]
    tag: str
    start_mark: _Mark
    end_mark: _Mark

class ScalarNode(Node):
    value: str

class SequenceNode(Node):
    value: list[Node]

class MappingNode(Node):
    value: list[tuple[Node, Node]]

class Event:
    start_mark: _Mark

class CollectionStartEvent(Event): ...
class CollectionEndEvent(Event): ...

class SafeLoader:
    yaml_implicit_resolvers: ClassVar[Resolvers]
    def __init__(self, stream: str) -> None: ...
    @classmethod
    def add_implicit_resolver(cls, tag: str, regexp: Pattern[str], first: str) -> None: ...
    def construct_object(self, node: Node, deep: bool = False) -> object: ...

class SafeDumper:
    yaml_implicit_resolvers: ClassVar[Resolvers]
    @classmethod
    def add_representer(cls, data_type: type[T], representer: Callable[[SafeDumper, T], Node]) -> None: ...
    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> ScalarNode: ...

def compose(stream: str, Loader: type[SafeLoader]) -> Node | None: ...
def parse(stream: str, Loader: type[SafeLoader]) -> Iterator[Event]: ...
def load(stream: str, Loader: type[SafeLoader]) -> Any: ...
def safe_load(stream: str | IO[str]) -> Any: ...
def dump(
    data: object,
    *,
    Dumper: type[SafeDumper],
    sort_keys: bool,
    allow_unicode: bool,
    default_flow_style: bool = False,
    width: float = 80,
) -> str: ...
def safe_dump(data: object, *, sort_keys: bool = True, allow_unicode: bool = False) -> str: ...
