"""Writes the generated pages and the schema of the chart; scripts/docs generate calls it."""

from docs_reference.chart import SCHEMA, values_schema
from docs_reference.pages import write_pages

if __name__ == "__main__":
    SCHEMA.write_text(values_schema(), encoding="utf-8")
    write_pages()
