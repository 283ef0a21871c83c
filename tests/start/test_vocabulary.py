"""What is known of a vocabulary without its tokenizer, beside T5's own tokenizer where that is here."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivetune.start.vocabulary import estimate_lengths, find_lost_characters

T5 = Path(__file__).parents[3] / "shared/data/tokenizers/t5-small/tokenizer.json"
TEXTS = {
    "prose": "The history of the town is told in a small museum beside the river, which was built in 1911. " * 5,
    "JSON": '{"order": [{"item": "teh o ais", "quantity": 2, "price": 3.50}], "total": 7.00}' * 4,
    "code": "for (int i = 0; i < num_rows; i++) { total += values[i] * 0.25; }\n" * 4,
    "LaTeX": r"$\frac{1}{2} \times x^{2} = \sqrt{16}$ and $\alpha_{1} + \beta^{2}$ " * 4,
    "digits": "4921 8834, 20.11.2026 10:45:07; " * 6,
    "Malay": "Saya nak makan nasi goreng satu, teh o ais satu dan air sirap limau satu. " * 4,
    "Turkish": "Milletin arkadaslar ile birlikte yapilan toplantilarda konusulan konular anlatildi. " * 4,
}


@pytest.mark.skipif(not T5.exists(), reason="T5's tokenizer is not here")
@pytest.mark.parametrize("kind", TEXTS)
def test_estimates_are_near_the_tokens_of_t5(kind):
    from tokenizers import Tokenizer

    real = len(Tokenizer.from_file(str(T5)).encode(TEXTS[kind]).ids)
    (estimated,) = estimate_lengths("google-t5/t5-small", [TEXTS[kind]])
    assert 0.95 * real <= estimated <= (1.4 if kind == "prose" else 1.8) * real


@pytest.mark.skipif(not T5.exists(), reason="T5's tokenizer is not here")
def test_the_characters_of_t5_are_those_of_its_tokenizer():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(T5))
    characters = [chr(code) for code in range(0x21, 0x250) if chr(code).isprintable()]
    kept = [one for one in characters if tokenizer.decode(tokenizer.encode(f"a{one}a").ids) == f"a{one}a"]
    assert find_lost_characters("google-t5/t5-small", characters) == {*characters} - {*kept}


def test_bytes_are_counted():
    assert estimate_lengths("google/byt5-small", ["größe"]) == [8]
    assert find_lost_characters("google/byt5-small", ["{中\n"]) == set()
    assert find_lost_characters("my/model", ["{中\n"]) == set()
