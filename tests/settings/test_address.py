import pytest

from serve_app.settings.application import http_address, with_port


@pytest.mark.parametrize(
    ("options", "host"),
    [({"host": "::1", "port": 1}, "::1"), ({}, "0.0.0.0"), (None, "0.0.0.0"), ("wrong", "0.0.0.0")],
)
def test_another_port_replaces_that_of_the_file(options: object, host: str) -> None:
    content = {"applications": [], "http_options": options}
    changed = with_port(content, 8123)
    assert http_address(changed) == (host, 8123)
    assert changed["applications"] == []
    assert content["http_options"] == options
    assert with_port(content, None) is content
