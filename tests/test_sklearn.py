"""FiveTune as an estimator of scikit-learn: its contract, in pipelines and searches, and its pickles."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from fivetune.sklearn import FiveTuneClassifier

SETTINGS = {"device": "cpu", "train.num_threads": 1, "train.precision": "fp32"}
TEXTS = [f" {colour} thing {i}" for i in range(4) for colour in ("red", "blue", "green")]
COLOURS = [text.split()[0] for text in TEXTS]
EXPECTED_FAILED_CHECKS = {
    "check_classifiers_train": "asks for 83 % accuracy on blobs of numbers, which a language model reads as digits",
    "check_methods_subset_invariance": "probabilities of a text in batches of other sizes differ by rounding in fp32",
}


def make(**changes: Any) -> FiveTuneClassifier:
    given: dict[str, Any] = {"num_epochs": 2, "learning_rate": 1e-2, "batch_size": 6, "settings": SETTINGS}
    return FiveTuneClassifier("t5-nano", **{**given, **changes})


@pytest.fixture(scope="module")
def fitted() -> FiveTuneClassifier:
    return make().fit(TEXTS, COLOURS)


def test_classes_and_probabilities_are_in_one_order(fitted: FiveTuneClassifier) -> None:
    assert [*fitted.classes_] == ["blue", "green", "red"] and fitted.score(TEXTS, COLOURS) == 1
    found = fitted.predict_proba(np.array(TEXTS[:2]))
    assert found.shape == (2, 3) and found.sum(axis=1) == pytest.approx(1) and [*found.argmax(axis=1)] == [2, 0]
    assert fitted.run_.status.state == "finished"
    with pytest.raises(ValueError, match=r"^X\[1\]: text is empty"):
        fitted.predict(["a red thing", ""])


def test_a_pickle_and_a_clone(fitted: FiveTuneClassifier) -> None:
    other = pickle.loads(pickle.dumps(fitted))  # noqa: S301
    assert (other.predict_proba(TEXTS[:2]) == fitted.predict_proba(TEXTS[:2])).all()
    assert clone(fitted).get_params() == fitted.get_params() and not hasattr(clone(fitted), "run_")


def test_a_temporary_run_goes_with_its_estimator_and_a_named_one_stays(tmp_path: Path) -> None:
    one = make(num_epochs=1).fit(TEXTS[:4], COLOURS[:4])
    folder = one.run_.folder
    assert folder.is_dir()
    del one
    assert not folder.exists()
    table = np.array([[text, number] for number, text in enumerate(TEXTS[:4])], dtype=object)
    named = make(num_epochs=1, run_dir=tmp_path / "run").fit(table, [True, False, False, True])
    assert named.n_features_in_ == 2 and named.predict(table).dtype == bool
    assert named.run_.folder == tmp_path / "run"
    [table_file] = (tmp_path / "tables").glob("train-*.jsonl")
    assert '"x0:  red thing 0 x1: 0"' in table_file.read_text()


@pytest.mark.release
@pytest.mark.parametrize("value, cause", [(None, "an empty text"), (float("nan"), "an empty text"), (3, "no text")])
def test_what_is_no_text_among_texts_is_named(value: object, cause: str) -> None:
    pd = pytest.importorskip("pandas")
    for texts in (["a", value, "b"], pd.Series(["a", value, "b"], dtype=object)):
        with pytest.raises(ValueError, match=rf"X\[1\]: \S+ is {cause}"):
            make().fit(texts, ["x", "y", "x"])


def test_pipelines_cross_validation_and_grid_search() -> None:
    pipeline = make_pipeline(FunctionTransformer(lambda texts: [text.strip() for text in texts]), make())
    assert cross_val_score(pipeline, TEXTS, COLOURS, cv=2).mean() > 0.9
    search = GridSearchCV(make(num_epochs=1), {"learning_rate": [1e-9, 1e-2]}, cv=2).fit(TEXTS, COLOURS)
    assert len(search.cv_results_["mean_test_score"]) == 2 and search.predict(TEXTS[:1]) == ["red"]


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_s_own_checks() -> None:
    """About 100 fits of one step."""
    one_step = {**SETTINGS, "train.num_steps": 1, "data.max_input_tokens": 16, "data.overlong": "truncate"}
    estimator = make(num_epochs=None, batch_size=4, settings=one_step)
    results = check_estimator(estimator, expected_failed_checks=EXPECTED_FAILED_CHECKS)
    assert {one["check_name"] for one in results if one["status"] == "xfail"} <= {*EXPECTED_FAILED_CHECKS}
