"""Byte classes and text category of a prompt, from its bytes alone, without a tokenizer.

A tokenizer needs about one token for 4 letters of English, 1 to 3 digits, one character of Chinese, and half
a character of Georgian. So the bytes of a text are counted by class: kinds of ASCII characters, and scripts
by the first byte of their UTF-8 characters. `estimate` learns the tokens of each class.

The category says what classes do not: how well the length can be forecast, and which answers to expect.

Theory of operation. One pass at C speed maps bytes to classes, and another counts them. Of texts longer than
`_SAMPLE_BYTES`, evenly spread slices are counted and scaled, which bounds the cost for any length.

Source: ours. The thresholds minimise the variation of bytes per token within a category
(experiments/estimator).
"""

import enum
from typing import AnyStr

import numpy as np

from serve_app.request import TextCategory

_SLICES = 16
_SLICE_BYTES = 512
_SAMPLE_BYTES = _SLICES * _SLICE_BYTES


class ByteClass(enum.IntEnum):
    """Classes of bytes. A character of several bytes counts once, by its first byte."""

    LOWER = 0
    CAPITAL = 1
    DIGIT = 2
    BLANK = 3  # and tabs
    LINE_END = 4
    CODE_SIGN = 5  # brackets, operators and markup, which are rare in prose
    SIGN = 6  # other ASCII characters
    LATIN = 7  # accents of Western Europe
    LATIN_EXTENDED = 8
    GREEK = 9
    CYRILLIC = 10
    HEBREW = 11
    ARABIC = 12
    DEVANAGARI = 13
    THAI = 14
    INDIC = 15  # other scripts of South Asia
    VIETNAMESE = 16  # and Georgian, and other scripts of the same block
    TYPOGRAPHY = 17  # quotes, dashes, symbols
    KANA = 18
    HAN = 19
    HANGUL = 20
    OTHER = 21  # emoji, full-width forms, rare scripts
    CONTINUATION = 22


CLASSES = int(ByteClass.CONTINUATION)
"""Number of classes that are counted."""

_CODE_SIGNS = b'{}[]()<>;=_"#/\\|*+&$@`~^%'
# First byte of UTF-8 characters, inclusive.
_FIRST_BYTES = {
    ByteClass.LATIN: (0xC2, 0xC3),
    ByteClass.LATIN_EXTENDED: (0xC4, 0xCC),
    ByteClass.GREEK: (0xCD, 0xCF),
    ByteClass.CYRILLIC: (0xD0, 0xD3),
    ByteClass.HEBREW: (0xD6, 0xD7),
    ByteClass.ARABIC: (0xD8, 0xDB),
    ByteClass.INDIC: (0xE0, 0xE0),
    ByteClass.VIETNAMESE: (0xE1, 0xE1),
    ByteClass.TYPOGRAPHY: (0xE2, 0xE2),
    ByteClass.KANA: (0xE3, 0xE3),
    ByteClass.HAN: (0xE4, 0xE9),
    ByteClass.HANGUL: (0xEA, 0xED),
}


def _class_of(byte: int) -> ByteClass:
    if 0x80 <= byte < 0xC0:
        return ByteClass.CONTINUATION
    for name, (first, last) in _FIRST_BYTES.items():
        if first <= byte <= last:
            return name
    kinds = (
        (b"abcdefghijklmnopqrstuvwxyz", ByteClass.LOWER),
        (b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", ByteClass.CAPITAL),
        (b"0123456789", ByteClass.DIGIT),
        (b" \t", ByteClass.BLANK),
        (b"\n\r", ByteClass.LINE_END),
        (_CODE_SIGNS, ByteClass.CODE_SIGN),
    )
    for letters, name in kinds:
        if byte in letters:
            return name
    return ByteClass.OTHER if byte >= 0x80 else ByteClass.SIGN


_TABLE = bytes(_class_of(byte) for byte in range(0x100))
# The scripts that share the first byte of INDIC, by their first two bytes.
_BY_TWO_BYTES = {
    ByteClass.DEVANAGARI: (b"\xe0\xa4", b"\xe0\xa5"),
    ByteClass.THAI: (b"\xe0\xb8", b"\xe0\xb9"),
}

# Shares of the text's bytes.
_CJK_NON_ASCII = 0.3
_MIXED_NON_ASCII = 0.08  # typographic quotes and dashes stay below
_MIXED_ACCENTS = 0.008  # English with a few names stays below, German and French lie at 0.03
_NUMERIC_DIGITS = 0.28  # log lines lie at 0.33, arithmetic problems in words at 0.10
_ENCODED_SIGNS = 0.45  # digits and capitals: base64 0.56, hex 0.62, uuids 0.55
_ENCODED_BLANKS = 0.04  # capitals in words have blanks between them, encoded bytes at most line ends
_MIXED_SIGNS = 0.10
_DENSE_BLANKS = 0.05  # minified code and style sheets 0.02, code 0.20 and more
_CODE_SHARE = 0.05
_TWO_BYTE_CLASSES = slice(ByteClass.LATIN, ByteClass.DEVANAGARI)


_EMPTY = (0,) * CLASSES, TextCategory.PROSE


def measure_text(text: str | bytes) -> tuple[tuple[int, ...], TextCategory]:
    """Return the bytes of a text by `ByteClass`, and its category; an empty text is prose.

    Costs at most as much as 8 KiB of UTF-8.

    Args:
        text: UTF-8 bytes, or a string, which is as cheap for ASCII and costs its encoding otherwise.
    """
    size = len(text)
    if isinstance(text, str) and size > _SAMPLE_BYTES and text.isascii():
        text = _evenly_spread(text).encode()
    elif isinstance(text, str):
        text = text.encode()
        size = len(text)
    if not text:
        return _EMPTY
    sample = text if len(text) <= _SAMPLE_BYTES else _evenly_spread(text)
    counts = _counts(sample)
    category = _category(counts, len(sample))
    if size > len(sample):
        scale = size / len(sample)
        counts = [round(count * scale) for count in counts]
    return tuple(counts), category


def _evenly_spread(text: AnyStr) -> AnyStr:
    """Return slices of a long text, including its start and its end. They may split characters."""
    span = len(text) - _SLICE_BYTES
    starts = [span * index // (_SLICES - 1) for index in range(_SLICES)]
    return text[:0].join([text[start : start + _SLICE_BYTES] for start in starts])


def _counts(sample: bytes) -> list[int]:
    classes = np.frombuffer(sample.translate(_TABLE), np.uint8)
    counts: list[int] = np.bincount(classes, minlength=CLASSES)[:CLASSES].tolist()
    if counts[ByteClass.INDIC]:
        for name, beginnings in _BY_TWO_BYTES.items():
            counts[name] = sum(map(sample.count, beginnings))
            counts[ByteClass.INDIC] -= counts[name]
    return counts


def _category(counts: list[int], size: int) -> TextCategory:
    ascii_bytes = sum(counts[: ByteClass.LATIN])
    non_ascii = size - ascii_bytes
    accents = sum(counts[_TWO_BYTE_CLASSES])
    if non_ascii >= _CJK_NON_ASCII * size:
        return TextCategory.CJK
    digits, blanks = counts[ByteClass.DIGIT], counts[ByteClass.BLANK] + counts[ByteClass.LINE_END]
    dense = digits + counts[ByteClass.CAPITAL]
    if digits >= _NUMERIC_DIGITS * size:
        return TextCategory.NUMERIC
    if dense >= _ENCODED_SIGNS * size and blanks <= _ENCODED_BLANKS * size:
        return TextCategory.NUMERIC
    if non_ascii > _MIXED_NON_ASCII * size or accents > _MIXED_ACCENTS * size:
        return TextCategory.MIXED
    if dense > _MIXED_SIGNS * size or blanks < _DENSE_BLANKS * size:
        return TextCategory.MIXED
    return TextCategory.CODE if counts[ByteClass.CODE_SIGN] >= _CODE_SHARE * size else TextCategory.PROSE
