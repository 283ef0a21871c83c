"""Which column is what by its name: the words by which data sets call questions, labels, ids ..., in some languages.

In: names of columns, and those that the user gave. Out: how clearly a name says a role.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache

from fivetune.data.readers.delimited import NUMBER
from fivetune.errors import ConfigError, suggest_names
from fivetune.start.columns import (
    MIN_RECORDS,
    MIN_WORDS,
    Column,
    RawTable,
    as_text,
    count_words,
    find_value,
    is_empty_cell,
)
from fivetune.types import RawRecord

PLAIN = str.maketrans("đłıø", "dlio")  # letters that have no accent to Unicode
NO_BLANKS = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")  # scripts whose words are joined in a name
MAX_COMPOUND = 8  # characters of such a name
MAX_NAME = 6  # words up to which a text may be a name
CLEAR, USUAL = 4, 3  # points of a whole name; as the last word of a longer one it has one less, elsewhere two less

WORDS: Mapping[str, tuple[str, str]] = {
    "question": (
        "question questions question_text question_stem stem problem frage fragen pregunta domanda pergunta vraag "
        "问题 質問 질문 вопрос pytanie soru pertanyaan soal otázka fråga kysymys سؤال प्रश्न",
        "query queries q goal math_problem word_problem ctx",
    ),
    "context": (
        "context contexts passage passages excerpt paragraph paragraphs kontext contexto contexte contesto support",
        "document documents text article snippet snippets evidence abstract background story facts numbers table "
        "schema theory rules history persona knowledge grounding search_results supporting_facts quote chunk chunks "
        "fragment doc docs",
    ),
    "answer": (
        "answer answers answer_text answer_key answerkey answer_idx correct_answer exact_answer "
        "gold_answer final_answer correct ground_truth ground_truths generation_gt expected_answer golden_answers "
        "antwort antworten respuesta respuestas reponse risposta resposta antwoord 答案 回答 답변 "
        "odpowiedź cevap jawaban odpověď svar vastaus جواب उत्तर",
        "correcta correcto correta corretta correcte richtig goed верный ответ "
        "solution solutions response responses reply replies a "
        "long_answer short_answer ideal_answer best_answer spans doctor",
    ),
    "choices": ("choices options candidates alternatives endings", "option choice ending distractor"),
    "label": (
        "label labels class klasse classe category kategorie categoria categoría categorie intent intents "
        "sentiment sentimiento emotion gold_label label_text class_index y etikett etiqueta "
        "intencion spam toxic ground_truth clase kelas kategori kategoria kategorija etiket sınıf nhãn "
        "类别 分类 标签 意图 "
        "カテゴリ ラベル 카테고리 라벨 레이블 категория метка класс تصنيف",
        "target targets topic thema tema rating stars star score tag type "
        "typ tipo status priority "
        "priorität prioridad queue genre polarity stance judgment judgement quality overall severity department "
        "nota note motivo assunto "
        "valoración calificación avaliação valutazione durum duygu sentimento sentimen "
        "emocion emoção emozione polaridad polaridade 类型 情感 "
        "感情 감정 тональность эмоция "
        "abteilung section verdict grade mood hate hate_speech duplicate sarcastic relation correct act gold language "
        "lang gender dialect subcategory subclass subtopic",
    ),
    "flag": (  # labels that are yes or no
        "spam toxic hate hate_speech duplicate sarcastic sarcasm irony offensive toxicity abuse abusive sexism racism",
        "",
    ),
    "tags": (
        "labels tags keyphrases keywords categories topics genres emotions themes intents hashtags",
        "keyphrase keyword tag etiketten schlagwörter schlagworte stichwörter etiquetas label intent category topic "
        "genre classes subjects skills codes aspects types",
    ),
    "text": (
        "text texts texto texte testo comment review tweet message nachricht sentence satz utterance body content "
        "description beschreibung bewertung post phrase premise hypothesis anfrage comentario mensaje "
        "short_description cuerpo corpo contenido conteudo contenu inhalt metin yorum görüş mesaj cümle avis "
        "teks "
        "ulasan komentar kalimat tekst komentarz recenzja wiadomość mensagem frase commento recensione commentaire "
        "oración consulta reclamo текст отзыв комментарий сообщение 文本 内容 评论 句子 语料 正文 本文 文章 "
        "テキスト レビュー "
        "텍스트 문장 리뷰 댓글 내용 نص تعليق تغريدة văn_bản câu bình_luận nội_dung",
        "remark remarks subject betreff überschrift title titel titulo subtitle subtitulo titre "
        "headline claim email mail note "
        "notes notiz "
        "transcript statement document documents article question frage goal abstract aspect aspect_term string "
        "comments dialogue feedback opinion",
    ),
    "inputs": (
        "inputs input source src sources input_text source_text prompt prompts article articles artigo "
        "articulo noticia document documents dialogue dialog original "
        "meaning_representation mr",
        "text sentence body content description question query story transcript conversation patient long noisy "
        "incorrect complex normal passage context abstract input_sequence diff rewritten_intent chapter "
        "user human customer client patient chat chats conversations dialogues dialogs",
    ),
    "targets": (
        "targets target output outputs target_text output_text gold_text corrected_text reference_text summary "
        "highlights summaries translation translations tgt trg completion completions "
        "response responses tldr zusammenfassung resumen riassunto übersetzung traducción",
        "abstract headline headlines title titel titre titulo subtitle subtitulo "
        "reply answer answers reference references ref human_reference queries "
        "short corrected correction corrections correct simple simplification simplifications simplified paraphrase "
        "paraphrases query sql sparql cypher code snippet equation equations formula linear_formula "
        "annotated_formula program resolution solution dst msg commit_message docstring "
        "truth doctor agent assistant bot chatbot "
        "slots entities keyphrases keywords regex bash cmd command target_sequence chosen gold",
    ),
    "summary": (
        "summary highlights abstract headline headlines title titre titulo tldr zusammenfassung resumen",
        "",
    ),
    "instruction": ("instruction instructions anweisung instrucción system_prompt", "prefix system task_prefix"),
    "number": ("score similarity relatedness mos", "rating value gold target label relevance grade"),
    # those that are read only if the user names them
    "id": (
        "id ids nr no uid uuid guid key idx index row nummer pid qid rowid unnamed lfd_nr",
        "session hash sha number fips asin isbn zip zip_code phone",
    ),
    "date": ("date dates datum fecha time timestamp datetime year month day at created published zeit uhrzeit", ""),
    "link": ("url urls link links href image avatar photo permalink", "website read_more mail_address"),
    "person": (
        "author authors autor user users username user_name screen_name sender receiver speaker journalist reporter "
        "annotator worker rater participant actor role locuteur name names customer kunde reviewer client",
        "",
    ),
    "place": ("location city country place state region timezone coord", ""),
    "fact": (
        "language lang languages license split publication publisher source_lang target_lang version confidence count "
        "like likes retweet retweets votes ups downs parse flag filename platform device channel finished "
        "is_train is_training is_test is_valid is_validation is_val is_dev is_eval in_train in_test in_valid in_dev "
        "progress iteration run turn position duration subreddit forum recipient ip_address user_language latitude "
        "longitude",
        "explanation exp rationale reason reasoning cot thought thoughts chain_of_thought package package_name "
        "domain website helpful useful funny cool upvotes "
        "gender age answer_start is_impossible plausible_answers "
        "tokens toks",
    ),
    "group": (
        "group group_id user user_id author author_id customer customer_id kunde document_id doc_id article_id "
        "thread_id conversation_id session_id patient_id db_id",
        "",
    ),
}
"""Role -> words that leave no doubt, and words that are usual."""

_TITLES = "tytuł başlık заголовок tiêu_đề judul 标题 標題 タイトル 見出し 제목 عنوان"
_SUMMARIES = (
    "kurzfassung resumo sommario samenvatting streszczenie podsumowanie özet реферат резюме tóm_tắt ringkasan "
    "摘要 总结 概要 要約 まとめ 요약 요약문 ملخص خلاصه چکیده"
)
_TRANSLATIONS = (
    "uebersetzung traduction traduzione tradução vertaling tłumaczenie çeviri перевод bản_dịch terjemahan "
    "译文 翻译 訳文 翻訳 번역 번역문 ترجمة ترجمه"
)
WORLD: Mapping[str, tuple[str, str]] = {
    "question": (
        "fragestellung aufgabe aufgaben aufgabenstellung preguntas domande quesito perguntas questão vragen pytania "
        "sorular вопросы câu_hỏi 題目 题目 问句 提问 问 設問 問い 질의 سوال پرسش",
        "énoncé zadanie",
    ),
    "context": (
        "kontekst bağlam контекст ngữ_cảnh konteks 上下文 语境 文脈 コンテキスト 문맥 지문 سياق",
        "textstelle extrait trecho brano fragmento pasaje párrafo paragraf абзац отрывок đoạn_văn 段落 材料 문단 فقرة "
        "زمینه dokument dokumente documento documentos 文档 文書 문서 документ tài_liệu dokumen",
    ),
    "answer": (
        "lösung lösungen loesung loesungen musterlösung réponses risposte respostas antwoorden odpowiedzi cevaplar "
        "yanıt yanit ответ ответы câu_trả_lời trả_lời đáp_án jawab 答复 答え 解答 回复 答 正确答案 参考答案 返答 応答 "
        "대답 응답 정답 답 إجابة پاسخ",
        "solución soluzione solução oplossing rozwiązanie çözüm решение kunci",
    ),
    "label": (
        "étiquette etichetta rótulo etykieta klasa sentyment phân_loại cảm_xúc 類別 分類 標籤 情绪 カテゴリー 분류 "
        "감성 فئة برچسب دسته",
        "ocena tür temat tema тема chủ_đề 种类 種類 评分 評価 주제 유형 احساس",
    ),
    "tags": ("étiquettes etichette etykiety etiketler теги 标签 タグ 태그", ""),
    "text": (
        "résumé kommentar rezension mitteilung reseña resenha zin bericht recensie opmerking reactie treść opinia "
        "zdanie предложение pesan isi 微博 留言 コメント 口コミ 感想 ツイート 문서 본문 후기 متن نظر جمله",
        f"nhận_xét 기사 {_TITLES}",
    ),
    "inputs": (
        "eingabe entrada entrée artykuł makale статья bài_báo artikel 输入 入力 입력 原文 원문 新闻 記事 기사 مقال",
        "oryginał оригинал",
    ),
    "targets": (f"ausgabe salida saída sortie 输出 出力 출력 {_SUMMARIES} {_TRANSLATIONS}", f"résumé {_TITLES}"),
    "summary": (_SUMMARIES, _TITLES),
    "instruction": (
        "指令 指示 지시 지시문 istruzione instrução instructie instrukcja talimat инструкция instruksi",
        "",
    ),
    "fact": (
        "",
        "hint hints tipp tipps hinweis hinweise indice pista dica podpowiedź ipucu подсказка 提示 힌트 ヒント",
    ),
}
"""The same in further languages: German, French, Spanish, Italian, Portuguese, Dutch, Polish, Turkish, Russian,
Vietnamese, Indonesian, Chinese, Japanese, Korean, Arabic, Persian."""


ROLES = ("question", "context", "answer", "choices", "label", "tags", "text", "inputs", "targets", "id", "group")
"""What --column may name."""

SEVERAL = ("text", "inputs", "tags", "choices")  # roles that may have several columns
COPIES = "raw clean cleaned processed preprocessed tokenized normalized lemmatized stemmed lower tok parse"
"""Words for another form of a text that is there, too: `text_clean` next to `text`."""

PAIRED = "premise hypothesis source target before after correct corrected"
"""Words for the two texts of a pair, which may be alike."""

SYSTEMS = (
    "model llm predicted prediction predictions pred generated hyp gpt chatgpt claude gemini llama mistral qwen kimi "
    "deepseek bert bart"
)
"""Words for what a system answered: it is learned only if nothing else can be."""

GOLD = "gold truth true reference references ref human"
"""Words for the right answer beside those of systems."""

RETRIEVED = "positive pos positives negative negatives neg hard_negatives"
"""Words for passages that answer a question, and for others that do not."""

DIALOGUES = "messages chat chats turns dialog dialogs dialogue dialogues conversation conversations utterances"

REFERENCES = "reference references ref refs"
"""Words for a right answer, or for the document that a dialogue is about."""

NOTES = (
    "note notes remark remarks notiz notizen bemerkung bemerkungen anmerkung anmerkungen observaciones observacoes "
    "备注 備考 비고 примечание примечания"
)
"""Words for what annotators write on a text, which is no text itself beside one."""

COMMENTS = "comment comments"
"""The same, where it may be the text, too."""

THINGS = (
    "product item recipe dish food menu ingredient company business merchant vendor event movie film book song job "
    "course paper game app drug medicine disease symptom service project task activity transaction"
)
"""Words for what has a name that is a text, unlike those of persons and places."""

SUBJECTS = "target topic entity claim aspect candidate company brand party issue"
"""Words for what a stance or an opinion is about."""

CROWD = {
    "input": ("text", "inputs"),
    "output": ("label", "targets"),
    **dict.fromkeys(("golden", "hint", "assignment", "confidence"), ("fact",)),
}
"""What crowdsourcing platforms write before the names of what workers read and answer, and of the rest -> the roles."""

INNER = "text texts value stem content human_readable spans body_text"
"""Members of an object that say nothing of their own: `answer.value` is an answer."""

_LANGUAGES = (
    "en eng English, de deu ger deutsch German, fr fra French, es spa Spanish, ro Romanian, it ita Italian, "
    "pt por Portuguese, nl nld Dutch, pl pol Polish, ru rus Russian, zh zho cmn cn Chinese, ja jpn jp Japanese, "
    "ar ara Arabic, cs ces cz Czech, tr tur Turkish, uk ukr ua Ukrainian, sv swe Swedish, hi Hindi, vi vn Vietnamese, "
    "ko kor kr Korean, fi Finnish, da Danish, hu hun Hungarian, el ell gr Greek, bg Bulgarian"
)
LANGUAGES: Mapping[str, str] = {
    word.casefold(): words.split()[-1] for words in _LANGUAGES.split(",") for word in words.split()
}
"""Names of columns that hold one language of a translation -> the language, as T5's prefixes write it."""

NO_GROUP = "none"
MIN_GROUPS = 20  # fewer cannot be divided into three sets of the wanted sizes
ROUNDED = re.compile(r"\d[.,]\d+[eE]\+\d+")  # 1.12E+18: the first digits of an id, as a spreadsheet writes it
SHARED = 0.9  # most distinct values per record of a column whose values relate records

Given = Mapping[str, Sequence[str]]
"""Role -> the columns that the user gave it: one, or several of a role of SEVERAL."""


def split_name(name: str) -> list[str]:
    """Split the name of a column into the words that WORDS has; numbers, and letters that number, are left out.

    >>> split_name("answerKey"), split_name("sentence_B"), split_name("question.stem"), split_name("info.title")
    (['answer', 'key'], ['sentence'], ['question'], ['title'])
    """
    parts = [part for part in name.split(".") if not part.isdecimal()] or [name]
    if len(parts) > 1 and (parts[-1].casefold() in INNER.split() or len(parts[-1]) == 1):
        parts.pop()
    words: list[str] = []
    for word in _split_words(parts[-1]):
        plain = word.rstrip("0123456789")
        if plain:
            words.append(plain)
    return [word for word in words if len(word) > 1 or not word.isascii()] or words


def has_word(name: str, words: str) -> bool:
    """Whether a word of a column's name is among some words.

    >>> has_word("textClean", COPIES), has_word("text", COPIES)
    (True, False)
    """
    return not set(words.split()).isdisjoint(split_name(name))


@lru_cache(100_000)  # as of rate_name
def _split_words(name: str) -> tuple[str, ...]:
    words = re.findall(r"[^\W_]+", _strip_accents(re.sub(r"(?<=[^\W\d_A-Z])(?=[A-Z])", "_", name)))
    return tuple(word.removeprefix("ال") or word for word in words)  # the article of Arabic


def _strip_accents(text: str) -> str:
    """Return a text in small letters without accents, which many leave out in names.

    >>> _strip_accents("Câu trả lời"), _strip_accents("Đáp án")
    ('cau tra loi', 'dap an')
    >>> _strip_accents("レビュー") == _strip_accents("レヒュー")
    True
    """
    parts = unicodedata.normalize("NFKD", text.casefold()).translate(PLAIN)
    return unicodedata.normalize("NFC", "".join(part for part in parts if not unicodedata.combining(part)))


@lru_cache
def _list_words(role: str) -> tuple[frozenset[str], frozenset[str]]:
    """List the words of a role that leave no doubt, and those that are usual, of all languages."""
    clear, usual = WORDS[role]
    world_clear, world_usual = WORLD.get(role, ("", ""))
    return (
        frozenset(_strip_accents(f"{clear} {world_clear}").split()),
        frozenset(_strip_accents(f"{usual} {world_usual}").split()),
    )


@lru_cache(100_000)  # columns are rated again for each reading, and a survey of people has a thousand
def rate_name(role: str, name: str) -> int:
    """Rate how clearly the name of a column says a role, 0 to CLEAR.

    >>> rate_name("label", "Category"), rate_name("label", "ticket_type"), rate_name("label", "is_duplicate")
    (4, 2, 2)
    >>> rate_name("label", "class_names"), rate_name("person", "class_names"), rate_name("person", "user_name")
    (4, 0, 4)
    >>> rate_name("text", "sentence2"), rate_name("text", "comment_text"), rate_name("text", "price")
    (4, 3, 0)
    """
    side, colon, _ = name.casefold().partition(":")
    if colon and side in CROWD:
        return USUAL if role in CROWD[side] else 0
    words = split_name(name)
    if not words:
        return 0
    if (
        len(words) > 1
        and words[-1] in ("name", "names")
        and any(words[-2] in listed for listed in _list_words("label"))
    ):
        words.pop()  # label_name says label, and no name of a person
    whole = "_".join(words)
    for points, listed in zip((CLEAR, USUAL), _list_words(role), strict=True):
        if whole in listed or "".join(words) in listed:
            return points
        is_first = words[0] in listed and role in ("date", "link")  # date_avis: the head of a Romance name is its first
        if words[-1] in listed or is_first or (words[0] == "id" and role == "id"):
            return points - (not is_first)
        if any(word in listed for word in words):
            return points - 2
        if len(whole) <= MAX_COMPOUND and NO_BLANKS.search(whole):  # 问题内容, 답변내용
            inner = [one for one in listed if one in whole and len(one) > 1 and NO_BLANKS.search(one)]
            if inner:
                return points - 2 + whole.endswith((*inner,))
    return 0


def is_column_name(name: str) -> bool:
    """Whether the name of a column says any role, or has no name as the index of pandas, as a text would not.

    >>> [is_column_name(name) for name in ("comment_text", "", "frageText", "hello", "How so?")]
    [True, True, True, False, False]
    """
    is_identifier = not name or re.fullmatch(r"\w*(?:_|[a-z][A-Z]|\d)\w*", name) is not None
    is_short = count_words(name) <= MAX_NAME and not re.search(r"[.!?]", name)
    return is_identifier or (is_short and any(rate_name(role, name) >= USUAL - 1 for role in WORDS))


def count_names(head: Sequence[RawRecord], *, has_header: bool) -> int:
    """Count the first records that are further lines of names.

    Args:
        has_header: the user gave the names: the first line may be another header.
    """
    if len(head) > 1 and any('"ImportId"' in str(value) for value in head[1].fields.values()):  # Qualtrics
        return 2
    return int(len(head) >= MIN_RECORDS and _is_line_of_names(head, has_header=has_header))


def _is_line_of_names(head: Sequence[RawRecord], *, has_header: bool) -> bool:
    """Whether the first record is no record: short cells, with a word where all other records have a number, or with
    names of columns alone, beside a blank where all have a number or below the user's header.
    """
    rows: list[dict[str, object]] = []
    for record in head:
        rows.append({**record.fields})
        if not record.has_own_id:
            rows[-1].pop("id", None)
    first, *others = rows
    cells = [value for value in first.values() if isinstance(value, str) and not is_empty_cell(value)]
    if not cells or max(map(count_words, cells)) > MIN_WORDS or any(map(NUMBER.fullmatch, cells)):
        return False
    are_names = all(is_column_name(cell) or find_language(cell) for cell in cells)
    if are_names and has_header and any(" " not in cell for cell in cells):
        return True
    for name, value in first.items():
        is_told = are_names or not is_empty_cell(value)
        if is_told and all(NUMBER.fullmatch(as_text(one.get(name, ""))) for one in others):
            return True
    return False


def find_language(name: str) -> str | None:
    """Find the language that a column is named after (`translation.de`, `text_en`)."""
    words = split_name(name)
    if name.startswith("translation.") and words:  # the form of the hub's translations: all members are languages
        return LANGUAGES.get(words[0], words[0].capitalize())
    for word in (*words[-1:], *words[:1]):
        if word in LANGUAGES:
            return LANGUAGES[word]
    return None


def split_language(name: str) -> tuple[str, str | None]:
    """Split the name of a column into what it says beside its language, and the language.

    >>> split_language("question_en"), split_language("info.answer-de"), split_language("text")
    (('question', 'English'), ('info_answer', 'German'), ('text', None))
    """
    words = [word for word in _split_words(name) if word not in LANGUAGES]
    return "_".join(words), find_language(name)


def find_given(given: Given, table: RawTable) -> Given:
    """Find the columns that the user named; several for a role of SEVERAL may be divided by commas.

    Raises ConfigError for a role or a column that does not exist.
    """
    found: dict[str, Sequence[str]] = {}
    for role, names in given.items():
        if role not in ROLES:
            raise ConfigError(f"--column {role}={names[0]}: there is no {role!r}. {suggest_names(role, ROLES)}")
        if role in SEVERAL and not {*names} <= table.columns.keys():
            names = [part.strip() for name in names for part in name.split(",")]
        found[role] = names
        for name in names:
            is_there = name in table.columns or any(find_value(one.fields, name) for one in table.records[:100])
            if not is_there and (role, name) != ("group", NO_GROUP):
                near = suggest_names(name, table.columns)
                raise ConfigError(f"--column {role}={name}: {table.source} has no column {name!r}. {near}")
    return found


def parse_columns(words: Sequence[str]) -> dict[str, Sequence[str]]:
    """Parse --column ROLE=NAME; a role of SEVERAL may be repeated. Raises ConfigError for another form.

    >>> parse_columns(["text=Subject", "text=Body", "label=Queue"])
    {'text': ('Subject', 'Body'), 'label': ('Queue',)}
    """
    given: dict[str, Sequence[str]] = {}
    for word in words:
        role, _, name = word.partition("=")
        if not role or not name:
            raise ConfigError(f"--column {word}: is not ROLE=NAME. Roles: {', '.join(ROLES)}. Write --column label=Y.")
        if role in given and role not in SEVERAL:
            known = f"{role} is {given[role][0]} already. Several columns: {', '.join(SEVERAL)}"
            raise ConfigError(f"--column {word}: {known}. Name one.")
        given[role] = (*given.get(role, ()), name)
    return given


def find_group(table: RawTable, given: Given, taken: Sequence[str], inputs: Sequence[str]) -> str | None:
    """Find the column whose values must not be divided: one with a usual name, of which several records share values.

    A question's title names the article that its context is from. Without one, an input whose texts repeat while the
    others differ: the premise of several hypotheses, the question of several answers.

    Args:
        taken: the columns of the reading, and its id.
        inputs: those whose texts may be the group.
    """
    if "group" in given:
        named = given["group"][0]
        return None if named == NO_GROUP else named
    is_article = {"question", "context"} <= table.columns.keys()
    for name, column in table.columns.items():
        is_named = rate_name("group", name) == CLEAR or split_name(name)[-1:] in (["id"], ["nr"], ["no"])
        if name in taken or not (is_named or (is_article and name == "title")):
            continue
        is_shared = column.num_distinct >= MIN_GROUPS and column.share_distinct <= SHARED
        if is_shared and not ROUNDED.fullmatch(column.example):
            return name
    read = [table.columns[name] for name in inputs if name in table.columns and rate_name("instruction", name) < USUAL]
    shared: list[Column] = []
    for column in read if len(read) > 1 else ():
        # few may be enough, as the split gives up what leaves it without shares
        if column.is_running and column.num_distinct >= MIN_GROUPS / 2 and column.share_distinct <= SHARED:
            shared.append(column)
    # a context, else the one of most values: few that repeat often are templates
    shared.sort(key=lambda one: (rate_name("context", one.name) < USUAL, -one.num_distinct))
    return shared[0].name if shared else None
