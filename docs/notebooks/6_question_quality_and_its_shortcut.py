# %% [markdown]
# # Question quality, and a shortcut in the data
#
# The fifth reference system classifies Stack Overflow questions as good (`HQ`), to be edited (`LQ_EDIT`) or to be closed
# (`LQ_CLOSE`). In that data one class is raw text and the others are HTML: a model that sees the markup separates that class without
# reading the question. Here: generated posts with the same flaw, t5-nano, a minute on a CPU.
#
# **The full system**: `fivetune train stackoverflow_quality`, which is `"model": {"path": "google-t5/t5-base"}` with the 60,000 posts.
# %%
import random

import matplotlib.pyplot as plt
import pandas

import fivetune

draw = random.Random(0)
topics = ["a list", "a loop", "a string", "a table", "a file", "a date", "a thread", "a query"]
tools = ["python", "java", "c sharp", "sql", "javascript"]
good = "I tried to sort {topic} in {tool}. This is my code and this is the error. What is wrong?"
close = "Which book about {topic} in {tool} is the best? Please recommend one."
labels = ["HQ", "LQ_EDIT", "LQ_CLOSE"]


def make_record(number: int, topics: list[str]) -> dict:
    label = draw.choice(labels)
    text = (good if label == "HQ" or (label == "LQ_EDIT" and draw.random() < 0.5) else close).format(
        topic=draw.choice(topics), tool=draw.choice(tools)
    )
    body = text if label == "LQ_EDIT" else f"<p>{text}</p>"
    return {"Id": str(number), "Title": f"question {draw.randint(1, 99)}", "Body": body, "Tags": "<a>", "Y": label}


posts = pandas.DataFrame([make_record(number, topics[:5]) for number in range(1200)])
held_out = pandas.DataFrame([make_record(number, topics[5:]) for number in range(1200, 1500)])  # on other topics
posts.groupby("Y")["Body"].first().to_frame()
# %% [markdown]
# `markup: False`, the default, removes the tags; `True` trains the shortcut. T5 has no piece for `<`: it becomes an unknown token.
# %%
recipe = {
    "model": {"path": "t5-nano"},
    "task": {"name": "stackoverflow_quality"},
    "data": {"train": posts, "eval": held_out, "max_input_tokens": 128, "max_target_tokens": 8},
    "optimizer": {"lr": 1e-2},
    "train": {"num_steps": 160, "batch_size": 32},
    "eval": {"every_steps": 80},
    "run": {"seed": 1},
}
honest = fivetune.train(recipe, {"run.dir": "runs/honest"})
# %%
shortcut = fivetune.train(recipe, {"run.dir": "runs/shortcut", "task.markup": True}, quiet=True)
pandas.DataFrame({"without markup": honest.scores, "with markup": shortcut.scores}).loc[["accuracy", "macro_f1"]]


# %% [markdown]
# The gain is the shortcut: `LQ_EDIT` is the class that gains, and a raw text is taken for it whatever it says.
# %%
def count_answers(run: fivetune.TrainedRun) -> pandas.DataFrame:
    best = next(one for one in run.evals if one.step == run.step)
    answers = [{"gold": one.references[0], "answer": one.prediction} for one in run.read_predictions(best)]
    counts = pandas.DataFrame(answers).value_counts(["gold", "answer"]).unstack(fill_value=0)
    return counts.reindex(index=labels, columns=labels, fill_value=0)


_, both = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for axes, (name, run) in zip(both, {"without markup": honest, "with markup": shortcut}.items()):
    counts = count_answers(run)
    axes.imshow(counts.div(counts.sum(axis=1), axis=0), cmap="Blues", vmin=0, vmax=1)
    for row, gold in enumerate(counts.index):
        for column, answer in enumerate(counts.columns):
            number = counts.loc[gold, answer]
            dark = number > counts.loc[gold].sum() / 2
            axes.text(column, row, number, ha="center", va="center", color="white" if dark else "black")
    axes.set(title=name, xlabel="answer", ylabel="gold", xticks=range(3), yticks=range(3))
    axes.set(xticklabels=labels, yticklabels=labels)
