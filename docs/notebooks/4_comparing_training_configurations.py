# %% [markdown]
# # Comparing training configurations
#
# The third reference system compares configurations (workers, 16 bit, devices, model size) on BioASQ and GSM8K by their last
# validation loss. What such a comparison needs: the same examples in the same number of steps, the best evaluation and not the last,
# an interval, and a check that all runs did the same work. Here: sums in the format of GSM8K, t5-nano, two learning rates and a frozen
# encoder, a minute on a CPU.
#
# **The full system**: `fivetune compare recipes/compare/system_c.yaml` with its nine configurations; GSM8K itself is
# `fivetune train gsm8k`, BioASQ `fivetune train bioasq_factoid`, with `"model": {"path": "google-t5/t5-base"}`.
# %%
import random

import fivetune

draw = random.Random(0)


def make_record(number: int, names: list[str]) -> dict:
    who, thing = draw.choice(names), draw.choice(["apples", "books", "coins"])
    first, second = draw.randint(1, 4), draw.randint(1, 4)
    question = f"{who} has {first} {thing} and gets {second} more. How many {thing} does {who} have?"
    return {
        "id": f"q{number}",
        "question": question,
        "answer": f"{first}+{second} = {first + second}\n#### {first + second}",
    }


train = [make_record(number, ["Ann", "Bob", "Cid", "Eve"]) for number in range(1000)]
held_out = [make_record(number, ["Dan", "Fay"]) for number in range(1000, 1200)]  # other names, the same sums
recipe = {
    "model": {"path": "t5-nano"},
    "task": {"name": "gsm8k", "target": "number"},
    "data": {"train": train, "eval": held_out, "max_input_tokens": 64, "max_target_tokens": 8},
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "train": {"num_steps": 80, "batch_size": 32, "precision": "fp32", "num_threads": 1},
    "eval": {"every_steps": 40},
    "run": {"seed": 1},
}
variants = {
    "base": {},
    "lower-lr": {"optimizer.lr": 3e-4},
    "frozen-encoder": {"model.freeze": ["encoder"]},
}
runs = {
    name: fivetune.train(recipe, {"run.dir": f"runs/{name}", **changes}, quiet=True)
    for name, changes in variants.items()
}
# %% [markdown]
# The lists of records have the same content, so all runs name the same two files:
# %%
{run.config["data"]["train"][0] for run in runs.values()}
# %% [markdown]
# ## The comparison
#
# `compare_runs` refuses to compare silently what did different work: `warnings` lists differences in data, steps, machine and settings.
# %%
comparison = fivetune.compare_runs([run.folder for run in runs.values()])
comparison.warnings
# %%
import pandas

pandas.DataFrame(
    [
        {
            "configuration": name,
            "accuracy": repr(run.scores["accuracy"]),
            "best step": run.step,
            "loss, first to last": f"{run.steps[0].loss:.2f} to {run.steps[-1].loss:.2f}",
            "seconds": round(run.status.seconds, 1),
        }
        for name, run in runs.items()
    ]
)
# %% [markdown]
# Losses of the steps, and the accuracy with its 95 % interval: where two intervals overlap, more examples or seeds have to decide.
# %%
import matplotlib.pyplot as plt

_, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for place, (name, run) in enumerate(runs.items()):
    losses = pandas.Series({step.step: step.loss for step in run.steps})
    losses.rolling(10, min_periods=1).mean().plot(ax=left, label=name, xlabel="step", ylabel="training loss")
    score = run.scores["accuracy"]
    right.errorbar(score, place, xerr=[[score - score.low], [score.high - score]], fmt="o", capsize=3)
left.legend(frameon=False)
right.set(yticks=range(len(runs)), yticklabels=runs, xlabel="accuracy (%)")
right.invert_yaxis()
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
# %% [markdown]
# `fivetune compare runs/base runs/lower-lr` writes the page of it, with paired intervals. One run per configuration says nothing about
# the spread between seeds: `seeds: [0, 1, 2]` in a sweep does.
