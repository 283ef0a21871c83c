"""The evaluations that a run has made, and the duration of the next one.

In: a run directory. Out: its records, a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune import rundir
from fivetune.distributed.world import World
from fivetune.progress import format_time_span
from fivetune.rundir import RunDir
from fivetune.rundir.layout import OWN_SPLITS
from fivetune.rundir.records import EvalRecord


def read_past_evals(run: RunDir, world: World) -> list[EvalRecord]:
    """The evaluations that rank 0 has written, on every rank; `truncate_after` names the damage of a resumed run."""
    found = rundir.read_evals(run.path, on_damage=lambda text: None) if world.is_first else []
    return world.broadcast_object(found)


def describe_whole_evaluation(num_questions: int, past: Sequence[EvalRecord]) -> str:
    """Announce an evaluation of all examples, with the time that it takes at the speed of the run's last one.

    Before the first evaluation nothing is known: its progress lines show the time after some answers.
    """
    about = ""
    if own := [one for one in past if one.split in OWN_SPLITS and one.num_examples]:
        about = f", about {format_time_span(own[-1].seconds * num_questions / own[-1].num_examples)}"
    return f"evaluating all {num_questions:,} examples{about} (eval.final: subset leaves it out)"
