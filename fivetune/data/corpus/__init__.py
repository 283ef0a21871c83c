"""The embedded model `t5-nano`: its checkpoint, its tokenizer and the generated text that it is trained on.

In: a seed. Out: `names.py` invents names with a fixed held-out part; `pretraining.py` writes the pre-training pairs;
`reading.py` writes the quickstart's reading-comprehension corpus as SQuAD-2.0 JSON; `tokenizer.py` trains the
tokenizer. The folder `t5-nano` beside them is the pre-trained checkpoint, made by `recipes/nano/pretrain.yaml`.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "t5-nano"
