"""FiveTune as an estimator of scikit-learn: classifies texts, in pipelines, cross-validation and grid search.

In: texts, or tables whose rows become texts, and their classes. Out: classes and their probabilities. scikit-learn is
the extra `sklearn`; only this module imports it.
"""

# scikit-learn has no types.
# pyright: basic

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

import fivetune
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.installation import name_install

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError:
    raise FiveTuneEnvironmentError(
        f"fivetune.sklearn: the package scikit-learn is missing. Install it: {name_install('sklearn')}"
    ) from None

MAX_SEED = 2**31


class FiveTuneClassifier(ClassifierMixin, BaseEstimator):
    """A T5 model that is fine-tuned to name the class of a text.

    Args:
        model: folder or hub name of the model; t5-nano is part of FiveTune.
        num_epochs: passes over the training data; None: train.num_steps of `settings`.
        learning_rate: peak rate; None: the optimizer's own.
        batch_size: examples of an optimizer step; None: the recipe's default.
        random_state: seed of the order of the data and of dropout.
        settings: further dotted settings of the recipe: {"device": "cpu", "train.precision": "fp32"}.
        run_dir: run directory of the fit; a later fit moves it aside. None: a temporary folder, which is removed with
            the estimator, or stays if the estimator is pickled. A pickle holds the path of the run, not its weights:
            give a run_dir where it must outlive the machine's temporary files.

    Attributes:
        classes_: the classes, sorted; the columns of `predict_proba`.
        run_: the TrainedRun, with its records, its report and all else that a run has.

    >>> texts = ["red hat", "blue hat", "red coat", "blue coat"] * 4
    >>> classifier = FiveTuneClassifier("t5-nano", num_epochs=2, learning_rate=1e-2, settings={"device": "cpu"})
    >>> classifier.fit(texts, ["red", "blue"] * 8).predict(["a blue shoe"])
    array(['blue'], dtype='<U4')
    """

    def __init__(
        self,
        model: str = "google-t5/t5-small",
        *,
        num_epochs: float | None = 3,
        learning_rate: float | None = None,
        batch_size: int | None = None,
        random_state: Any = 0,
        settings: Mapping[str, object] | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        self.model = model
        self.num_epochs = num_epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.random_state = random_state
        self.settings = settings
        self.run_dir = run_dir

    def fit(self, X: Any, y: Any) -> FiveTuneClassifier:
        """Fine-tune the model.

        Args:
            X: N texts, or a table of N rows: the text of a row is `name: value` of each of its columns.
            y: N classes: texts, numbers or truth values.

        Returns the estimator. Raises ValueError for other inputs, and the errors of `fivetune.train`.
        """
        if y is None:
            raise ValueError("fit requires y to be passed, but the target y is None. Give a class for each text.")
        texts = self._read_texts(X, y)
        check_consistent_length(texts, y)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, places = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}. Allowed are two or more.")
        names = [str(name) for name in self.classes_]
        records = [{"text": text, "label": names[place]} for text, place in zip(texts, places, strict=True)]
        folder = self.run_dir
        if folder is None:
            parent = tempfile.mkdtemp(prefix="fivetune-classifier-")
            self._removal = weakref.finalize(self, shutil.rmtree, parent, ignore_errors=True)
            folder = Path(parent, "run")
        changes = {
            "run.seed": int(check_random_state(self.random_state).randint(MAX_SEED)),
            "run.dir": str(folder),
            "train.num_epochs": self.num_epochs,
            "train.batch_size": self.batch_size,
            "optimizer.lr": self.learning_rate,
            **(self.settings or {}),
        }
        recipe = {
            "model": {"path": self.model},
            "task": {
                "name": "classification",
                "inputs": "{text}",
                "label": "label",
                "labels": dict(zip(names, names, strict=True)),
            },
            "data": {"train": records},
            "eval": {"score_labels": True},
        }
        given = {name: value for name, value in changes.items() if value is not None}
        self.run_ = fivetune.train(recipe, given, overwrite=True, preflight=False, quiet=True)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, in the order of `classes_`: float64 of shape (N, classes).

        Raises ValueError for a text that cannot be answered, such as an empty one.
        """
        check_is_fitted(self)
        places = {str(name): place for place, name in enumerate(self.classes_)}
        answers = self.run_.predict([{"text": text} for text in self._read_texts(X)])
        found = np.zeros((len(answers), len(places)))
        for row, one in enumerate(answers):
            if one.skipped:
                raise ValueError(f"X[{row}]: {one.skipped}")
            for candidate in one.candidates:
                found[row, places[candidate.text]] = candidate.score
        return found / found.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each text; errors as of `predict_proba`."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]

    def _read_texts(self, X: Any, y: Any = None) -> list[str]:
        """Return the texts; of a table a text per row. y is given to `fit` alone."""
        given = X if isinstance(X, list) else np.asarray(X, dtype=object)
        if np.ndim(given) == 1 and len(given) and all(isinstance(one, str) for one in given):
            return [str(one) for one in given]
        if np.ndim(given) == 1 and any(isinstance(one, str) for one in given):
            row, value = next((row, one) for row, one in enumerate(given) if not isinstance(one, str))
            cause = "an empty text" if value is None or value != value else f"no text ({type(value).__name__})"
            raise ValueError(
                f"X[{row}]: {value!r} is {cause}. Allowed are texts. Write it as text, or leave the row out."
            )
        fits: dict[str, Any] = {} if y is None else {"y": y}
        table: Any = validate_data(
            self, cast("Any", X), reset=bool(fits), dtype=None, ensure_all_finite="allow-nan", **fits
        )
        if fits:
            table = table[0]
        names = getattr(self, "feature_names_in_", [f"x{place}" for place in range(table.shape[1])])
        texts: list[str] = []
        for row in table:
            cells = [f"{name}: {value}" for name, value in zip(names, row, strict=True) if value == value]  # no NaN
            texts.append(" ".join(cells))
        return texts

    def __getstate__(self) -> dict[str, Any]:
        state = dict(cast("dict[str, Any]", super().__getstate__()))
        if removal := state.pop("_removal", None):
            removal.detach()  # the copy needs the folder
        if run := state.pop("run_", None):
            state["_folder"] = run.folder
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        folder = state.pop("_folder", None)
        super().__setstate__(state)
        if folder:
            self.run_ = fivetune.open_run(folder)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.allow_nan = True
        return tags
