"""What is learned and tried."""

from observability.panels import Dashboard, line
from observability.queries import attainment, gauge, rate

TUNER = Dashboard(
    name="tuner",
    title="tuner",
    text="What is learned, what is tried, and whether the twin can be trusted.",
    sections=(
        (
            "What is in force",
            (
                line(
                    "Tuned values",
                    "Settings as they are in force, those on trial among them.",
                    "short",
                    (gauge("ewsjf_tuned_value", "model, setting"), "{{model}} {{setting}}"),
                ),
                line(
                    "Within targets",
                    "Share of requests that kept the latency targets of their class.",
                    "percentunit",
                    (attainment("class"), "{{class}}"),
                    at_most=1,
                ),
                line(
                    "Age of length queues",
                    "Time since the length queues in force were learned.",
                    "s",
                    (gauge("ewsjf_partition_age_seconds", "model"), "{{model}}"),
                ),
                line(
                    "Length queues learned",
                    "Times that new ones were put in force, by reason.",
                    "ops",
                    (rate("ewsjf_partition_changes_total", "model, reason"), "{{model}} {{reason}}"),
                ),
            ),
        ),
        (
            "What is tried",
            (
                line(
                    "Decisions",
                    "About values that were tried in production.",
                    "ops",
                    (rate("ewsjf_tuner_decisions_total", "model, decision"), "{{model}} {{decision}}"),
                ),
                line(
                    "Searches and candidates",
                    "In the twin.",
                    "ops",
                    (rate("ewsjf_tuner_searches_total", "model"), "{{model}} searches"),
                    (rate("ewsjf_tuner_trials_total", "model"), "{{model}} candidates"),
                ),
                line(
                    "Values put in force",
                    "Trials and ends of trials among them.",
                    "ops",
                    (rate("ewsjf_retunings_total", "model"), "{{model}}"),
                ),
                line(
                    "Frozen",
                    "1 while nothing may be tried.",
                    "short",
                    (gauge("ewsjf_tuner_frozen", "model"), "{{model}}"),
                    at_most=1,
                ),
                line(
                    "Error of the twin",
                    "Latency in the twin over that of the engines, less 1; beyond a half, do not trust it.",
                    "percentunit",
                    (gauge("ewsjf_twin_error_ratio", "model, latency"), "{{model}} {{latency}}"),
                ),
            ),
        ),
    ),
)
