"""Access without keys, by listening address."""

import pytest

from serve_app.errors import SettingsError
from serve_app.serving.gateway import ApiKey
from serve_app.serving.gateway.settings import GatewayConfig


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_programs_of_this_machine_need_no_keys(host: str) -> None:
    GatewayConfig().check_exposure(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gateway.example"])
def test_others_need_keys_unless_insecure_is_set(host: str) -> None:
    with pytest.raises(SettingsError, match=r"no keys are set.*127\.0\.0\.1.*gateway\.insecure"):
        GatewayConfig().check_exposure(host)
    GatewayConfig(insecure=True).check_exposure(host)
    GatewayConfig(keys=(ApiKey(tenant="a", key="k"),)).check_exposure(host)
