"""The folder is the registry: what is found, what is refused, and a plugin of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import fivetune.metrics
import fivetune.schedules
from fivetune import plugins
from fivetune.config import load_config
from fivetune.errors import ConfigError, UnknownPluginError

OWN = '''"""Up and down."""
from pydantic import Field
from fivetune.schedules import Warmup

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
    monkeypatch.setattr(fivetune.schedules, "__path__", list(fivetune.schedules.__path__))
    yield tmp_path
    sys.modules.pop("fivetune.schedules.wave", None)
    vars(fivetune.schedules).pop("wave", None)


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_plugin_says_what_it_is(kind, name):
    assert (plugins.import_plugin(kind, name).__doc__ or "").strip()
    if kind not in ("metrics", "sinks"):  # those have no options of their own to describe
        options = plugins.load_plugin(kind, name)
        assert options.plugin_name() == name
        assert options.__doc__
        assert options.model_config["frozen"] and options.model_config["extra"] == "forbid"


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_unknown_names(kind):
    with pytest.raises(UnknownPluginError) as caught:
        plugins.load_plugin(kind, "zzz")
    assert str(caught.value) == f"{kind}: there is no 'zzz'. Allowed: {', '.join(plugins.list_plugins(kind))}."


def test_a_plugin_of_ones_own_is_one_file(own_folder):
    assert plugins.list_plugins("schedules") == ["constant", "cosine", "linear", "wave"]
    recipe = {"model": {"path": "m"}, "task": "squad", "schedule": {"name": "wave", "height": 0.25, "warmup_steps": 1}}
    config = load_config(recipe)
    assert [config.schedule.factor(step, 3) for step in range(3)] == [1.0, 0.25, 0.25]
    assert config.as_dict()["schedule"]["name"] == "wave"
    assert load_config(config.as_dict()) == config


def test_options_are_frozen():
    options = plugins.load_plugin("schedules", "linear")()
    with pytest.raises(ValidationError, match="frozen"):
        options.final_fraction = 0.5


def test_a_plugin_that_cannot_be_imported_is_named_with_its_line(tmp_path, monkeypatch):
    """Fault A4 DEFECT 8: an import error in a metric of one's own was an internal error."""
    (tmp_path / "metrics").mkdir()
    broken = tmp_path / "metrics" / "length_ratio.py"
    broken.write_text('"""Lengths."""\n\nfrom __future__ import annotations\nfrom fivetune.metrics import Options\n')
    (tmp_path / "metrics" / "no_class.py").write_text('"""Nothing."""\n')
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(tmp_path))
    monkeypatch.setattr(fivetune.metrics, "__path__", list(fivetune.metrics.__path__))
    with pytest.raises(ConfigError) as caught:
        plugins.load_plugin("metrics", "length_ratio")
    assert str(caught.value).startswith(
        f"{broken}:4: ImportError: cannot import name 'Options' from 'fivetune.metrics'"
    )
    with pytest.raises(ConfigError, match=r"no_class\.py: defines none\. Allowed is one class derived from"):
        plugins.load_plugin("metrics", "no_class")
