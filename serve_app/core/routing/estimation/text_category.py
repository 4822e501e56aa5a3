"""The text category of a prompt, from byte counts alone, without a tokenizer.

Tokenizers need about one token per 4 bytes of English, but one per little more than 1 byte of digits or
base64. The categories are those between which this ratio differs most. The thresholds minimise its variation
within a category, with three tokenizer families (experiments/estimator).

Theory of operation. Passes at C speed (`bytes.translate` with deletions) count letters, blanks, digits,
capitals and code signs. Each pass processes only what the previous one has left, so all together cost little
more than the first. Texts longer than `_SAMPLE_BYTES` are classified by evenly spread slices, which bounds
the cost for any length.

- CJK is text whose bytes are mostly not ASCII: Chinese, Japanese and Korean, but also Cyrillic, Arabic, Greek
  or Thai, whose ratios are closer to CJK's than to those of any other category.
- NUMERIC is digits (arrays, tables, logs) and encoded bytes (base64, hex, lists of uuids).
- MIXED is between the others: prose with many figures or a CJK part, accented European languages (1.5 times
  the tokens of English), minified code, capitals.
- CODE is ASCII with many brackets and operators, including JSON and markup. PROSE is the rest.
"""

from dataclasses import dataclass
from typing import AnyStr

from serve_app.request import TextCategory

_SLICES = 16
_SLICE_BYTES = 512
_SAMPLE_BYTES = _SLICES * _SLICE_BYTES

_ASCII = bytes(range(0x80))
_NOT_TWO_BYTE_LEAD = bytes(byte for byte in range(0x100) if not 0xC2 <= byte < 0xE0)
_LOWER = b"abcdefghijklmnopqrstuvwxyz"
_UPPER = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = b"0123456789"
_BLANKS = b" \n\t\r"
# Brackets, operators and markup, which are rare in prose.
_CODE_SIGNS = b'{}[]()<>;=_"#/\\|*+&$@`~^%'

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


def classify(text: str | bytes) -> TextCategory:
    """Return the category of a text; PROSE if it is empty. Costs at most as much as 8 KiB of UTF-8.

    Args:
        text: UTF-8 bytes, or a string, which is as cheap for ASCII and costs its encoding otherwise.
    """
    if isinstance(text, str):
        if len(text) > _SAMPLE_BYTES and text.isascii():
            text = _evenly_spread(text)
        text = text.encode()
    sample = text if len(text) <= _SAMPLE_BYTES else _evenly_spread(text)
    return _category(sample) if sample else TextCategory.PROSE


def _evenly_spread(text: AnyStr) -> AnyStr:
    """Return slices of a long text, including its start and its end. They may split characters."""
    span = len(text) - _SLICE_BYTES
    starts = [span * index // (_SLICES - 1) for index in range(_SLICES)]
    return text[:0].join([text[start : start + _SLICE_BYTES] for start in starts])


def _category(sample: bytes) -> TextCategory:
    size = len(sample)
    non_ascii, accents = _count_non_ascii(sample)
    if non_ascii >= _CJK_NON_ASCII * size:
        return TextCategory.CJK
    signs = _count_signs(sample)
    blanks = signs.blanks
    dense = signs.digits + signs.capitals
    if signs.digits >= _NUMERIC_DIGITS * size:
        return TextCategory.NUMERIC
    if dense >= _ENCODED_SIGNS * size and blanks <= _ENCODED_BLANKS * size:
        return TextCategory.NUMERIC
    if non_ascii > _MIXED_NON_ASCII * size or accents > _MIXED_ACCENTS * size:
        return TextCategory.MIXED
    if dense > _MIXED_SIGNS * size or blanks < _DENSE_BLANKS * size:
        return TextCategory.MIXED
    return TextCategory.CODE if signs.code >= _CODE_SHARE * size else TextCategory.PROSE


def _count_non_ascii(sample: bytes) -> tuple[int, int]:
    """Count non-ASCII bytes, and two-byte characters (accented Latin, Greek, Cyrillic, Hebrew, Arabic)."""
    if sample.isascii():
        return 0, 0
    return len(sample.translate(None, _ASCII)), len(sample.translate(None, _NOT_TWO_BYTE_LEAD))


@dataclass(frozen=True, slots=True)
class _Signs:
    """Counts of ASCII bytes by kind."""

    blanks: int
    digits: int
    capitals: int
    code: int


def _count_signs(sample: bytes) -> _Signs:
    rest = sample.translate(None, _LOWER)
    counts = []
    for letters in (_BLANKS, _DIGITS, _UPPER, _CODE_SIGNS):
        left = rest.translate(None, letters)
        counts.append(len(rest) - len(left))
        rest = left
    return _Signs(*counts)
