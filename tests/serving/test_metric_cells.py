import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.serving.metric_cells import counters, histograms
from serve_app.serving.process import ProcessMetrics

BOUNDS = (0.1, 0.5, 2)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return the samples of a page by name and bucket bound, without those that prometheus_client adds."""
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_histograms_are_those_of_prometheus_client() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    cell = histograms(ours, "x_seconds", "Text.", ("a",), BOUNDS)[("b",)]
    reference = Histogram("x_seconds", "Text.", ("a",), buckets=BOUNDS, registry=theirs).labels("b")
    # On each bound, between bounds, and beyond.
    for value in (0.0, 0.1, 0.10001, 0.5, 1.0, 2.0, 3.0, 3.0):
        cell.observe(value)
        reference.observe(value)
    assert samples(ours) == samples(theirs)


def test_counts_have_their_labels_and_a_total() -> None:
    registry = CollectorRegistry()
    family = counters(registry, "x", "Text.", ("a", "b"))
    family["1", "2"].inc()
    family["1", "2"].inc(2.5)
    assert 'x_total{a="1",b="2"} 3.5' in generate_latest(registry).decode()
    with pytest.raises(ValueError, match="x has the labels a, b"):
        family["1",]


def test_a_process_reports_its_role_and_its_resources() -> None:
    registry = CollectorRegistry()
    registry.register(ProcessMetrics({"process": "gateway", "gateway": "g1"}))
    page = generate_latest(registry).decode()
    found = {
        sample.name: sample for family in text_string_to_metric_families(page) for sample in family.samples
    }
    assert found["ewsjf_process_cpu_seconds_total"].value > 0
    assert found["ewsjf_process_resident_memory_bytes"].value > 10_000_000
    assert found["ewsjf_process_start_time_seconds"].value > 1.7e9
    labels = found["ewsjf_build_info"].labels
    assert labels["version"]
    assert labels["ray"]
    assert (labels["process"], labels["gateway"]) == ("gateway", "g1")
