"""The embedded model `t5-nano`, and the generated text that the quickstart fine-tunes it on.

In: a seed. Out: `names.py` invents names with a fixed held-out part; `reading.py` writes the quickstart's
reading-comprehension corpus as SQuAD-2.0 JSON. The folder `t5-nano` beside them is the pre-trained checkpoint, which
`recipes/nano/` makes.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "t5-nano"
