"""Writes the generated pages of docs/reference; scripts/docs generate calls it."""

from docs_reference.pages import write_pages

if __name__ == "__main__":
    write_pages()
