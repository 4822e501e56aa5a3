"""Writer of the generated pages, the dashboards and the chart's schema; called by scripts/docs generate."""

from docs_reference.chart import SCHEMA, values_schema
from docs_reference.pages import write_pages
from observability.files import write_files

if __name__ == "__main__":
    SCHEMA.write_text(values_schema(), encoding="utf-8")
    write_pages()
    write_files()
