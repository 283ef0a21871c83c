"""The model: family.py (facts about T5), load.py and tokenizer.py (folder to model), flat.py and forward.py (batch to
token losses), save.py (model to folder), cuda/ (kernels and CUDA graphs)."""
