"""FiveTune fine-tunes the T5 family: one command from text to an official score, a model and a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivetune.config import RunConfig, load_config
    from fivetune.training import train

__version__ = "0.1.0"
__all__ = ["RunConfig", "__version__", "load_config", "train"]

_PLACES = {"train": "fivetune.training", "load_config": "fivetune.config", "RunConfig": "fivetune.config"}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first asked for: `import fivetune` stays without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module 'fivetune' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
