"""The folder is the registry: what is found, what is refused, and a plugin of one's own."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol

import pytest
from pydantic import ValidationError

import fivetune.scores.metrics
import fivetune.training.schedules
from fivetune import plugins
from fivetune.cli import main
from fivetune.config import RunConfig, load_config
from fivetune.config.layers import NESTED_PLUGINS, PLUGIN_SECTIONS
from fivetune.errors import ConfigError, UnknownPluginError
from fivetune.scores.metrics import PerExample
from fivetune.types import Adapter, Optimizer, Schedule

OWN = '''"""Up and down."""
from pydantic import Field
from fivetune.training.schedules import Warmup

class Wave(Warmup):
    """A wave."""
    height: float = Field(default=0.5, description="how high")

    def compute_decay(self, progress: float) -> float:
        return self.height
'''
EVERY = [(kind, name) for kind in plugins.KINDS for name in plugins.list_plugins(kind) if kind != "commands"]


@pytest.fixture
def own_folder(tmp_path, monkeypatch) -> Path:
    """A folder of one's own with the schedule `wave`, forgotten afterwards."""
    (tmp_path / "schedules").mkdir()
    (tmp_path / "schedules" / "wave.py").write_text(OWN)
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(tmp_path))
    monkeypatch.setattr(fivetune.training.schedules, "__path__", list(fivetune.training.schedules.__path__))
    yield tmp_path
    sys.modules.pop("fivetune.training.schedules.wave", None)
    vars(fivetune.training.schedules).pop("wave", None)


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_plugin_says_what_it_is(kind, name):
    assert (plugins.import_plugin(kind, name).__doc__ or "").strip()
    if kind not in ("metrics", "sinks"):  # those have no options of their own to describe
        options = plugins.load_plugin(kind, name)
        assert options.plugin_name() == name
        assert options.__doc__
        assert options.model_config["frozen"] and options.model_config["extra"] == "forbid"


# --- contracts ---


def find_breaches(options: type[plugins.Options], contract: type) -> Iterator[str]:
    """The methods of a contract that cannot be called as it says."""
    bases = [base for base in contract.__mro__ if base is not Protocol and issubclass(base, Protocol)]
    for name in sorted({name for base in bases for name in (*vars(base), *base.__annotations__)}):
        if name.startswith("_"):
            continue
        expected, own = getattr(contract, name, None), getattr(options, name, None)
        if own is not None and inspect.isroutine(expected):
            reason = compare_signatures(inspect.signature(expected), inspect.signature(own))
            if reason:
                yield f"{name}: {reason}"


def compare_signatures(expected: inspect.Signature, own: inspect.Signature) -> str:
    asked, given = expected.parameters, own.parameters
    for name, parameter in asked.items():
        found = given.get(name)
        if found is None or found.kind is not parameter.kind:
            return f"no parameter {name} as in {expected}"
        if parameter.default is not parameter.empty and found.default is found.empty:
            return f"{name} has no default"
    if more := [name for name, one in given.items() if name not in asked and one.default is one.empty]:
        return f"needs {more[0]}"
    shared = [name for name in given if name in asked and given[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    order = [name for name in asked if name in shared]
    return "" if shared == order == list(given)[: len(order)] else f"another order than {expected}"


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_plugin_keeps_its_contract(kind, name):
    module, contract = plugins.CONTRACTS[kind]
    assert list(find_breaches(plugins.load_plugin(kind, name), getattr(import_module(module), contract))) == []


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("tasks", "to_text"),
        ("metrics", "describe_source, higher_is_better, main, packages, score, score_names, source"),
        ("optimizers", "build"),
        ("schedules", "factor"),
        ("strategies", "wrap"),
        ("adapters", "build_config"),
        ("sinks", "open"),
        ("launchers", "render"),
        ("exporters", "convert"),
        ("importers", "can_read"),
    ],
)
def test_what_a_plugin_lacks_is_named_with_its_file(tmp_path, monkeypatch, kind, missing):
    path = tmp_path / kind / "own_empty.py"
    path.parent.mkdir()
    path.write_text("from fivetune.plugins import Options\nclass Empty(Options):\n    number: int = 1\n")
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(tmp_path))
    package = import_module(plugins.KINDS[kind])
    monkeypatch.setattr(package, "__path__", list(package.__path__))
    with pytest.raises(ConfigError) as caught:
        plugins.load_plugin(kind, "own_empty")
    assert str(caught.value).startswith(f"{path}: Empty has no ") and missing in str(caught.value)


def test_a_method_that_a_base_leaves_open_is_missing():
    class Own(PerExample):
        main: ClassVar[str] = "own"
        score_names: ClassVar[tuple[str, ...]] = ("own",)
        higher_is_better: ClassVar[bool] = True

    assert plugins.list_missing_members("metrics", Own) == ["score_one", "source"]


def test_breaches_of_a_contract_are_found():
    class Good(plugins.Options):
        lr: float = 1.0
        state_bytes_per_parameter: ClassVar[float] = 4.0
        lr_range: ClassVar[tuple[float, float]] = (1e-4, 1e-2)

        def build(self, groups, extra=1): ...
        def effective_lr(self, optimizer): ...

    class Other(plugins.Options):
        def build(self, parameters): ...
        def effective_lr(self, optimizer, step): ...

    class Swapped(plugins.Options):
        def factor(self, num_steps, step): ...

    class Alone(plugins.Options):
        def factor(self, step, *, num_steps): ...

    assert list(find_breaches(Good, Optimizer)) == []
    assert [text.partition(" as in")[0] for text in find_breaches(Other, Optimizer)] == [
        "build: no parameter groups",
        "effective_lr: needs step",
    ]
    assert [text.partition(" than")[0] for text in find_breaches(Swapped, Schedule)] == ["factor: another order"]
    assert [text.partition(" as in")[0] for text in find_breaches(Alone, Schedule)] == [
        "factor: no parameter num_steps"
    ]


def test_the_settings_have_the_types_of_the_contracts():
    fields = RunConfig.model_fields
    for section, kind in PLUGIN_SECTIONS.items():
        assert fields[section].annotation.__name__ == plugins.CONTRACTS[kind][1]
    assert NESTED_PLUGINS == {"model.adapter": "adapters"}
    assert fields["model"].annotation.model_fields["adapter"].annotation == Adapter | None


# --- names and own plugins ---


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_unknown_names(kind):
    with pytest.raises(UnknownPluginError) as caught:
        plugins.load_plugin(kind, "zzz")
    allowed = ", ".join(plugins.list_plugins(kind))
    assert str(caught.value).startswith(f"{kind}: there is no 'zzz'. Allowed: {allowed}. FIVETUNE_PLUGINS ")


def test_a_plugin_of_ones_own_is_one_file(own_folder):
    shipped = {file.stem for file in Path(fivetune.training.schedules.__file__).parent.glob("[a-z]*.py")}
    assert set(plugins.list_plugins("schedules")) == {*shipped, "wave"}
    recipe = {"model": {"path": "m"}, "task": "squad", "schedule": {"name": "wave", "height": 0.25, "warmup_steps": 1}}
    config = load_config(recipe)
    assert [config.schedule.factor(step, 3) for step in range(3)] == [1.0, 0.25, 0.25]
    assert config.as_dict()["schedule"]["name"] == "wave"
    assert load_config(config.as_dict()) == config


def test_options_are_frozen():
    options = plugins.load_plugin("schedules", "linear")()
    with pytest.raises(ValidationError, match="frozen"):
        options.final_fraction = 0.5


def test_a_fault_of_a_plugin_in_a_relative_folder_is_named_and_listed(tmp_path, monkeypatch, capsys):
    (tmp_path / "own" / "metrics").mkdir(parents=True)
    path = tmp_path / "own" / "metrics" / "own_bad.py"
    path.write_text('"""Bad."""\nfrom fivetune.scores.metrics import Scores, Optionz\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIVETUNE_PLUGINS", "own")
    monkeypatch.setattr(fivetune.scores.metrics, "__path__", list(fivetune.scores.metrics.__path__))
    with pytest.raises(ConfigError, match=r"own_bad.py:2: ImportError: .*'Optionz'.* Correct the plugin"):
        plugins.load_plugin("metrics", "own_bad")
    assert main(["list", "metrics"]) == 0
    assert re.search(r"own_bad \(broken: .*own_bad.py:2:", " ".join(capsys.readouterr().out.split()))


def test_a_plugin_that_cannot_be_imported_is_named_with_its_line(tmp_path, monkeypatch):
    """Fault A4 DEFECT 8: an import error in a metric of one's own was an internal error."""
    (tmp_path / "metrics").mkdir()
    broken = tmp_path / "metrics" / "length_ratio.py"
    broken.write_text(
        '"""Lengths."""\n\nfrom __future__ import annotations\nfrom fivetune.scores.metrics import Options\n'
    )
    (tmp_path / "metrics" / "no_class.py").write_text('"""Nothing."""\n')
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(tmp_path))
    monkeypatch.setattr(fivetune.scores.metrics, "__path__", list(fivetune.scores.metrics.__path__))
    with pytest.raises(ConfigError) as caught:
        plugins.load_plugin("metrics", "length_ratio")
    assert str(caught.value).startswith(
        f"{broken}:4: ImportError: cannot import name 'Options' from 'fivetune.scores.metrics'"
    )
    with pytest.raises(ConfigError, match=r"no_class\.py: defines none\. Allowed is one class derived from"):
        plugins.load_plugin("metrics", "no_class")
    # Neither is named in place of a name that no metric has.
    with pytest.raises(UnknownPluginError, match="there is no 'zzz'"):
        fivetune.scores.metrics.load_metric("zzz")
