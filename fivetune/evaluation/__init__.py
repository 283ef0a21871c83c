"""The evaluation of a model, by stages over an iterator of `Prediction`.

answer.py      rows of a store -> one Prediction per passage (generated text, label or span)
merge.py       passages of a question -> one Prediction per question
tally.py       Predictions -> each question's scores, corpus scores, rates, loss
evaluator.py   the order of the stages, parts of a mixture, several processes -> EvalRecord
score_file.py  a file of predictions -> one value per id (`fivetune score`)
"""
