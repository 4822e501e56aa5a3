"""`python -m serve_app simulate`: arguments, tables, JSON and plots."""
