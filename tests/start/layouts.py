"""Layouts of widely published data sets: headers and kinds of values as they are, all texts invented.

A layout is "column=KIND | column=KIND", a dotted column is a member of an object. Expected is "task: target < inputs",
"?" for a doubt, "!" for data that are refused.
"""

# ruff: noqa: E501
from __future__ import annotations

import json
import random
from collections.abc import Callable

WHO = ["Ada", "Bea", "Cid", "Dov", "Eli", "Fay", "Gus", "Hal", "Ida", "Jon", "Kim", "Lou", "Max", "Ned", "Ona", "Pia"]
WHAT = [
    "hat",
    "coat",
    "shoe",
    "lamp",
    "book",
    "cup",
    "key",
    "bag",
    "pen",
    "car",
    "ring",
    "boat",
    "desk",
    "drum",
    "fork",
    "gate",
]
HOW = ["red", "blue", "green", "white", "black", "small", "large", "old", "new", "round"]

Draw = random.Random


def sentence(draw: Draw, row: int) -> str:
    return f"{draw.choice(WHO)} has a {draw.choice(HOW)} {draw.choice(WHAT)} for person {row}"


def paragraph(draw: Draw, row: int) -> str:
    return ". ".join(sentence(draw, row) for _ in range(6)) + "."


def question(draw: Draw, row: int) -> str:
    return f"What does {draw.choice(WHO)} have for person {row}?"


def reply(draw: Draw, row: int) -> str:
    return f"They are kept by {draw.choice(WHO)} and nobody else, because of case {row + 7}"


def choose(*words: object) -> Callable[[Draw, int], object]:
    return lambda draw, row: draw.choice(words)


def sample(*words: object) -> Callable[[Draw, int], list[object]]:
    return lambda draw, row: draw.sample(words, draw.randint(1, 3))


def chat(*turns: str, who: str = "role", said: str = "content") -> Callable[[Draw, int], object]:
    return lambda draw, row: [{who: turn, said: sentence(draw, row)} for turn in turns]


KINDS: dict[str, Callable[[Draw, int], object]] = {
    "sentence": sentence,
    "paragraph": paragraph,
    "long": lambda draw, row: " ".join(paragraph(draw, row) for _ in range(3)),
    "question": question,
    "part": lambda draw, row: f"person {row}",  # of each text
    "reply": reply,
    "title": lambda draw, row: f"{draw.choice(HOW)} {draw.choice(WHAT)} {row}",
    "maybe": lambda draw, row: sentence(draw, row) if row % 3 else "",
    "twin": lambda draw, row: row % 3,
    "twin in words": lambda draw, row: ("low", "middle", "high")[row % 3],
    "two": choose("late", "soon"),
    "three": choose("late", "refund", "login"),
    "ten": choose(*HOW),
    "flag": choose(0, 0, 0, 1),
    "class": choose(0, 1, 2, 3),
    "four": choose(0, 4),
    "stars": choose(1, 2, 3, 4, 5),
    "bool": choose(True, False),
    "yes": choose("yes", "no"),
    "letter": choose("A", "B", "C", "D"),
    "letters": lambda draw, row: draw.choice("ABCD") if row % 8 else "ABD",
    "nli": choose("entailment", "neutral", "contradiction"),
    "score": lambda draw, row: draw.randint(0, 25) / 5,
    "share": lambda draw, row: round(draw.random(), 4),
    "number": lambda draw, row: draw.randint(1, 90),
    "decimal": lambda draw, row: float(draw.randint(1, 90)),
    "count": lambda draw, row: draw.randint(0, 900),
    "id": lambda draw, row: f"q{row:05}",
    "hex": lambda draw, row: f"{draw.getrandbits(64):016x}",
    "row": lambda draw, row: row,
    "long id": lambda draw, row: 1234567890123456789 + row,
    "group": lambda draw, row: f"g{row // 4}",
    "shared": lambda draw, row: f"Ada has a hat for group {row // 3}",
    "date": lambda draw, row: f"2024-{row % 12 + 1:02}-{row % 28 + 1:02}",
    "time": lambda draw, row: f"2024-{row % 12 + 1:02}-{row % 28 + 1:02} 10:00:00",
    "url": lambda draw, row: f"https://example.org/{row}",
    "who": choose(*WHO),
    "place": choose("Berlin", "Paris", "New York", "Oslo", "Rome"),
    "constant": choose("NO_QUERY"),
    "empty": choose(""),
    "options": lambda draw, row: draw.sample(WHAT, 4),
    "texts": lambda draw, row: [sentence(draw, row) for _ in range(3)],
    "words": lambda draw, row: sentence(draw, row).split(),
    "instance": lambda draw, row: [{"input": sentence(draw, row), "output": reply(draw, row)}],
    "rare labels": lambda draw, row: draw.sample([f"{a}/{b}" for a in HOW for b in "abcd"], 2) if row % 9 else [],
    "pieces": lambda draw, row: [{"is_selected": 1, "passage_text": sentence(draw, row)}],
    "nested": lambda draw, row: [["Title", [sentence(draw, row)]]],
    "names": lambda draw, row: draw.sample(WHO, 2),
    "labels": sample("joy", "anger", "fear", "pride"),
    "chinese question": lambda draw, row: f"请问第{row}件商品什么时候可以送到我家",
    "chinese reply": lambda draw, row: (
        f"您好，第{row}件商品已经发货，预计三天之内送到，请保持电话畅通，谢谢您的耐心等待。" * 2
    ),
    "variants": lambda draw, row: [{"text": question(draw, row), "split": "dev"} for _ in range(1 + row % 3)],
    "queries": lambda draw, row: [f"SELECT name FROM t WHERE price = {row}"] * (1 + row % 2),
    "places as text": lambda draw, row: str([("claim", row, row + 9)]),
    "labels as text": lambda draw, row: json.dumps(draw.sample(["sport", "health", "law"], draw.randint(1, 2))),
    "tags as text": lambda draw, row: str(draw.sample(["O", "B", "I"], 3)),
    "offsets": lambda draw, row: f"[{row}, {row + 1}, {row + 9}]",
    "ints": sample(0, 3, 5, 27),
    "semicolons": lambda draw, row: ";".join(draw.sample(["billing", "login", "delivery"], draw.randint(1, 3))),
    "phrases": lambda draw, row: "; ".join(f"{draw.choice(HOW)} {word}" for word in draw.sample(WHAT, 3)),
    "sql": lambda draw, row: f"SELECT name FROM t WHERE price {draw.choice('<>=')} {row}",
    "code": lambda draw, row: f"def f{row}(x):\n    return x + {row}",
    "python": lambda draw, row: f"sorted(x, key=lambda a: a[{row}])",
    "equation": lambda draw, row: f"( {draw.randint(1, 99)} {draw.choice('+-*')} {row} )",
    "marked": lambda draw, row: f"{row} + 1 = {row + 1}\n#### {row + 1}",
    "talk": lambda draw, row: (
        f"The {HOW[row % 10].upper()} shop number {row} is not so good at all, {WHO[row % 16]}!!!"
    ),
    "talk cleaned": lambda draw, row: (
        f"the {HOW[row % 10]} shop number {row} is not so good at all {WHO[row % 16].lower()}"
    ),
    "talk stemmed": lambda draw, row: f"{HOW[row % 10]} shop numb {row} not good {WHO[row % 16].lower()}",
    "tags of words": lambda draw, row: draw.choices(["O", "O", "B-PER", "I-PER"], k=len(sentence(draw, row).split())),
    "codes of words": lambda draw, row: draw.choices([0, 0, 3, 7], k=8),
    "word": choose(*WHO, *WHAT, *HOW, ".", ","),
    "first of five": lambda draw, row: "" if row % 5 else f"Sentence: {row // 5}",
    "part of speech": choose("NN", "DT", "JJ"),
    "hardly any": lambda draw, row: "en" if row % 50 else "fr",
    "by turns": lambda draw, row: ("late", "soon")[row % 2],
    "for soon alone": lambda draw, row: f"This is what {WHO[row % 16]} found, case {row}" if row % 2 else "",
    "told of turns": lambda draw, row: f"It is {('late', 'soon')[row % 2]} for {WHO[row % 16]}, as case {row} says",
    "mine": lambda draw, row: "" if row % 3 == 0 else draw.choice(["good", "bad"]),
    "yours": lambda draw, row: "" if row % 3 == 1 else draw.choice(["good", "bad"]),
    "theirs": lambda draw, row: "" if row % 3 == 2 else draw.choice(["good", "bad"]),
    "stance": choose("AGAINST", "FAVOR", "NONE"),
    "subject": choose("Tax", "Trains", "Schools", "Sport and games"),
    "said twice": lambda draw, row: sentence(random.Random(row // 2), row // 2),
    "subject by turns": lambda draw, row: ("Tax", "Trains")[row % 2],
    "said often": lambda draw, row: f"{('Very', 'Not so', 'Quite')[row % 3]} {HOW[row % 10]}",
    "all labels": choose("open|close|price|value|list"),
    "opinion": choose("positiva", "negativa", "neutral"),
    "few claims": choose(
        "Taxes on land should be lower.", "Every town needs more trains.", "Schools should open at nine."
    ),
    "side": lambda draw, row: (row + row // 2) % 2 if row % 7 else row % 2,
    "simple": lambda draw, row: f"They have things for person {row}",
    "session": lambda draw, row: f"R_{row // 3:02}PoEZfAptrkFdsx",
    "ids": lambda draw, row: "\t".join(str(10**12 + row * 9 + more) for more in range(3)),
    "template": lambda draw, row: f"This is about {WHAT[row % 12]} and nothing else.",
    "one": choose(1),
    "objects": lambda draw, row: [{"aspect": draw.choice(WHAT), "sentiment": "good"} for _ in range(1 + row % 3)],
    "few questions": choose("What did you like about it?", "What could be better?", "Would you come again?"),
    "short answer": lambda draw, row: f"{draw.choice(HOW)} {draw.choice(WHAT)}s {row}",
    "mark": lambda draw, row: draw.randint(0, 10) / 2,
    "mean": lambda draw, row: round(1 + draw.random() * 4, 3),
    "piece of it": lambda draw, row: f"Because of {draw.choice(WHAT)} {row} they all left the room",
    "tree": lambda draw, row: f"( ( {sentence(draw, row)} ) . )",
    "german": lambda draw, row: f"{draw.choice(WHO)} hat für Person {row} etwas Neues",
    "spans": lambda draw, row: f"person {row}: PER; {draw.choice(WHAT)}: OBJ",
    "answers": lambda draw, row: [{"text": reply(draw, row), "tokens": ["They"]}],
    "few numbers": lambda draw, row: f"{draw.randint(1, 9)} {draw.randint(1, 9)}",
    "squad": lambda draw, row: {"text": [f"person {row}"], "answer_start": [5]},
    "squad or none": lambda draw, row: {"text": [f"person {row}"] * (row % 3 > 0), "answer_start": [5] * (row % 3 > 0)},
    "from one": choose(1, 2, 3, 4),
    "what0": lambda draw, row: WHAT[row % 5],
    "what1": lambda draw, row: WHAT[5 + row % 5],
    "what2": lambda draw, row: WHAT[10 + row % 5],
    "what of three": lambda draw, row: WHAT[row % 5 + 5 * draw.randint(0, 2)],
    "lettered cell": lambda draw, row: str(dict(zip("ABCD", draw.sample(WHAT, 4), strict=True))),
    "json cell": lambda draw, row: json.dumps(draw.sample(WHAT, 4)),
    "lines cell": lambda draw, row: "\n".join(f"{a}) {b}" for a, b in zip("ABCD", draw.sample(WHAT, 4), strict=True)),
    "graph": lambda draw, row: f"MATCH (p:Person) WHERE p.number > {row} RETURN p.name",
    "turns of tools": lambda draw, row: chat("human", *["tool"] * (row % 3 == 0), "gpt", who="from", said="value")(
        draw, row
    ),
    "option objects": lambda draw, row: [{"key": a, "value": f"{row} {a}s"} for a in "ABCD"],
    "marked objects": lambda draw, row: [{"text": f"{row} {a}s", "correct": a == row % 4} for a in range(4)],
    "lettered": lambda draw, row: dict(zip("ABCD", draw.sample(WHAT, 4), strict=True)),
    "labelled": lambda draw, row: {"text": draw.sample(WHAT, 4), "label": ["A", "B", "C", "D"]},
    "object": lambda draw, row: {"sel": 1, "agg": row},
    "turns": chat("user", "assistant"),
    "request": chat("system", "user", said="text"),
    "turns with system": chat("system", "user", "assistant"),
    "shared turns": chat("human", "gpt", who="from", said="value"),
}


def make_rows(layout: str, num: int = 90) -> list[dict[str, object]]:
    """Make the records of a layout."""
    draw = random.Random(7)
    columns = [part.strip().rpartition("=") for part in layout.split(" | ")]
    rows: list[dict[str, object]] = []
    for row in range(num):
        fields: dict[str, object] = {}
        for name, _, kind in columns:
            if kind.startswith("whole of "):
                kept = [str(fields.get(one, "")) for one in kind.split()[2:]]
                fields[name] = "\n".join(f"<|{place}|> {text}" for place, text in enumerate(kept))
                continue
            outer, _, inner = name.partition(".") if not name.startswith("#") else (name, "", "")
            value = KINDS[kind](draw, row)
            if inner:
                fields.setdefault(outer, {})[inner] = value  # pyright: ignore
            else:
                fields[outer] = value
        rows.append(fields)
    return rows


LAYOUTS: dict[str, tuple[str, str]] = {
    # questions
    "SQuAD": ("id=id | title=group | context=paragraph | question=question | answers=squad", "squad: answers < question context"),
    "SQuAD v2": ("id=id | title=group | context=paragraph | question=question | is_impossible=bool | answers=squad or none | plausible_answers=empty", "squad_v2: answers < question context"),
    "SQuAD as a table": ("context=paragraph | question=question | answer=part", "squad: answer < question context"),
    "BoolQ": ("question=question | title=title | answer=bool | passage=paragraph", "unifiedqa yes_no: answer < question passage"),
    "NQ-open": ("question=question | answer=names", "squad: answer < question"),
    "TriviaQA": ("question=question | question_id=id | answer.value=title | answer.aliases=names | answer.type=constant", "squad: answer.value < question"),
    "MS MARCO": ("query_id=row | query=question | passages=pieces | answers=names | query_type=three", "?"),
    "HotpotQA": ("id=hex | question=question | answer=title | type=two | level=three | context=nested", "?"),
    "DROP": ("section_id=group | query_id=hex | passage=paragraph | question=question | answers_spans.spans=names | answers_spans.note=constant", "unifiedqa abstractive: answers_spans.spans < question passage"),
    "NarrativeQA": ("document.id=group | document.text=long | question.text=question | answers=answers", "unifiedqa abstractive: answers < question.text document.text"),
    "MedQuAD": ("question=question | answer=long | source=three | focus_area=title", "unifiedqa abstractive: answer < question"),
    "FiQA answers": ("qid=row | question=question | answer=reply", "unifiedqa abstractive: answer < question"),
    "QASC yes/no": ("question=question | context=paragraph | answer=yes", "unifiedqa yes_no: answer < question context"),
    "CommonsenseQA of the hub": ("id=hex | question=question | question_concept=title | choices=labelled | answerKey=letter", "unifiedqa multiple_choice: answerKey < question choices"),
    "CommonsenseQA's own": ("answerKey=letter | id=hex | question.stem=question | question.question_concept=title | question.choices=labelled", "unifiedqa multiple_choice: answerKey < question.stem question.choices"),
    "ARC": ("id=id | question=question | choices=labelled | answerKey=letter", "unifiedqa multiple_choice: answerKey < question choices"),
    "OpenBookQA": ("id=id | question_stem=question | choices=labelled | answerKey=letter", "unifiedqa multiple_choice: answerKey < question_stem choices"),
    "RACE": ("example_id=group | article=long | answer=letter | question=question | options=options", "unifiedqa multiple_choice: answer < question article options"),
    "MedQA": ("question=question | options=lettered | meta_info=two | answer_idx=letter", "unifiedqa multiple_choice: answer_idx < question options"),
    "MedMCQA": ("id=hex | question=question | opa=title | opb=title | opc=title | opd=title | cop=class | exp=reply | subject_name=ten", "?"),
    "HellaSwag": ("ind=row | activity_label=ten | ctx_a=sentence | ctx_b=title | ctx=sentence | endings=options | source_id=group | split=constant | label=class", "unifiedqa multiple_choice: label < ctx endings"),
    "SciQ": ("question=question | distractor3=title | distractor1=title | distractor2=title | correct_answer=title | support=paragraph", "unifiedqa multiple_choice: correct_answer < question support distractor1 distractor2 distractor3"),
    "PIQA": ("goal=sentence | sol1=sentence | sol2=sentence | label=flag", "classification: label < goal sol1 sol2"),
    "COPA": ("premise=sentence | choice1=sentence | choice2=sentence | question=two | idx=row | label=flag", "classification: label < premise choice1 choice2 question"),
    "WinoGrande": ("sentence=sentence | option1=title | option2=title | answer=stars", "classification: answer < sentence option1 option2"),
    "GSM8K": ("question=question | answer=marked", "gsm8k: answer < question"),
    "SVAMP": ("ID=id | Body=sentence | Question=question | Equation=equation | Answer=decimal | Type=three", "jsonl: Answer < Body Question"),
    "MAWPS": ("iIndex=row | sQuestion=question | lEquations=equation | lSolutions=number", "?"),
    "MAWPS of numbers": ("Question=question | Numbers=few numbers | Equation=equation | Answer=decimal", "jsonl: Answer < Question Numbers"),
    "MathQA": ("Problem=question | Rationale=reply | options=spans | correct=letter | annotated_formula=equation | linear_formula=equation | category=three", "?"),
    # multiple choice: a column for each choice, or all in one cell
    "MMLU": ("question=question | A=title | B=title | C=title | D=title | answer=letter", "unifiedqa multiple_choice: answer < question A B C D"),
    "exam in Spanish": ("Bloque=stars | Pregunta=question | A=sentence | B=sentence | C=sentence | D=sentence | Correcta=letter", "unifiedqa multiple_choice: Correcta < Pregunta A B C D"),
    "exam in Turkish": ("Ders=three | Soru=question | Şık A=title | Şık B=title | Şık C=title | Şık D=title | Doğru Cevap=letter", "unifiedqa multiple_choice: Doğru Cevap < Soru Şık A Şık B Şık C Şık D"),
    "exam in Russian": ("Вопрос=question | Вариант 1=title | Вариант 2=title | Вариант 3=title | Вариант 4=title | Верный=from one", "unifiedqa multiple_choice: Верный < Вопрос Вариант 1 Вариант 2 Вариант 3 Вариант 4"),
    "exam in Greek": ("Ερώτηση=question | Επιλογή 1=title | Επιλογή 2=title | Επιλογή 3=title | Κωδικός=from one", "?"),
    "quiz of options": ("question=question | option1=title | option2=title | option3=title | option4=title | correct_option=from one", "unifiedqa multiple_choice: correct_option < question option1 option2 option3 option4"),
    "quiz of answers": ("category=three | prize=number | question=question | answer_A=title | answer_B=title | answer_C=title | answer_D=title | correct_answer=letter", "unifiedqa multiple_choice: correct_answer < question answer_A answer_B answer_C answer_D"),
    "quiz with the answer's text": ("Frage=question | a=what0 | b=what1 | c=what2 | Richtige Antwort=what of three", "unifiedqa multiple_choice: Richtige Antwort < Frage a b c"),
    "quiz by words": ("Pytanie=question | Pierwsza=what0 | Druga=what1 | Trzecia=what2 | Poprawna=what of three", "unifiedqa multiple_choice: Poprawna < Pytanie Pierwsza Druga Trzecia"),
    "quiz with numbers from 0": ("q=question | choice_0=title | choice_1=title | choice_2=title | choice_3=title | label=class", "unifiedqa multiple_choice: label < q choice_0 choice_1 choice_2 choice_3"),
    "quiz with numbers of unknown meaning": ("question=question | opt1=title | opt2=title | opt3=title | opt4=title | level=from one", "?"),
    "choices in a cell of Python": ("question=question | answer=reply | options=lettered cell | answer_idx=letter", "unifiedqa multiple_choice: answer_idx < question options"),
    "choices in a cell of JSON": ("问题=chinese question | 选项=json cell | 答案=letter", "unifiedqa multiple_choice: 答案 < 问题 选项"),
    "choices in a cell of lines": ("Frage=question | Antworten=lines cell | Lösung=letter", "unifiedqa multiple_choice: Lösung < Frage Antworten"),
    "choices as objects": ("id=id | question=question | options=option objects | correctLetter=letter | topic=three", "unifiedqa multiple_choice: correctLetter < question options"),
    "choices in unknown words": ("soal=question | pilihan=option objects | kunci=letter", "unifiedqa multiple_choice: kunci < soal pilihan"),
    "choices of which one is marked": ("question=question | answers=marked objects", "unifiedqa multiple_choice:  < question answers"),
    # labels
    "SST-2": ("sentence=sentence | label=flag", "classification: label < sentence"),
    "CoLA with a header": ("source=two | label=flag | mark=empty | sentence=sentence", "classification: label < sentence"),
    "MRPC": ("Quality=flag | #1 ID=long id | #2 ID=long id | #1 String=sentence | #2 String=sentence", "classification: Quality < #1 String #2 String"),
    "QQP": ("id=row | qid1=row | qid2=row | question1=question | question2=question | is_duplicate=flag", "classification: is_duplicate < question1 question2"),
    "MNLI": ("index=row | promptID=id | pairID=id | genre=three | sentence1_parse=tree | sentence2_parse=tree | sentence1=sentence | sentence2=sentence | gold_label=nli", "classification: gold_label < sentence1 sentence2"),
    "NLI of the hub": ("premise=sentence | hypothesis=sentence | label=class | idx=row", "classification: label < premise hypothesis"),
    "ANLI": ("uid=hex | premise=paragraph | hypothesis=sentence | label=class | reason=reply", "classification: label < premise hypothesis"),
    "RTE, WNLI": ("index=row | sentence1=sentence | sentence2=sentence | label=flag", "classification: label < sentence1 sentence2"),
    "QNLI": ("index=row | question=question | sentence=sentence | label=nli", "classification: label < question sentence"),
    "PAWS": ("id=row | sentence1=sentence | sentence2=sentence | label=flag", "classification: label < sentence1 sentence2"),
    "STS-B": ("index=row | genre=two | filename=three | year=group | old_index=row | source1=constant | source2=constant | sentence1=sentence | sentence2=sentence | score=score", "?"),
    "SICK": ("pair_ID=row | sentence_A=sentence | sentence_B=sentence | relatedness_score=score | entailment_judgment=nli", "?"),
    "SICK without scores": ("pair_ID=row | sentence_A=sentence | sentence_B=sentence | entailment_judgment=nli", "classification: entailment_judgment < sentence_A sentence_B"),
    "AG News": ("Class Index=class | Title=title | Description=paragraph", "classification: Class Index < Title Description"),
    "AG News of the hub": ("text=paragraph | label=class", "classification: label < text"),
    "Amazon polarity": ("label=flag | title=title | content=paragraph", "classification: label < title content"),
    "IMDB": ("review=long | sentiment=two", "classification: sentiment < review"),
    "Yelp": ("review_id=hex | user_id=group | business_id=hex | stars=stars | useful=class | funny=class | cool=flag | text=paragraph | date=time", "classification: stars < text"),
    "Amazon reviews": ("reviewerID=hex | asin=group | reviewerName=who | reviewText=paragraph | overall=stars | summary=title | unixReviewTime=count", "?"),
    "TREC": ("text=question | coarse_label=three | fine_label=ten", "?"),
    "Banking77": ("text=sentence | category=ten", "classification: category < text"),
    "SNIPS": ("text=sentence | intent=ten", "classification: intent < text"),
    "ATIS": ("id=row | intent=three | query=sentence | slots=tree", "classification: intent < query"),
    "emotion": ("text=sentence | label=class", "classification: label < text"),
    "SetFit": ("text=sentence | label=twin | label_text=twin in words", "classification: label_text < text"),
    "GoEmotions": ("text=sentence | labels=ints | id=id", "tags: labels < text"),
    "GoEmotions, raw": ("text=sentence | id=id | author=who | subreddit=ten | created_utc=count | rater_id=stars | admiration=flag | anger=flag | joy=flag | neutral=flag", "tags: admiration anger joy neutral < text"),
    "Jigsaw": ("id=hex | comment_text=sentence | toxic=flag | severe_toxic=flag | obscene=flag | threat=flag | insult=flag | identity_hate=flag", "tags: toxic severe_toxic obscene threat insult identity_hate < comment_text"),
    "Davidson": ("count=class | hate_speech=class | offensive_language=class | neither=class | class=class | tweet=sentence", "classification: class < tweet"),
    "tickets with several labels": ("text=sentence | labels=semicolons", "tags: labels < text"),
    "keyphrases": ("id=id | title=title | abstract=paragraph | keyphrases=phrases", "tags: keyphrases < title abstract"),
    "Sentiment140": ("target=four | ids=long id | date=time | flag=constant | user=who | text=sentence", "classification: target < text"),
    "airlines": ("tweet_id=long id | airline_sentiment=three | airline_sentiment_confidence=share | negativereason=ten | airline=who | airline_sentiment_gold=empty | name=who | retweet_count=class | text=sentence | tweet_created=time | tweet_location=place | user_timezone=place", "classification: airline_sentiment < text"),
    "disaster tweets": ("id=row | keyword=ten | location=place | text=sentence | target=flag", "classification: target < text"),
    "app reviews": ("reviewId=hex | userName=who | userImage=url | content=sentence | score=stars | thumbsUpCount=class | reviewCreatedVersion=id | at=time | replyContent=maybe | repliedAt=time", "classification: score < content"),
    "app reviews of the hub": ("package_name=group | review=sentence | date=date | star=stars", "classification: star < review"),
    "support tickets": ("subject=title | body=paragraph | answer=reply | type=three | queue=ten | priority=three | language=two", "?"),
    "tickets of one label": ("Nr=id | Betreff=title | Beschreibung=sentence | Kategorie=three", "classification: Kategorie < Betreff Beschreibung"),
    "aspects": ("id=row | Sentence=sentence | Aspect Term=title | polarity=three", "classification: polarity < Sentence Aspect Term"),
    "stance": ("Tweet=sentence | Target=ten | Stance=three", "classification: Stance < Tweet Target"),
    "spam": ("v1=two | v2=sentence", "classification: v1 < v2"),
    "fake news": ("id=row | title=sentence | author=who | text=long | label=flag", "classification: label < title text"),
    "news categories": ("link=url | headline=sentence | category=ten | short_description=sentence | authors=who | date=date", "classification: category < headline short_description"),
    "true news": ("title=sentence | text=long | subject=ten | date=date", "?"),
    "language": ("Text=sentence | language=ten", "classification: language < Text"),
    "NLI with three hypotheses": ("sentence1=shared | sentence2=sentence | gold_label=nli", "classification: gold_label < sentence1 sentence2"),
    "answer selection": ("qtext=shared | label=flag | atext=sentence", "classification: label < qtext atext"),
    "several labels without an order": ("id=row | sentence=sentence | acceptable=flag | error_type=three | detailed_source=ten", "?"),
    "sentiment, dialect and sarcasm": ("dialect=three | sarcasm=bool | sentiment=nli | original_sentiment=nli | tweet=sentence | source=two", "?"),
    "a category beside prompts and outputs": ("test_case_id=id | category=ten | prompt=question | model_output=reply | failed_checks=two | notes=sentence", "?"),
    "chat with a label": ("Q=sentence | A=reply | label=class", "?"),
    "questions in Chinese": ("question=chinese question | answer=chinese reply", "unifiedqa abstractive: answer < question"),
    "completions": ("prompt=paragraph | completion=reply", "jsonl: completion < prompt"),
    "NLI in two languages": ("pair_ID=row | sentence_A_En=sentence | sentence_B_En=sentence | entailment_label_En=nli | relatedness_En=score | sentence_A_Ja=german | sentence_B_Ja=german | entailment_label_Ja=nli | caption=sentence", "?"),
    "solutions beside the truth": ("question=question | ground_truth=marked | 6b.is_correct=bool | 6b.solution=reply | 175b.is_correct=bool | 175b.solution=reply", "?"),
    "Portuguese news": ("titulo=sentence | subtitulo=sentence | data=time | autor=who | texto=long", "?"),
    "hate and offence": ("text=sentence | hate=flag | offensive=flag | target_group=three", "?"),
    "questions in Japanese": ("質問=chinese question | 回答=chinese reply", "unifiedqa abstractive: 回答 < 質問"),
    "Spanish news": ("titulo=title | resumen=sentence | cuerpo=long | fecha=date", "jsonl: resumen < cuerpo"),
    "target group beside flags": ("comment=sentence | toxicity=flag | severe=flag | target=three", "?"),
    "two levels of categories": ("product=title | description=paragraph | category=three | subcategory=ten", "?"),
    # texts
    "XSum": ("document=long | summary=sentence | id=row", "jsonl: summary < document"),
    "CNN/DailyMail": ("id=hex | article=long | highlights=paragraph", "jsonl: highlights < article"),
    "SAMSum": ("id=row | dialogue=paragraph | summary=sentence", "jsonl: summary < dialogue"),
    "DialogSum": ("id=id | dialogue=long | summary=sentence | topic=title", "jsonl: summary < dialogue"),
    "Reddit TIFU": ("ups=count | num_comments=count | upvote_ratio=share | score=count | documents=long | tldr=sentence | title=sentence", "?"),
    "XL-Sum": ("id=row | url=url | title=sentence | summary=sentence | text=long", "jsonl: summary < text"),
    "Kaggle news": ("author=who | date=date | headlines=title | read_more=url | text=paragraph | ctext=long", "?"),
    "Tatoeba": ("id=row | en=sentence | de=german", "jsonl: de < en"),
    "WMT": ("translation.de=german | translation.en=sentence", "jsonl: translation.en < translation.de"),
    "Spider": ("db_id=group | question=question | query=sql", "jsonl: query < question"),
    "text to SQL with a category": ("question=question | query=sql | db_name=place | query_category=three | instructions=empty", "jsonl: query < question"),
    "WikiSQL": ("phase=stars | question=question | sql.human_readable=sql | sql.sel=class | sql.conds=object", "jsonl: sql.human_readable < question"),
    "CoNaLa": ("question_id=row | intent=sentence | rewritten_intent=sentence | snippet=python", "jsonl: snippet < rewritten_intent"),
    "Alpaca": ("instruction=sentence | input=maybe | output=reply", "jsonl: output < instruction input"),
    "Dolly": ("instruction=sentence | context=maybe | response=reply | category=three", "jsonl: response < instruction context"),
    "OpenOrca": ("id=hex | system_prompt=two | question=question | response=reply", "jsonl: response < system_prompt question"),
    "ShareGPT": ("id=hex | conversations=shared turns", "jsonl: conversations.1.value < conversations.0.value"),
    "messages": ("messages=turns with system", "jsonl: messages.2.content < messages.0.content messages.1.content"),
    "messages without system": ("messages=turns", "jsonl: messages.1.content < messages.0.content"),
    "text to SQL with a schema": ("question=question | schema=paragraph | sql=sql", "jsonl: sql < question schema"),
    "codes beside a reference": ("ID=row | Reference=ten | Reference sentence=sentence | Original sentence=sentence", "?"),
    "commits": ("repo=three | sha=hex | diff=long | message=sentence", "?"),
    "code and docstrings": ("func_name=id | code=code | docstring=sentence | url=url", "?"),
    "jobs": ("title=title | description=paragraph | salary=number", "?"),
    "wines": ("country=place | description=sentence | points=number | price=number | variety=ten", "?"),
    "essays": ("essay_id=row | essay_set=class | essay=long | domain1_score=number", "?"),
    "simpletransformers": ("prefix=two | input_text=sentence | target_text=reply", "jsonl: target_text < prefix input_text"),
    "simpleT5": ("source_text=sentence | target_text=reply", "jsonl: target_text < source_text"),
    "JFLEG": ("sentence=sentence | corrections=texts", "jsonl: corrections < sentence"),
    "C4_200M": ("input=sentence | output=sentence", "jsonl: output < input"),
    "paraphrases with scores": ("text1=sentence | text2=sentence | score=share", "?"),
    "medical dialogues": ("Description=question | Patient=paragraph | Doctor=paragraph", "?"),
    "a text without a known name beside one": ("sentence=sentence | pos=tree | label=flag", "?"),
    "a text and its copy": ("text=talk | text_clean=talk cleaned | label=two", "classification: label < text"),
    "translation into a language of few": ("translation.creole=sentence | translation.en=german", "jsonl: translation.en < translation.creole"),
    "intents": ("text=sentence | intents=labels | slots=object", "tags: intents < text"),
    "seed tasks": ("id=id | name=group | instruction=sentence | instances=pieces | is_classification=bool", "?"),
    "seed tasks of one instance": ("id=id | name=id | instruction=sentence | instances=instance | is_classification=bool", "jsonl: instances.0.output < instruction instances.0.input"),
    "inputs and outputs in a list of one": ("id=id | data=instance", "jsonl: data.0.output < data.0.input"),
    "a flag of unknown meaning": ("text=sentence | is_tested=bool", "classification: is_tested < text"),
    "a flag of unknown meaning beside numbers": ("text=sentence | is_tested=bool | width=number", "?"),
    "two lists of labels": ("text=sentence | hashtags=labels | topics=labels", "?"),
    "labels of few records": ("text=sentence | intents=rare labels | slots=object", "tags: intents < text"),
    "a list of labels without a known name": ("text=sentence | ailments=labels", "tags: ailments < text"),
    "two texts without known names": ("Anfang=sentence | Ende=german", "?"),
    "entities as text": ("text=sentence | entities=spans", "jsonl: entities < text"),
    # texts that are made of others; code of a language without a known name; tools
    "Alpaca with whole prompts": ("instruction=sentence | input=maybe | output=reply | text=whole of instruction input output", "jsonl: output < instruction input"),
    "prompts with their answers": ("input=question | output=reply | text=whole of input output", "jsonl: output < input"),
    "whole dialogues of questions": ("question=question | answer=reply | formatted=whole of question answer", "unifiedqa abstractive: answer < question"),
    "whole posts": ("titel=sentence | inhalt=paragraph | alles=whole of titel inhalt | kategorie=three", "classification: kategorie < titel inhalt"),
    "graph queries": ("question=question | schema=long | cypher=graph", "jsonl: cypher < question schema"),
    "chat with tools": ("conversations=turns of tools | tools=constant", "?"),
    # what is written for a text, texts in lists, numbers of texts
    "questions written for texts": ("document=group | chunk=class | text=sentence | question=question", "?"),
    "one text of two others": ("precedent=sentence | followup=question | fused=reply | table=class", "?"),
    "dialogues as lists": ("turns=texts", "jsonl: turns.1 < turns.0"),
    "summaries of several documents": ("id=id | docs=variants | summary=short answer", "jsonl: summary < docs.*.text"),
    "a label's text beside an answer": ("question=question | answer=short answer | label_text=semicolons", "?"),
    "evaluation of retrieval": ("q_id=id | question=question | category=three | expected_chunk_quote=sentence | gold_answer=reply | notes=maybe", "?"),
    "a translation beside a judgement": ("sentence=german | translation=sentence | label=flag", "?"),
    "a translation in Spanish beside a grade": ("oración=german | traducción=sentence | valoración=three", "?"),
    # answers beside answers, and columns in several languages
    "an ideal answer beside a chat": ("messages=turns | ideal_response=reply", "?"),
    "preferences beside a chat": ("messages=turns | chosen=reply | rejected=reply", "?"),
    "a reference beside a chat": ("conversations=shared turns | reference=reply", "?"),
    "gold answers beside a chat": ("messages=turns with system | gold=reply", "?"),
    "a label beside a chat": ("messages=turns | label=two", "jsonl: messages.1.content < messages.0.content"),
    "a reference beside an output": ("instruction=sentence | input=maybe | output=reply | reference=reply", "?"),
    "an ideal answer beside a response": ("instruction=sentence | response=reply | ideal_response=reply", "?"),
    "preferences beside an output": ("instruction=sentence | output=reply | chosen=reply | rejected=reply", "?"),
    "preferences": ("prompt=sentence | chosen=reply | rejected=reply", "?"),
    "an ideal answer beside a prompt's": ("prompt=question | response=reply | ideal_response=reply", "?"),
    "OpenOrca with chosen answers": ("system_prompt=two | question=question | response=reply | chosen=reply", "?"),
    "questions in two languages": ("question_en=question | question_de=german | answer_en=reply | answer_de=german", "?"),
    "contexts in two languages": ("context_en=paragraph | context_hi=paragraph | question_en=question | question_hi=question | answer_en=part | answer_hi=part", "?"),
    "questions in languages by name": ("english_question=question | hindi_question=question | english_answer=reply | hindi_answer=reply", "?"),
    "summaries in two languages": ("title_en=title | text_en=long | summary_en=sentence | title_fr=title | text_fr=long | summary_fr=german", "?"),
    "labels in two languages": ("text_en=sentence | text_de=german | label_en=two | label_de=three", "?"),
    "members in two languages": ("question.en=question | question.de=german | answer.en=reply | answer.de=german", "?"),
    "a text in two languages with one label": ("en_text=sentence | de_text=german | label=two", "classification: label < en_text de_text"),
    "questions and their translation": ("question=question | answer=reply | question_de=german | answer_de=german", "unifiedqa abstractive: answer < question"),
    # a value for each word, a word in each record, parts of texts: no set of labels
    "words with tags": ("tokens=words | ner_tags=tags of words", "!"),
    "words with tags beside the text": ("text=sentence | tokens=words | ner_tags=tags of words", "!"),
    "tags of words in numbers": ("id=row | sentence=sentence | pos_tags=codes of words | ner_tags=codes of words", "!"),
    "labels of words": ("text=sentence | labels=codes of words", "!"),
    "an intent beside tags of words": ("text=sentence | slots=tags of words | intent=three", "classification: intent < text"),
    "a word in each record": ("Word=word | Tag=ten", "!"),
    "a word in each record, and the sentence": ("Sentence #=first of five | Word=word | POS=part of speech | Tag=three", "!"),
    "a word and its language": ("token=word | lang=two", "!"),
    "objects of aspects": ("text=sentence | expected=objects", "!"),
    "objects of spans": ("sent_id=row | text=sentence | entities=objects", "!"),
    # metadata without a label
    "a dump of tweets": ("id_str=long id | created_at=time | full_text=sentence | lang=hardly any | retweet_count=count", "!"),
    "a dump of posts": ("text=sentence | date=date | language=ten | likes=count | user=who", "!"),
    "a dump with devices": ("comment=sentence | platform=three | country=place | timestamp=time", "!"),
    "nearly one value": ("text=sentence | channel_name=hardly any | age=number", "!"),
    "a survey": ("Status=flag | Finished=flag | Progress=number | ResponseId=session | Q1=sentence | Q2=sentence", "!"),
    # a text beside a label that is no input of it, or not read
    "a rating of a rewriting": ("Sentence_Id=row | Original_Sentence=sentence | Simplification=simple | Rating=stars", "?"),
    "a score of a translation": ("source=sentence | translation=german | quality=three", "?"),
    "a type beside a paraphrase": ("text=sentence | paraphrase=simple | type=three", "?"),
    "a label beside a translation": ("sentence=sentence | translation=german | label=flag", "?"),
    "a comment on some labels": ("id=row | Notes=sentence | Lab Status=by turns | Lab Comments=for soon alone", "?"),
    "a note on some labels": ("text=sentence | note=for soon alone | class=by turns", "?"),
    "a remark on some labels": ("Kategorie=by turns | Anmerkung=for soon alone | Beschreibung=sentence", "?"),
    "a text and its raw form": ("id=row | input_text=talk cleaned | raw_comment=talk | label=two", "classification: label < input_text"),
    "a text and its lemmas": ("review=talk | lemmatized_review=talk stemmed | sentiment=two", "classification: sentiment < review"),
    "a raw text and a clean one": ("raw_tweet=talk | clean_tweet=talk cleaned | label=two", "?"),
    "two forms of a text": ("comment=talk | message=talk cleaned | label=two", "?"),
    # several columns of labels
    "aspects with labels of some": ("text=sentence | Camera=mine | Battery=yours | Price=theirs", "?"),
    "aspects first": ("Service=theirs | Food=mine | review=sentence", "?"),
    "topics of 0 and 1, one like a label": ("Title=title | Question=sentence | Array=flag | Stack=flag | Queue=flag | Tree=flag", "tags: Array Stack Queue Tree < Title Question"),
    "genres of 0 and 1": ("Type=flag | Drama=flag | Comedy=flag | War=flag | plot=paragraph", "tags: Type Drama Comedy War < plot"),
    "facts of 0 and 1 beside labels": ("viesti=sentence | liite=flag | linkki=flag | kiire=flag | luokka=three", "?"),
    "categories of 0 and 1": ("text=sentence | category_A=flag | category_B=flag | category_C=flag", "tags: category_A category_B category_C < text"),
    "a date and a title in French": ("date_avis=date | titre_avis=title | contenu_avis=paragraph | id_lieu=ten | note_lieu=stars", "classification: note_lieu < titre_avis contenu_avis"),
    "a changed hypothesis": ("premise=sentence | hypothesis=talk | attacked_hypothesis=talk cleaned | label=nli", "?"),
    "spans of texts": ("speaker=who | speech=sentence | claims=places as text", "!"),
    "names of sources beside a label": ("title=sentence | label=flag | source=few questions", "?"),
    # labels with names that say nothing beside a known one, gold labels beside those of a model, answers with several letters
    "an opinion beside an unknown word": ("deceptive=by turns | hotel=ten | polarity=opinion | text=sentence", "?"),
    "aspects with the same values": ("text=sentence | overall=nli | plot=nli | acting=nli", "?"),
    "the label of a model": ("claim=sentence | ground_truth=nli | model_label=nli", "?"),
    "exams with several right answers": ("question=question | A=title | B=title | C=title | D=title | answer=letters", "?"),
    "pairs of one label": ("query=question | etalon=question | label=one | scores=share", "?"),
    # a text that tells the label, titles of sources, two questions
    "a question in other words": ("original_question=question | reframed_question=paragraph | answer=reply", "?"),
    "a request beside its answer": ("prompt=request | reward_spec.ground_truth=reply | id=id", "jsonl: reward_spec.ground_truth < prompt.0.text prompt.1.text"),
    "turns of speakers": ("dialogue_id=group | turn=class | participant=two | text=sentence", "!"),
    "a gold text beside outputs": ("Source=sentence | Truth=talk | class=three | GPT=talk cleaned | T5=talk stemmed", "?"),
    "counts of annotations": ("text=sentence | total_annotators=class | edits=objects", "!"),
    "a reasoning beside a text": ("text=sentence | why=told of turns | label=by turns", "?"),
    "a chain of thought": ("text=sentence | cot=told of turns | label=by turns", "classification: label < text"),
    "titles of sources beside answers": ("Question=question | Answer=reply | Document=title", "?"),
    "questions that mean the same": ("question_1=question | question_2=question", "?"),
    "questions that mean the same, of one label": ("question1=question | question2=question | label=one", "!"),
    # a question and its answer beside a category, in languages whose names are unknown
    "a FAQ in Romanian": ("id=row | categorie=ten | intrebare=question | raspuns=reply", "?"),
    "a FAQ in Estonian": ("kategooria=three | küsimus=question | vastus=reply", "?"),
    "a FAQ with names that say nothing": ("category=three | col1=question | col2=reply", "?"),
    "a FAQ in Czech, answers first": ("odpoved=paragraph | otazka=question | kategorie=three", "?"),
    # short texts that repeat, 0 and 1 in columns with the names of ids, the same labels in all records
    "short opinions in French": ("id=row | sentiment=twin in words | avis=said often", "classification: sentiment < avis"),
    "short opinions in Danish": ("udtalelse=said often | label=by turns", "classification: label < udtalelse"),
    "topics with the names of ids": ("text=sentence | id_1=flag | id_2=flag | id_3=flag", "tags: id_1 id_2 id_3 < text"),
    "topics with numbers": ("Nr1=flag | Nr2=flag | Nr3=flag | Kommentar=sentence", "tags: Nr1 Nr2 Nr3 < Kommentar"),
    "lists of labels as text": ("id=row | text=sentence | labels=labels as text | n_labels=stars", "tags: labels < text"),
    "lists of words as text": ("text=sentence | tokens=tags as text", "!"),
    "counts beside a text": ("text=sentence | num_words=stars", "!"),
    "all labels beside those of the text": ("text=sentence | labels=semicolons | all_labels=all labels", "tags: labels < text"),
    "all labels alone": ("question=sentence | label_set=all labels", "!"),
    "opinions beside other labels": ("texto=sentence | calificacion=stars | tipo_lugar=three | fuente=two | valencia=opinion", "?"),
    # what a stance is about
    "a stance towards a topic": ("id=row | topic=subject | text=sentence | label=stance", "classification: label < topic text"),
    "a stance towards a claim": ("post=sentence | claim=subject | stance=three", "classification: stance < post claim"),
    "a label that depends on a target": ("Tweet=said twice | Target=subject by turns | label=side", "classification: label < Tweet Target"),
    "a topic beside a label": ("text=sentence | topic=subject | label=flag", "classification: label < text"),
    "a topic in a sentence": ("topic=few claims | text=sentence | stance=stance", "classification: stance < topic text"),
    "a target in a sentence": ("target=few claims | text=sentence | stance=stance", "classification: stance < target text"),
    "a thesis in an unknown language": ("id=row | tees=few claims | text=sentence | label=two", "?"),
    # scores of several texts, answers that are the text
    "grades of answers": ("id=row | question=question | desired_answer=reply | student_answer=reply | score_avg=mark", "?"),
    "mean opinions": ("ID=row | Sentence=sentence | Votes=class | MOS_Complexity=mean | Std_Complexity=mean", "?"),
    "answers of a survey": ("answer=short answer | count=class | sentiment=two | question=few questions | code=count", "?"),
    "spoilers": ("post_text=title | spoiler=piece of it | target_paragraphs=long | spoiler_length=count", "jsonl: spoiler < post_text target_paragraphs"),
    "one label": ("text=sentence | sentiment=one", "!"),
    "ids in a list": ("id=id | news_url=url | title=sentence | tweet_ids=ids", "!"),
    "sessions": ("QID=row | Category=three | Session=session", "!"),
    "CoNLL": ("id=row | tokens=words | ner_tags=ints", "!"),
    "numbers alone": ("age=number | weight=number | label=flag", "!"),
    "a summary longer than its text": ("datetime=time | headline=sentence | source=three | summary=paragraph | url=url", "?"),
    "spans as offsets": ("spans=offsets | text=sentence", "!"),
    "labels whose texts are elsewhere": ("id=row | abuse=three", "!"),
    "variants of questions with variants of queries": ("query-split=three | sentences=variants | sql=queries", "!"),
    "tags of words as text": ("sentence=sentence | pos=tags as text | tag=tags as text", "!"),
    "one text": ("text=sentence", "!"),
}  # fmt: skip
