import base64
import json
import random
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.estimation.byte_classes import CLASSES, ByteClass, measure_text
from serve_app.request import TextCategory
from tests.core.routing.prompts import CHINESE, CODE, GERMAN, KOREAN, PROSE, RUSSIAN

RNG = random.Random(3)
BASE64 = base64.b64encode(RNG.randbytes(3000))
FLOATS = json.dumps([round(RNG.gauss(0, 3), 4) for _ in range(400)]).encode()
UUIDS = "\n".join(str(uuid.UUID(int=RNG.getrandbits(128))) for _ in range(60)).encode()


def classify(text: str | bytes) -> TextCategory:
    return measure_text(text)[1]


def counted(text: str | bytes) -> dict[ByteClass, int]:
    """Return the classes that occur."""
    counts, _ = measure_text(text)
    assert len(counts) == CLASSES
    return {ByteClass(index): count for index, count in enumerate(counts) if count}


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("", {}),
        (
            "Ab, 12\n{}",
            {"CAPITAL": 1, "LOWER": 1, "SIGN": 1, "BLANK": 1, "DIGIT": 2, "LINE_END": 1, "CODE_SIGN": 2},
        ),
        ("Üß", {"LATIN": 2}),
        ("čő", {"LATIN_EXTENDED": 2}),
        ("αβγ", {"GREEK": 3}),
        ("привет", {"CYRILLIC": 6}),
        ("שלום", {"HEBREW": 4}),
        ("سلام", {"ARABIC": 4}),
        ("नमस्ते", {"DEVANAGARI": 6}),
        ("สวัสดี", {"THAI": 6}),
        ("வணக்கம்", {"INDIC": 7}),
        ("ạ„日かな한🙂", {"VIETNAMESE": 1, "TYPOGRAPHY": 1, "HAN": 1, "KANA": 2, "HANGUL": 1, "OTHER": 1}),
    ],
)
def test_characters_are_counted_by_script(text: str, classes: dict[str, int]) -> None:
    expected = {ByteClass[name]: count for name, count in classes.items()}
    assert counted(text) == counted(text.encode()) == expected


@pytest.mark.parametrize("text", ["word 12, ", "слово ", "โลก "])
def test_the_classes_of_a_long_text_are_scaled_from_a_sample(text: str) -> None:
    whole = counted(text * 10_000)
    for name, count in counted(text).items():
        assert whole[name] == pytest.approx(10_000 * count, rel=0.03)


@pytest.mark.parametrize(
    ("text", "category"),
    [
        (b"", TextCategory.PROSE),
        (PROSE, TextCategory.PROSE),
        (CODE, TextCategory.CODE),
        (json.dumps({"name": "search", "type": "object", "required": ["query"]}).encode(), TextCategory.CODE),
        (CHINESE, TextCategory.CJK),
        (KOREAN, TextCategory.CJK),
        (RUSSIAN, TextCategory.CJK),
        (GERMAN, TextCategory.MIXED),
        (PROSE.upper(), TextCategory.MIXED),
        (FLOATS, TextCategory.NUMERIC),
        (BASE64, TextCategory.NUMERIC),
        (base64.encodebytes(RNG.randbytes(3000)), TextCategory.NUMERIC),
        (RNG.randbytes(1000).hex().encode(), TextCategory.NUMERIC),
        (UUIDS, TextCategory.NUMERIC),
        (PROSE * 2 + BASE64[: len(PROSE)], TextCategory.MIXED),
        (PROSE * 4 + CHINESE, TextCategory.MIXED),
    ],
)
def test_each_kind_of_text_is_recognised(text: bytes, category: TextCategory) -> None:
    assert classify(text) is category


@pytest.mark.parametrize("text", [PROSE, CODE, CHINESE, FLOATS], ids=["prose", "code", "chinese", "floats"])
def test_a_text_of_any_length_is_of_the_kind_of_its_pieces(text: bytes) -> None:
    assert classify(text * (2_000_000 // len(text))) is classify(text)


def test_a_long_text_is_judged_by_all_of_it_and_not_by_its_start() -> None:
    assert classify(PROSE * 50 + BASE64 * 100) is TextCategory.NUMERIC
    assert classify(BASE64 * 2 + PROSE * 3000) is TextCategory.PROSE


@given(st.binary(max_size=20_000))
def test_any_bytes_have_a_category(text: bytes) -> None:
    assert classify(text) in TextCategory


@given(st.text(max_size=500), st.integers(2, 40))
def test_repeating_a_short_text_does_not_change_its_category(text: str, times: int) -> None:
    raw = text.encode()
    if len(raw) * times <= 8192:
        assert classify(raw * times) is classify(raw)


MINIFIED = b"function(){return(a.length>b.length)&&this.render(c,d);};const e=[a,b].map(f=>f.id);" * 12


@pytest.mark.parametrize(
    ("text", "category"),
    [
        # English with a few names, and with typographic quotes: 0.5 % and 3 % of the bytes.
        (PROSE[:995].rstrip() + " José".encode(), TextCategory.PROSE),
        (PROSE[:900] + "“quoted” … so".encode() * 2, TextCategory.PROSE),
        # Few blanks and digits: neither plain code nor encoded bytes.
        (MINIFIED, TextCategory.MIXED),
        (MINIFIED.replace(b",", b", ").replace(b">", b" > ").replace(b"&&", b" && "), TextCategory.CODE),
    ],
    ids=["names", "quotes", "minified", "spaced"],
)
def test_the_shares_that_decide_are_shares_of_the_text(text: bytes, category: TextCategory) -> None:
    assert classify(text) is category
    assert classify(text * 3) is category


@given(st.text(max_size=60), st.sampled_from([1, 300, 2_000]))
def test_a_text_has_the_category_of_its_utf8(text: str, times: int) -> None:
    assert classify(text * times) is classify((text * times).encode())


@pytest.mark.parametrize(
    "text", [PROSE, CODE, CHINESE, FLOATS, BASE64], ids=["prose", "code", "chinese", "floats", "base64"]
)
def test_a_long_text_has_the_category_of_its_utf8(text: bytes) -> None:
    long = (text * (100_000 // len(text))).decode()
    assert classify(long) is classify(long.encode())
