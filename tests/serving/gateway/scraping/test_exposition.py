"""Several metrics pages merged into one."""

from prometheus_client.parser import text_string_to_metric_families

from serve_app.serving.gateway.metrics_page import merge

FIRST = """# HELP waiting Requests that wait.
# TYPE waiting gauge
waiting{model="a"} 1.0
# HELP wait_s Time.
# TYPE wait_s histogram
wait_s_bucket{model="a",le="1.0"} 2
wait_s_bucket{model="a",le="+Inf"} 3
wait_s_sum{model="a"} 1.5
wait_s_count{model="a"} 3
"""
SECOND = FIRST.replace('"a"', '"b c"').replace("1.0\n#", "7.0\n#")


def test_every_metric_is_described_once_and_its_samples_lie_together() -> None:
    page = merge([FIRST, SECOND])
    assert page.count("# TYPE waiting gauge") == 1
    assert page.splitlines()[:4] == [
        "# HELP waiting Requests that wait.",
        "# TYPE waiting gauge",
        'waiting{model="a"} 1.0',
        'waiting{model="b c"} 7.0',
    ]
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert len(families["wait_s"].samples) == 8


def test_the_same_page_twice_counts_once() -> None:
    assert merge([FIRST, FIRST]) == FIRST


def test_empty_pages_and_undescribed_samples_stay_in_order() -> None:
    assert merge(["", "up 1\n", "# a comment\nup_2 3\n"]) == "up 1\nup_2 3\n"
