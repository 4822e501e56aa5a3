"""Tables of this experiment."""

from experiments.common.tables import Column, Computed, Table, line_per_row

_COLUMNS = (
    Column("error, log sigma", "log_sigma"),
    Column("rank correlation", "rank"),
    Column("within the upper prediction, %", "covered", 0, 100),
    Computed("µs", lambda row: f"{row.figures['cpu_us']:,.0f}"),
)

TABLES = {
    "accuracy": Table(
        text=line_per_row({"tenants": "{tenants}", "method": "{method}"}, _COLUMNS),
        note="Means over consecutive parts of the traffic with their 95 % intervals; the upper prediction "
        "should cover 87.5 %",
    )
}
