import pytest

from serve_app.lab.bench.endpoint import BenchError, base_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://gateway/", "http://gateway"),
        ("https://llm.example/team/v1/", "https://llm.example/team"),
        ("http://[::1]:9/v1", "http://[::1]:9"),
    ],
)
def test_urls_are_read_with_and_without_the_api_path(url: str, expected: str) -> None:
    assert base_url(url) == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://[::1"])
def test_an_invalid_url_is_rejected_with_the_value(url: str) -> None:
    with pytest.raises(BenchError, match="URL"):
        base_url(url)
