"""Builds the objective of a run from the section `loss`, the labels of its task and the counts of its training set.

In: a RunConfig, a tokenizer, counts of labels. Out: the weights of the labels, and the Objective of the run's Forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from torch import nn

from fivetune.config import RunConfig
from fivetune.config.loss import LossSection
from fivetune.data.store.encode import LengthLimits, encode
from fivetune.errors import ConfigError, suggest_names
from fivetune.model.objective import Objective
from fivetune.tasks import normalize_label
from fivetune.types import JsonTable, TextExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_LISTED = 8  # labels whose weights a line lists; plan.json has all


def compute_class_weights(
    given: Mapping[str, float] | Literal["balanced"], labels: Mapping[str, str], counts: Mapping[str, int]
) -> dict[str, float]:
    """The weight of every label; {} if none is given. Case and white space of the names are ignored.

    Args:
        labels: label -> target word. counts: examples of each label in the training set.

    `balanced` has scikit-learn's weights: n / (k * count) over the k labels that occur; a label without examples has 1.
    Raises ConfigError for a name that is no label.

    >>> compute_class_weights("balanced", {"no": "no", "yes": "yes"}, {"no": 3, "yes": 1})
    {'no': 0.6666666666666666, 'yes': 2.0}
    >>> compute_class_weights("balanced", {"no": "no", "rare": "rare", "yes": "yes"}, {"no": 3, "rare": 0, "yes": 1})
    {'no': 0.6666666666666666, 'rare': 1.0, 'yes': 2.0}
    >>> compute_class_weights({"Yes": 3.0}, {"no": "no", "yes": "yes"}, {})
    {'no': 1.0, 'yes': 3.0}
    """
    weights = dict.fromkeys(labels, 1.0)
    if given == "balanced":
        seen = {label: counts[label] for label in labels if counts.get(label)}
        total = sum(seen.values())
        for label, count in seen.items():
            weights[label] = total / (len(seen) * count)
        return weights
    if not given:
        return {}
    # Names as people write them in a recipe: case and white space do not count.
    known = {normalize_label(label): label for label in labels}
    for name, weight in given.items():
        label = known.get(normalize_label(name))
        if label is None:
            raise ConfigError(f"loss.class_weights: {name!r} is not a label of the task. {suggest_names(name, labels)}")
        weights[label] = weight
    return weights


def describe_loss(section: LossSection, label_weights: Mapping[str, float]) -> str:
    """The options that are on, with the weights of at most MAX_LISTED labels; "" for the plain loss.

    >>> describe_loss(LossSection(z_loss=1e-4, class_weights="balanced"), {"no": 2 / 3, "yes": 2.0})
    'z_loss 0.0001, class_weights (no 0.667, yes 2)'
    """
    listed = [f"{label} {weight:.3g}" for label, weight in label_weights.items()]
    if len(listed) > MAX_LISTED:
        listed = [*listed[:MAX_LISTED], "..."]
    options: list[str] = []
    for name in section.used:
        if name == "class_weights":
            options.append(f"{name} ({', '.join(listed)})")
        else:
            options.append(f"{name} {getattr(section, name):g}")
    return ", ".join(options)


def weigh_labels(config: RunConfig, counts: Mapping[str, int]) -> dict[str, float]:
    """The weight of every label of the task by loss.class_weights; {} without. Raises ConfigError for unknown labels.

    Args:
        counts: examples of each label in the training set.
    """
    return compute_class_weights(config.loss.class_weights, config.task.labels or {}, counts)


def has_dropout(model: nn.Module) -> bool:
    """Whether a model drops values in training: by a module, or with a rate that is an attribute, as Bart's."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return True
        for name, rate in vars(module).items():
            if name.endswith("dropout") and isinstance(rate, float) and rate > 0:
                return True
    return False


def build_objective(
    config: RunConfig, model: nn.Module, tokenizer: PreTrainedTokenizerBase, summary: JsonTable
) -> tuple[Objective, dict[str, float]]:
    """Build the objective of a run; returns it and the weights of the labels.

    Args:
        summary: facts of the training set, as in data.json.

    Raises ConfigError for R-Drop without dropout, and for labels whose targets are equal within data.max_target_tokens.
    """
    section = config.loss
    labels = config.task.labels or {}
    label_weights = weigh_labels(config, summary.get("label_counts", {}))
    if section.r_drop and not has_dropout(model):
        raise ConfigError(
            f"loss.r_drop {section.r_drop:g}: it compares two passes with different dropout, and this model has none "
            "(model.dropout null keeps the checkpoint's). Set model.dropout: 0.1, or remove loss.r_drop."
        )
    # The loss knows a label by the token ids of its target word, encoded as the training targets are.
    words = [labels[label] for label in label_weights]
    targets: list[tuple[int, ...]] = []
    if words:  # some tokenizers refuse an empty list
        examples = [TextExample("", "", word, ()) for word in words]
        limits = LengthLimits(max_target_tokens=config.data.max_target_tokens)
        targets = [tuple(row.labels) for row in encode(tokenizer, examples, words, limits=limits)]
    # Two labels with one target could not be weighted differently.
    for number, target in enumerate(targets):
        if target in targets[:number]:
            raise ConfigError(
                f"loss.class_weights: the targets {words[targets.index(target)]!r} and {words[number]!r} have the same "
                "tokens, so their weights cannot differ. Choose other words in task.labels, or raise "
                "data.max_target_tokens."
            )
    objective = Objective(
        label_smoothing=section.label_smoothing,
        z_loss=section.z_loss,
        r_drop=section.r_drop,
        class_weights=dict(zip(targets, label_weights.values(), strict=True)),
    )
    return objective, label_weights
