"""What device tpu supports. In: the settings of a recipe as a table. Out: the first unsupported one with advice."""

from __future__ import annotations

from fivetune.plugins import list_plugins, load_plugin
from fivetune.types import JsonTable
from fivetune.values import get_nested

SUPPORTED: dict[str, tuple[object, ...]] = {
    "model.freeze": ((), []),
    "model.unfreeze": ({},),
    "model.adapter": (None,),
    "train.param_groups": ((), []),
    "train.layer_decay": (None,),
    "train.ema": (None,),
    "loss.label_smoothing": (0.0,),
    "loss.z_loss": (0.0,),
    "loss.class_weights": ({},),
    "loss.r_drop": (0.0,),
    "distill.teacher": (None,),
    "launch.nnodes": (1,),
    "launch.nproc": (1,),  # one process uses all chips of the machine
    "train.forward": ("auto", "buckets"),
    "train.precision": ("auto", "bf16", "fp32"),
    "train.recompute": (False,),
    "train.capture": ("auto", "off"),
    "eval.num_beams": (1,),
    "eval.repetition_penalty": (1.0,),
    "eval.no_repeat_ngram_size": (0,),
    "eval.temperature": (0.0,),
}
PLUGINS = {"optimizer": "optimizers", "strategy": "strategies"}
"""Section -> kind of its plugin, which has a field `supports_tpu`."""
ANSWERING = (  # also of a trained run
    "train.precision", "eval.num_beams", "eval.repetition_penalty", "eval.no_repeat_ngram_size", "eval.temperature",
)  # fmt: skip


def explain_unsupported_tpu(settings: JsonTable, *, for_training: bool = True) -> str:
    """Explain which setting device tpu does not support, beginning with its key; empty if it supports all.

    Args:
        for_training: False if the run is trained, so that only the settings of its answers count.

    >>> explain_unsupported_tpu({"eval": {"num_beams": 4}})
    'eval.num_beams 4 is not supported with device tpu. Use 1'
    """
    for key, allowed in SUPPORTED.items():
        if not for_training and key not in ANSWERING:
            continue
        section, name = key.split(".")
        value = settings.get(section, {}).get(name, allowed[0])
        if value not in allowed:
            shown = " or ".join(str(one).lower() for one in allowed)
            value = get_nested(settings, section, name, "name") or value
            return f"{key} {str(value).lower()} is not supported with device tpu. Use {shown}"
    for section, kind in PLUGINS.items() if for_training else ():
        name = get_nested(settings, section, "name")
        if isinstance(name, str) and not load_plugin(kind, name).supports_tpu:
            allowed = [one for one in list_plugins(kind) if load_plugin(kind, one).supports_tpu]
            return f"{section}.name {name} is not supported with device tpu. Use {' or '.join(allowed)}"
    if for_training and settings.get("train", {}).get("batch_size") == "auto":
        return "train.batch_size auto is measured by torch, not with device tpu. Set a number"
    return ""
