"""One result as one HTML file, which opens anywhere and needs no network.

Commands describe what they found (`document`), and `page` writes it. `differences` compares with a baseline
and puts it into words; `curves` turns request records into the lines of plots. Nothing here knows a command.
"""
