"""URLs of endpoints."""

import pytest

from serve_app.serving.remote.sources import EndpointUrl


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("http://a:8000", "http://a:8000"),
        ("http://a:8000/v1/", "http://a:8000"),
        ("http://a", "http://a:80"),
        ("https://a/openai/v1", "https://a:443/openai"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_the_parts_of_an_endpoints_url(text: str, read: str) -> None:
    assert str(EndpointUrl.parse(text)) == read


@pytest.mark.parametrize("text", ["", "a:8000", "ftp://a", "http://", "http://a:99999", "http://a/?b=c"])
def test_an_invalid_url_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"http://host:8000, got '"):
        EndpointUrl.parse(text)


def test_credentials_do_not_belong_in_a_url_and_are_not_repeated() -> None:
    with pytest.raises(ValueError, match="api_key") as rejected:
        EndpointUrl.parse("http://user:secret@a:8000")
    assert "secret" not in str(rejected.value)
