"""The twin of a report, for servers of different speed."""

import pytest

from serve_app.cli.report.command import MAX_ERROR_RATIO, Forecast, recording_of

from .application import LONG_TOKENS, REPLICAS, SETTINGS, served


# With one model for both servers, the error of the twin is 72 % and 81 %.
@pytest.mark.parametrize(("count", "rate_per_s"), [(450, 4.0), (900, 5.0)])
def test_each_server_is_simulated_at_its_own_speed(
    count: int, rate_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "_changes", lambda *_: {})
    lines = served(count, rate_per_s, (1.0, 3.0))
    forecast = Forecast(recording_of(lines, 10, 0.0), REPLICAS, SETTINGS, LONG_TOKENS - 1)
    found = forecast.document(lambda: None)
    assert found["reason"] == ""
    for of in found["error"].values():
        assert abs(of["ttft_mean_s"]["error_ratio"]) < MAX_ERROR_RATIO
        assert abs(of["tpot_mean_s"]["error_ratio"]) < MAX_ERROR_RATIO
