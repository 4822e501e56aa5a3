"""Command `report`: what the traffic of the last minutes experienced, and what scheduling changes.

Read `command`, then `recording` (the requests of the window and their figures), `forecast` (the same requests
in the tuner's digital twin), and `page` (the document as text and HTML).
"""
