"""Requests of a known shape and texts of a known category, for routing tests."""

from typing import Any

from serve_app.request import PromptShape, Request
from tests import builders

PROSE = (
    b"It was a bright cold day in the town, and the people who lived there went about their work as they "
    b"always had. Nobody could say when the river had first been crossed, nor who had built the bridge.\n"
)
CODE = (
    b"def total(items: list[int], *, start: int = 0) -> int:\n    for item in items:\n"
    b"        start += item[0] * 2\n"
    b"    return {'sum': start, \"all\": items[:]}\n\n"
)
CHINESE = "本文用于测试用于翻译文档的模型是否理解提示。语言特定提示会追加到通用提示之后。\n".encode()
KOREAN = "이 문서는 번역 모델이 프롬프트를 이해하는지 확인하기 위한 것입니다. 끝에 추가됩니다.\n".encode()
RUSSIAN = "Этот документ проверяет, понимает ли модель подсказку на своём языке.\n".encode()
GERMAN = (
    "Über die Brücke führt ein schöner Weg, der für Fußgänger später als üblich geöffnet wird.\n".encode()
)


def request(
    *, max_output_tokens: int | None = 100, tenant: str = "t1", choices: int = 1, **shape: Any
) -> Request:
    """Build a request with this prompt shape; the default is 400 bytes of prose."""
    return builders.request(
        shape=PromptShape(**{"text_bytes": 400, **shape}),
        tenant=tenant,
        max_output_tokens=max_output_tokens,
        choices=choices,
    )
