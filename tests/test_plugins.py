"""The folder is the registry: what is found, what is refused, and a plugin of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import fivetune.schedules
from fivetune import plugins
from fivetune.config import load_config
from fivetune.errors import UnknownPlugin

OWN = '''"""Up and down."""
from pydantic import Field
from fivetune.schedules import Warmup

class Wave(Warmup):
    """A wave."""
    height: float = Field(default=0.5, description="how high")

    def after(self, progress: float) -> float:
        return self.height
'''
EVERY = [(kind, name) for kind in plugins.KINDS for name in plugins.names(kind) if kind != "commands"]


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
    assert (plugins.module(kind, name).__doc__ or "").strip()
    if kind not in ("metrics", "sinks"):  # those have no options of their own to describe
        options = plugins.load(kind, name)
        assert options.plugin_name() == name
        assert options.__doc__
        assert options.model_config["frozen"] and options.model_config["extra"] == "forbid"


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_unknown_names(kind):
    with pytest.raises(UnknownPlugin) as caught:
        plugins.load(kind, "zzz")
    assert str(caught.value) == f"{kind}: there is no 'zzz'. Allowed: {', '.join(plugins.names(kind))}."


def test_a_plugin_of_ones_own_is_one_file(own_folder):
    assert plugins.names("schedules") == ["constant", "cosine", "linear", "wave"]
    recipe = {"model": {"path": "m"}, "task": "squad", "schedule": {"name": "wave", "height": 0.25, "warmup_steps": 1}}
    config = load_config(recipe)
    assert [config.schedule.factor(step, 3) for step in range(3)] == [1.0, 0.25, 0.25]
    assert config.as_dict()["schedule"]["name"] == "wave"
    assert load_config(config.as_dict()) == config


def test_options_are_frozen():
    options = plugins.load("schedules", "linear")()
    with pytest.raises(ValidationError, match="frozen"):
        options.final_fraction = 0.5
