import pytest

from serve_app.lab.bench.connection import BenchError, Target


@pytest.mark.parametrize(
    ("url", "expected", "authority"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000, False, ""), "127.0.0.1:8000"),
        ("http://gateway/", Target("gateway", 80, False, ""), "gateway"),
        ("https://llm.example/team/v1/", Target("llm.example", 443, True, "/team"), "llm.example"),
        ("http://[::1]:9", Target("::1", 9, False, ""), "[::1]:9"),
    ],
)
def test_urls_are_read_with_and_without_the_api_path(url: str, expected: Target, authority: str) -> None:
    assert Target.parse(url) == expected
    assert expected.authority == authority
    assert Target.parse(expected.base_url) == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://[::1"])
def test_an_invalid_url_is_rejected_with_the_value(url: str) -> None:
    with pytest.raises(BenchError, match="URL"):
        Target.parse(url)
