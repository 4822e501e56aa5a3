"""Command `report`: what the traffic of the last minutes experienced, and what scheduling changes.

Read `command` (the requests of the window and their figures, and the same requests in the tuner's digital
twin), then `page` (the document as text and HTML).
"""
