"""One result as one HTML file, which opens anywhere and needs no network.

Commands describe what they found (`document`, which also compares with a baseline and puts it into words),
and `page` writes it; `plots` turns request records into plots. Nothing here knows a command.
"""
