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


def make_record(number: int) -> dict:
    (cause, other), (effect, another) = draw.sample(causes, 2), draw.sample(effects, 2)
    context = f"{effect.capitalize()} because of {cause}. {another.capitalize()} because of {other}."
    asked, answer = draw.choice([(effect, cause), (another, other)])
    subject, verb = asked.rsplit(" ", 1)
    question = f"Why is it that {subject} {verb}?"
    return {
        "id": str(number),
        "question": question,
        "question_processed": question.lower(),
        "context": context,
        "context_processed": context.lower(),
        "answer": f"{answer}\tbecause of {answer}",
    }


table = pandas.DataFrame([make_record(number) for number in range(2200)])
table[["question", "context", "answer"]].head(3)
# %%
recipe = {
    "run": {"dir": "runs/causalqa", "seed": 1},
    "model": {"path": "t5-nano"},
    "task": {"name": "causalqa"},
    "data": {"train": table[:2000], "eval": table[2000:], "max_input_tokens": 128, "max_target_tokens": 16},
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
pandas.DataFrame({"before": first.scores, "after": best.scores}).round(1)
# %% [markdown]
# The gold answers of a record are separated by tabs. Every one of them counts in the scores; the model learns the first, where the
# original system learnt all in one text.
