"""The evaluation of a model, in stages over an iterator of `Prediction`.

answer.py      rows of a store -> one Prediction per passage (generated text, label or span)
merge.py       passages of a question -> one Prediction per question
tally.py       Predictions -> each question's scores, corpus scores, rates, loss
evaluator.py   runs the stages, also for parts of a mixture and several ranks -> EvalRecord
inputs.py      records without answers -> rows for `fivetune predict`
output.py      rows and Predictions -> JSON lines, a table, BioASQ's format
score.py       predictions and gold answers -> scores, without a model (`fivetune score`)
score_file.py  a file of predictions -> one value per id (`fivetune score`)
"""
