"""Texts that are not UTF-8: the encoding that is named, what it reads, and the command that converts the file."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys

import pytest

from fivetune.data.readers.encodings import LETTERS, can_read_all
from fivetune.data.readers.records import read_records
from fivetune.errors import DataError

TEXTS = {
    "Russian": ("Этот фильм мне очень понравился, хотя конец был слабым.", "cp1251 koi8-r cp866 iso8859-5"),
    "Ukrainian": ("Цей фільм мені дуже сподобався, але кінець був слабким.", "cp1251"),
    "capitals": ("ОТЛИЧНЫЙ ФИЛЬМ, СМОТРЕЛ ДВА РАЗА", "cp1251 koi8-r"),
    "Greek": ("Αυτή η ταινία μου άρεσε πολύ, αλλά το τέλος ήταν αδύναμο.", "cp1253"),
    "Hebrew": ("הסרט הזה היה טוב מאוד אבל הסוף היה חלש", "cp1255"),
    "Arabic": ("هذا الفيلم جيد جدا ولكن النهاية ضعيفة", "cp1256"),
    "Thai": ("ภาพยนตร์เรื่องนี้ดีมากแต่ตอนจบไม่ดี", "cp874"),
    "French": ("L'été dernier, la fête était gâchée à cause d'un élève énervé.", "cp1252 cp850 mac-roman"),
    "German": ("Die Straße ist schön, aber überfüllt.", "cp1252 cp850"),
    "Spanish": ("El niño comió en la mañana; ¿cuándo llegó el señor?", "cp1252 cp850"),
    "Portuguese": ("Não é uma solução, mas a informação é útil às crianças.", "cp1252"),
    "Italian": ("La città è più bella perché c'è il sole.", "cp1252"),
    "Danish": ("Jeg kan godt lide at læse bøger på øen om året.", "cp1252"),
    "marks": ("It’s a “good” film — don’t miss it…", "cp1252"),
    "contractions": ("I don’t know what it’s about, they’re late", "cp1252 gb18030"),
    "a blank that does not break": ("stuck on the trans?\u00a0mannerism or so", "cp1252"),
    "a price": ("it cost £ 20 only", "cp1252"),
    "a price in words": ("for £5 more", "cp1252"),
    "a dash": ("he won – at last", "cp1252"),
    "quotes": ("she said “no” and left", "cp1252 gb18030"),
    "an ellipsis": ("well… maybe", "cp1252"),
    "degrees": ("at 20° it is warm", "cp1252"),
    "a cafe": ("the café is closed", "cp1252 cp850 mac-roman"),
    "a name": ("Zoë met José in São Paulo", "cp1252"),
    "Czech": ("Tento film se mi velmi líbil, příště půjdu s přáteli.", "cp1250 cp852"),
    "Polish": ("Ten film bardzo mi się podobał, ale zakończenie było słabe.", "cp1250 cp852"),
    "Hungarian": ("Ez a film nagyon tetszett, de a végét nem értettem. Hűvös őszi idő.", "cp1250"),
    "Romanian": ("Acest film mi-a plăcut mult, dar sfârşitul a fost slab.", "cp1250"),
    "Turkish": ("Bu film çok güzeldi ama sonu kötüydü. Işık, şeker, ağaç.", "cp1254 cp857"),
    "Lithuanian": ("Šis filmas man labai patiko. Ąžuolas, ėjimas, ūkis.", "cp1257"),
    "Chinese": ("这部电影很好看，我推荐给大家。", "gb18030 gbk"),
    "short Chinese": ("餐馆环境优雅，服务周到", "gb18030"),
    "traditional Chinese": ("這部電影很好看，我推薦給大家。", "cp950"),
    "Japanese": ("この映画はとても面白くて良い。", "cp932 euc-jp"),
    "Korean": ("이 영화는 정말 재미있고 좋았습니다.", "cp949"),
    "short Korean": ("배송 빠르고 제품 품질 만족합니다", "euc-kr"),
}
SAME = {"gbk": "gb18030", "euc-kr": "cp949"}
CASES = [(kind, encoding) for kind, (_, encodings) in TEXTS.items() for encoding in encodings.split()]


def complain(path) -> str:
    with pytest.raises(DataError) as error:
        list(read_records(str(path)))
    return str(error.value)


@pytest.mark.parametrize(("kind", "encoding"), CASES)
def test_the_encoding_of_a_language_is_named_first(tmp_path, kind, encoding):
    path = tmp_path / "a.csv"
    text = TEXTS[kind][0]
    path.write_bytes(f'id,text\n1,plain\n2,"{text}"\n'.encode(encoding))
    message = complain(path)
    named = SAME.get(encoding, encoding)
    place = next(place for place, character in enumerate(text) if not character.isascii())
    assert text[place : place + 20].replace("\u00a0", r"\xa0") in message
    assert f". {named} reads it: iconv -f " in message
    if shutil.which("iconv"):
        command = re.search(r"iconv .*utf8-a\.csv", message)
        subprocess.run(command[0], shell=True, check=True)
        assert [record.fields["text"] for record in read_records(str(tmp_path / "utf8-a.csv"))] == ["plain", text]


def test_the_whole_file_is_tried(tmp_path):
    """The only byte that cp1252 lacks is the last one."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n" + "1,café déjà\n".encode("cp1252") * 20_000 + b"2,\x81\x8d\n")
    assert "cp1252 reads it" not in complain(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("damaged", "repaired"),
    [
        (b"sch\xf6n", "schön"),
        (b"to\xa0get", "to\u00a0get"),
        (b"it\x92s 80\x9390 %", "it’s 80“90 %"),
        (b"f\xc3r two\x9d muscles", "f\ufffdr two\ufffd muscles"),  # what is left of a letter; a sign that cp1252 lacks
        (b"so\xe2\x80 it is", "so\ufffd it is"),
    ],
)
def test_the_damaged_bytes_of_a_file_of_utf8_are_replaced_by_the_command(tmp_path, damaged, repaired, suffix):
    path = tmp_path / f"a b.csv{suffix}"
    content = "id,text\n1,schön\n2,größer\n".encode() + b"3," + damaged + "\n4,für\n".encode()
    path.write_bytes(gzip.compress(content) if suffix else content)
    message = complain(path)
    assert message.startswith(f"{path}:4: not UTF-8: byte 0x") and "damaged" in message
    command = re.search(r"(gzip .*)?python -c .*", message)[0]
    subprocess.run(command.replace("python -c", f"{sys.executable} -c"), shell=True, check=True)
    found = [record.fields["text"] for record in read_records(str(tmp_path / "utf8-a b.csv"))]
    assert found == ["schön", "größer", repaired, "für"]


def test_bytes_of_cp932_that_iconv_lacks(tmp_path):
    for content, is_read in (("面白い".encode("cp932"), True), (b"\xa0\x80", False)):
        (tmp_path / "a").write_bytes(content)
        with (tmp_path / "a").open("rb") as file:
            assert can_read_all(file, "cp932") == is_read


def test_letters_of_encodings_can_be_written_in_them():
    for encoding, languages in LETTERS.items():
        "".join(languages).encode(encoding)
