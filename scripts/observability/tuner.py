"""Dashboard of the tuner: values, trials and the twin."""

from observability.panels import Dashboard, line
from observability.queries import attainment, gauge, rate

TUNER = Dashboard(
    name="tuner",
    title="tuner",
    text="Tuned values, trials, and the accuracy of the twin.",
    sections=(
        (
            "Current values",
            (
                line(
                    "Tuned values",
                    "Current values of the tuned settings, including trials.",
                    "short",
                    (gauge("ewsjf_tuned_value", "model, setting"), "{{model}} {{setting}}"),
                ),
                line(
                    "SLO attainment",
                    "Share of requests that met the latency targets of their class.",
                    "percentunit",
                    (attainment("class"), "{{class}}"),
                    at_most=1,
                ),
                line(
                    "Age of length queues",
                    "Time since the current length queues were learned.",
                    "s",
                    (gauge("ewsjf_partition_age_seconds", "model"), "{{model}}"),
                ),
                line(
                    "Partition changes",
                    "Changes of the learned length queues, by reason.",
                    "ops",
                    (rate("ewsjf_partition_changes_total", "model, reason"), "{{model}} {{reason}}"),
                ),
            ),
        ),
        (
            "Trials",
            (
                line(
                    "Decisions",
                    "Decisions about candidates on trial in production.",
                    "ops",
                    (rate("ewsjf_tuner_decisions_total", "model, decision"), "{{model}} {{decision}}"),
                ),
                line(
                    "Searches and candidates",
                    "Finished searches, and candidates evaluated in the twin.",
                    "ops",
                    (rate("ewsjf_tuner_searches_total", "model"), "{{model}} searches"),
                    (rate("ewsjf_tuner_candidates_total", "model"), "{{model}} candidates"),
                ),
                line(
                    "Changes of values",
                    "Including the start and the end of trials.",
                    "ops",
                    (rate("ewsjf_retunings_total", "model"), "{{model}}"),
                ),
                line(
                    "Frozen",
                    "1 while the tuner is frozen: no trials.",
                    "short",
                    (gauge("ewsjf_tuner_frozen", "model"), "{{model}}"),
                    at_most=1,
                ),
                line(
                    "Error of the twin",
                    "Latency in the twin over that of the engines, minus 1. Beyond ±0.5, do not trust it.",
                    "percentunit",
                    (gauge("ewsjf_twin_error_ratio", "model, latency"), "{{model}} {{latency}}"),
                ),
            ),
        ),
    ),
)
