"""Train the small unigram tokenizer of `t5-nano`, and write it as a T5 tokenizer folder.

In: texts and a number of pieces. Out: `tokenizer.json` and `tokenizer_config.json`, which `AutoTokenizer` loads. The
vocabulary is T5's: `<pad>` 0, `</s>` 1, `<unk>` 2, then the pieces by descending score, then `<extra_id_99>` ...
`<extra_id_0>`.
"""

import io
import json
import string
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

NUM_SENTINELS = 100
SENTINELS = tuple(f"<extra_id_{index}>" for index in range(NUM_SENTINELS))
BASICS = ("<pad>", "</s>", "<unk>")
SPACE = "▁"
REQUIRED_CHARACTERS = (
    string.digits
    + string.ascii_letters
    + string.punctuation
    + "áàâäãåæçéèêëíìîïñóòôöõøœúùûüýßÁÅÄÉÈÍÑÓÖØÚÜ–—‘’“”„«»…°€£§½²³×·"
)


def train_tokenizer(folder: Path, texts: Iterable[str], *, num_pieces: int) -> None:
    """Train a unigram tokenizer and write it into `folder`; the same texts give the same files.

    `num_pieces` counts everything: the 3 basics, the learnt pieces and the 100 sentinels. A corpus with few distinct
    strings can give fewer pieces. Sentinels are removed from the texts before training.

        train_tokenizer(Path("t5-nano"), ["Velka sailed to Torun."], num_pieces=2048)
        AutoTokenizer.from_pretrained("t5-nano")("Velka").input_ids     ->  [.., .., 1]      # ends with </s>
    """
    learnt = _train_unigram(texts, num_pieces=num_pieces - NUM_SENTINELS)
    tokenizer = _build_tokenizer(learnt)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "T5Tokenizer",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "extra_ids": NUM_SENTINELS,
        "additional_special_tokens": list(SENTINELS),
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _split_like_t5() -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer of T5 in transformers: split at white space, each word begins with the space mark."""
    metaspace = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])


def _train_unigram(texts: Iterable[str], *, num_pieces: int) -> list[tuple[str, float]]:
    """Return the basics and the learnt pieces with their log probabilities, best first."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_remove_sentinels(texts),
        model_writer=model,
        model_type="unigram",
        vocab_size=num_pieces,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        character_coverage=1.0,
        required_chars=REQUIRED_CHARACTERS,
        split_by_unicode_script=True,  # keeps punctuation out of the pieces of names
        split_by_number=True,
        max_sentencepiece_length=12,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece="<pad>",
        num_threads=1,  # more threads sum in varying order, so that the files would differ between runs
        minloglevel=2,
    )
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [(trained.id_to_piece(index), trained.get_score(index)) for index in range(trained.get_piece_size())]
    return [(piece, 0.0) for piece in BASICS] + pieces[len(BASICS) :]


def _remove_sentinels(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield " ".join(word for word in text.split() if not word.startswith("<extra_id_"))


def _build_tokenizer(pieces: list[tuple[str, float]]) -> Tokenizer:
    """Build a T5 tokenizer from pieces and sentinels; it appends `</s>`, and decodes pieces to text."""
    vocabulary = pieces + [(sentinel, 0.0) for sentinel in reversed(SENTINELS)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = _split_like_t5()
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*BASICS, *reversed(SENTINELS))])
    return tokenizer
