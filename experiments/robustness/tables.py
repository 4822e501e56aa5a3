"""Tables of this experiment."""

from experiments.common.tables import Table
from experiments.policies.tables import NOTE, grid_table

TABLES = {"cases": Table(text=grid_table("case", "load"), note=NOTE)}
