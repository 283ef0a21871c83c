# %% [markdown]
# # Causal questions: before and after fine-tuning
#
# The fourth reference system fine-tunes UnifiedQA on CausalQA and compares its answers before and after. The records have the
# benchmark's columns; the inputs are UnifiedQA's: lower case, and a literal backslash-n between question and passage. Here: generated
# causes, t5-nano, a minute on a CPU.
#
# **The full system**: `fivetune train causalqa_unifiedqa`, which is
# `"model": {"path": "allenai/unifiedqa-v2-t5-base-1363200"}` with the CSV files of Webis-CausalQA-22.
# %%
import random

import pandas

import fivetune

draw = random.Random(0)
causes = ["the rain", "the wind", "a storm", "the frost", "a fire", "the heat", "a flood", "the snow"]
effects = [
    "the road closed",
    "the river rose",
    "the harvest failed",
    "the train stopped",
    "the bridge fell",
    "the school shut",
]
towns = ["Kesh", "Port Ferrand", "Upper Tarn", "Santa Brea", "Lake Mirren", "Old Rill"]


def make_record(number: int, towns: list[str]) -> dict:
    (cause, other), (effect, another) = draw.sample(causes, 2), draw.sample(effects, 2)
    town = draw.choice(towns)
    context = f"In {town}, {effect} because of {cause}, and {another} because of {other}."
    asked, answer = draw.choice([(effect, cause), (another, other)])
    subject, verb = asked.rsplit(" ", 1)
    question = f"Why is it that {subject} {verb} in {town}?"
    return {
        "id": str(number),
        "question": question,
        "question_processed": question.lower(),
        "context": context,
        "context_processed": context.lower(),
        "answer": f"{answer}\tbecause of {answer}",
    }


train = pandas.DataFrame([make_record(number, towns[:4]) for number in range(2000)])
held_out = pandas.DataFrame([make_record(number, towns[4:]) for number in range(2000, 2200)])  # of other towns
train[["question", "context", "answer"]].head(3)
# %%
recipe = {
    "run": {"dir": "runs/causalqa", "seed": 1},
    "model": {"path": "t5-nano"},
    "task": {"name": "causalqa"},
    "data": {"train": train, "eval": held_out, "max_input_tokens": 128, "max_target_tokens": 16},
    "optimizer": {"lr": 1e-2},
    "schedule": {"name": "linear", "warmup_steps": 20},
    "train": {"num_steps": 120, "batch_size": 32},
    "eval": {"every_steps": 60},
}
run = fivetune.train(recipe)
run
# %% [markdown]
# ## Before and after
#
# The model is evaluated before the first step too; both sets of answers are in the run directory.
# %%
first, best = run.evals[0], next(one for one in run.evals if one.step == run.step)
before = {one.id: one for one in run.read_predictions(first)}
after = {one.id: one for one in run.read_predictions(best)}
pandas.DataFrame(
    [
        {
            "inputs": after[key].inputs,
            "gold": after[key].references[0],
            "before": before[key].prediction,
            "after": after[key].prediction,
        }
        for key in list(after)[:5]
    ]
)
# %%
scores = pandas.DataFrame({"before": first.scores, "after": best.scores}).loc[["em", "f1", "rougeL_f1"]]
axes = scores.plot.barh(figsize=(7, 2.2), xlabel="score (%)", xlim=(0, 110), color=["grey", "C0"])
for bars in axes.containers:
    axes.bar_label(bars, fmt="%.1f", padding=3)
axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
axes.invert_yaxis()
axes.spines[["top", "right"]].set_visible(False)
# %% [markdown]
# The gold answers of a record are separated by tabs. Every one of them counts in the scores; the model learns the first, where the
# original system learnt all in one text.
