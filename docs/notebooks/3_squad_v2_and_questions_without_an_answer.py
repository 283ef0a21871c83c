# %% [markdown]
# # SQuAD 2.0: questions with and without an answer
#
# The second reference system trains t5-small on SQuAD 2.0, where half of the questions have no answer in the text. Its overall score
# rose while the answers got worse, because the model learnt to abstain; so both halves are looked at here. t5-nano and a generated
# corpus in the official format take a minute on a CPU.
#
# **The full system**: `fivetune train squad_v2 --data.train train-v2.0.json --data.eval dev-v2.0.json`, which is
# `"model": {"path": "google-t5/t5-small"}` with the official files.
# %%
import fivetune
from fivetune.data.corpus.reading import write_quickstart_corpus

train, held_out = write_quickstart_corpus()
recipe = fivetune.load_config(
    "quickstart",
    {"run.dir": "runs/squad_v2", "train.num_steps": 500, "eval.every_steps": 100, "report.beside": []},
)
run = fivetune.train(recipe)
run
# %% [markdown]
# ## Both halves
#
# `HasAns` are the questions with an answer, `NoAns` those without. Step 0 is the model before training. To leave a question unanswered
# is learnt before finding the answer: the curve of `NoAns` is above that of `HasAns`, and the score of all, their mean, hides it.
# %%
import pandas

names = ["exact", "f1", "HasAns_exact", "NoAns_exact"]
evals = pandas.DataFrame([{"step": one.step, **{name: one.scores[name] for name in names}} for one in run.evals])
evals = evals.drop_duplicates("step").set_index("step").sort_index()
axes = evals.plot(figsize=(7, 3), ylabel="score (%)", ylim=(-3, 103), style=["k-", "k--", "C0.-", "C1.-"])
axes.spines[["top", "right"]].set_visible(False)
# %%
evals.round(1)
# %% [markdown]
# With intervals, for the weights that are kept:
# %%
{name: run.scores[name] for name in names}
# %% [markdown]
# ## Ask
#
# An empty answer says that the text does not hold one; `no_answer_score` is how probable the model finds that. The first paragraphs
# of the held-out file, with all their questions. The model is wrong about some of them, as the scores say:
# %%
import json

paragraphs = json.loads(held_out.read_text())["data"][0]["paragraphs"][:2]
paragraphs[0]["context"]
# %%
asked = [(question, paragraph["context"]) for paragraph in paragraphs for question in paragraph["qas"]]
answers = run.predict([{"question": question["question"], "context": context} for question, context in asked])
pandas.DataFrame(
    {
        "question": [question["question"] for question, _ in asked],
        "gold": [question["answers"][0]["text"] if question["answers"] else "" for question, _ in asked],
        "answer": [one.prediction for one in answers],
        "no answer": [round(one.no_answer_score, 3) for one in answers],
    }
)
