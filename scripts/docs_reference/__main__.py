"""Writes the generated pages, dashboards and the schema of the chart; scripts/docs generate calls it."""

from docs_reference.chart import SCHEMA, values_schema
from docs_reference.pages import write_pages
from observability.files import write_files

if __name__ == "__main__":
    SCHEMA.write_text(values_schema(), encoding="utf-8")
    write_pages()
    write_files()
