"""Reports: one result as one HTML file, which needs no network.

Commands describe their results (`document`, which also compares with a baseline and words the verdict), and
`page` renders them. `plots` turns request records into plots, and `tables` formats tables for the terminal.
This package does not depend on any command.
"""
