# %% [markdown]
# # Questions in Spanish, and where the time goes
#
# The first reference system fine-tunes mT5 on Spanish SQuAD and looks at what the device does meanwhile. Here: the same with
# t5-nano and generated notes, in a minute on a CPU.
#
# **The full system**: `fivetune train squad_es_mt5`, which is `"model": {"path": "google/mt5-base"}` with
# `"data": {"train": "ccasimiro/squad_es:v1.1.0:train", "eval": "ccasimiro/squad_es:v1.1.0:validation"}`, on a GPU.
# %%
import random

import fivetune

draw = random.Random(0)
names = ["Marta", "Pablo", "Lucia", "Diego", "Elena", "Bruno", "Carla", "Hugo", "Ines", "Raul"]
things = ["el barco", "la casa", "el perro", "la llave", "el libro", "la mesa"]
places = ["Sevilla", "Bilbao", "Toledo", "Murcia", "Lugo", "Soria", "Burgos", "Palma"]


def make_record(number: int, names: list[str]) -> dict:
    (one, two), (first, second) = draw.sample(names, 2), draw.sample(places, 2)
    thing, other = draw.sample(things, 2)
    context = f"{one} tiene {thing} en {first}. {two} tiene {other} en {second}."
    name, item, answer = draw.choice([(one, thing, first), (two, other, second)])
    return {
        "id": f"es-{number}",
        "question": f"Donde tiene {name} {item}?",
        "context": context,
        "answers": {"text": [answer], "answer_start": [context.index(answer)]},
    }


train = [make_record(number, names[:7]) for number in range(2000)]
held_out = [make_record(number, names[7:]) for number in range(2000, 2200)]  # of other people: nothing is in both
train[0]
# %% [markdown]
# `language: es` scores by SQuAD's rules and, side by side, by MLQA's, which drop Spanish articles. The lists of records are written
# beside the run, so that it can be resumed and repeated.
# %%
recipe = {
    "run": {"dir": "runs/squad_es", "seed": 1},
    "model": {"path": "t5-nano"},
    "task": {"name": "squad", "language": "es"},
    "data": {"train": train, "eval": held_out, "max_input_tokens": 128, "max_target_tokens": 16},
    "optimizer": {"lr": 1e-2},
    "schedule": {"name": "linear", "warmup_steps": 20},
    "train": {"num_steps": 120, "batch_size": 32},
    "eval": {"every_steps": 60},
    "telemetry": {"every_seconds": 0.5},
}
run = fivetune.train(recipe)
run
# %% [markdown]
# ## Where the time goes
#
# Every step records its phases; `telemetry` holds samples of the processor and of every GPU (utilisation, memory, power,
# temperature). `fivetune profile RUN` looks inside a step: kernels, launches, gaps.
# %%
import pandas

steps = pandas.DataFrame([one.phase_seconds for one in run.steps if not one.warm_up]).fillna(0)
shares = 100 * steps.sum() / steps.sum().sum()
axes = shares.sort_values().plot.barh(figsize=(7, 2.2), xlabel="share of the step (%)")
axes.bar_label(axes.containers[0], fmt="%.1f", padding=3)
axes.spines[["top", "right"]].set_visible(False)
# %% [markdown]
# Busy cores over the run: one dot per sample, in the colour of what the run did then.
# %%
samples = pandas.DataFrame(
    [
        {"phase": one.phase, "seconds": one.seconds - run.telemetry[0].seconds, "busy cores": one.process_cores}
        for one in run.telemetry
    ]
).dropna()
axes = None
for number, (phase, part) in enumerate(samples.groupby("phase", sort=False)):
    axes = part.plot.scatter("seconds", "busy cores", ax=axes, color=f"C{number}", label=phase, figsize=(7, 2.6))
axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
axes.set_ylim(bottom=0)
axes.spines[["top", "right"]].set_visible(False)
# %% [markdown]
# The same step on padded batches would compute on padding; here no position is padded.
# %%
padding = [one.padding_fraction for one in run.steps]
f"padding: {100 * max(padding):.1f} % of the positions"
# %% [markdown]
# ## Ask
# %%
context = "Ines tiene el libro en Lugo. Hugo tiene la llave en Soria."
[
    one.prediction
    for one in run.predict(
        [{"question": f"Donde tiene {who}?", "context": context} for who in ("Ines el libro", "Hugo la llave")]
    )
]
