# %% [markdown]
# # From a CSV to answers
#
# A table of tickets becomes a classifier: train, look at the scores, ask it, score it on other data. The model is t5-nano, which
# FiveTune includes, so that this takes less than a minute on a CPU. With `"model": {"path": "google-t5/t5-small"}` it is the full
# system; nothing else changes.
# %%
import itertools

import pandas

import fivetune

late = [
    "where is my parcel",
    "my parcel is late",
    "the courier never came",
    "nothing has arrived",
    "it is still not here",
]
money = ["i want my money back", "please refund my order", "give me a refund", "return the payment", "when am i repaid"]
broken = [
    "the screen is cracked",
    "it does not turn on",
    "the handle broke off",
    "it stopped working",
    "a part is broken",
]
starts = ["", "hello, ", "hi! ", "again: ", "urgent: ", "please help: ", "third mail: ", "good morning, "]

rows = [
    {"text": start + text, "category": category}
    for category, texts in {"delivery": late, "refund": money, "repair": broken}.items()
    for start, text in itertools.product(starts, texts)
]
tickets = pandas.DataFrame(rows).sample(frac=1, random_state=0, ignore_index=True)
tickets.to_csv("tickets.csv", index=False)
tickets.head()
# %% [markdown]
# ## Train
#
# A recipe says what to train on what. The labels are read from the column. `data.eval_share` holds a fifth of the texts back;
# `fivetune new tickets.csv` writes such a recipe for a table of yours.
# %%
recipe = {
    "run": {"dir": "runs/tickets", "seed": 1},
    "model": {"path": "t5-nano"},
    "task": {"name": "classification", "inputs": "ticket: {text}", "label": "category"},
    "data": {"train": "tickets.csv", "eval_share": 0.2},
    "optimizer": {"lr": 1e-2},
    "train": {"num_steps": 120, "batch_size": 16},
    "eval": {"every_steps": 40},
}
run = fivetune.train(recipe)
run
# %% [markdown]
# A score is a number with a 95 % interval. With so few examples the interval is wide: another split could give another score.
# %%
run.scores["accuracy"], run.scores["accuracy"].low
# %% [markdown]
# ## Ask
#
# The model is loaded at the first question. The task reads one column, so a text will do; a list of records or a DataFrame works too.
# %%
questions = ["hello, the parcel has not come", "i would like a refund", "the new lamp is cracked"]
answers = run.predict(questions)
pandas.DataFrame(
    {"text": questions, "answer": [a.prediction for a in answers], "confidence": [a.confidence for a in answers]}
)
# %% [markdown]
# ## Score it on other data
#
# A DataFrame is data too, here and in `train`. The scores are recorded in the run directory with the predictions.
# %%
others = pandas.DataFrame(
    {"text": ["parcel late again", "money back now", "cracked"], "category": ["delivery", "refund", "repair"]}
)
run.evaluate(others, split="others").scores["accuracy"]
# %% [markdown]
# ## The report
#
# One page with the verdict, the curves, the data and every answer; it stands in the cell and in `runs/tickets/report.html`.
# %%
run.report()
# %% [markdown]
# Later, or in another program: `run = fivetune.open_run("runs/tickets")`. On the command line: `fivetune predict runs/tickets
# --input new.csv --output answers.csv`. If you stop training (the stop button of the notebook), it is saved, and the error says how
# to go on.
