"""Table of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus


def _text(rows: Sequence[Row]) -> str:
    head = ["batch", "TTFT P99, s", "TPOT P99, ms", "batch tokens/s", "of batch only", "computed again"]
    only = next((row for row in rows if row.key["case"] == "batch only"), None)
    lines = []
    for row in rows:
        case, found = str(row.key["case"]), row.figures
        tokens = found["batch_tokens_per_s"]
        shares = (
            [mine / most for mine, most in zip(tokens, only.figures["batch_tokens_per_s"], strict=True)]
            if only
            else []
        )
        is_alone, has_batch = case == "batch only", case != "no batch"
        lines.append(
            [
                case,
                "-" if is_alone else plus_minus(found["ttft_p99_s"]),
                "-" if is_alone else plus_minus(found["tpot_p99_s"], 1, scale=1_000),
                plus_minus(tokens, 0) if has_batch else "-",
                plus_minus(shares, 0, scale=100) + " %" if has_batch and not is_alone else "-",
                plus_minus(found["recomputed"], 1, scale=100) + " %" if any(found["revoked"]) else "-",
            ]
        )
    return markdown(head, lines)


_ENGINES = {"8B": "Llama-3.1-8B on one H100", "70B": "Llama-2-70B on four H100"}

TABLES = {
    name: Table(
        text=_text,
        where={"scene": scene},
        note=f"Simulated, {_ENGINES[scene.split(',')[0]]}, one replica; means over seeds with their 95 % "
        "intervals",
    )
    for name, scene in {
        "long": "8B, long answers",
        "load": "8B, load 0.5",
        "short": "8B, short answers",
        "bursts": "8B, bursts",
        "large-long": "70B, long answers",
        "large-short": "70B, short answers",
    }.items()
}
