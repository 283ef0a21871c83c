"""The evaluations that a run has made, and the duration of the next one.

In: a run directory. Out: its records, a sentence for the log.
"""

from __future__ import annotations

from collections.abc import Callable

from fivetune import rundir
from fivetune.distributed.world import World
from fivetune.rundir import RunDir
from fivetune.rundir.layout import OWN_SPLITS
from fivetune.rundir.progress import format_time_span
from fivetune.rundir.records import EvalRecord

SECONDS_ANNOUNCED = 60.0  # from which on an evaluation is announced that is like the others of its run


def read_past_evals(run: RunDir, world: World) -> list[EvalRecord]:
    """The evaluations that rank 0 has written, on every rank; `truncate_after` names the damage of a resumed run."""
    found = rundir.read_evals(run.path, damage=rundir.Damage()) if world.is_first else []
    return world.broadcast_object(found)


def log_whole_evaluation(
    num_questions: int, run: RunDir, world: World, *, usual_limit: int | None, log: Callable[[str], object]
) -> None:
    """Announce an evaluation of all examples, with the time that it takes at the speed of the run's last one.

    Before the first evaluation nothing is known: its progress lines show the time after some answers. A short one that
    is like the others of its run is not announced.

    Args:
        usual_limit: eval.max_examples.
        log: called with the sentence, if there is one.
    """
    about = ""
    seconds = 0.0
    own = [one for one in read_past_evals(run, world) if one.split in OWN_SPLITS and one.num_examples]
    if own:
        seconds = own[-1].seconds * num_questions / own[-1].num_examples
        about = f", about {format_time_span(seconds)}"
    # An exception in a run that evaluates a subset, or long like the others.
    if usual_limit is not None and usual_limit < num_questions:
        log(f"evaluating all {num_questions:,} examples{about} (eval.final: subset leaves it out)")
    elif seconds >= SECONDS_ANNOUNCED:
        log(f"evaluating {num_questions:,} examples{about} (eval.max_examples limits it)")
