"""A journal of one subscriber, whose errors fail the test."""

import pytest

from serve_app.serving.scheduler.journal import Entry, Journal, Subscriber


def pass_to(subscriber: Subscriber, entry: Entry) -> None:
    journal = Journal(pytest.fail)
    journal.subscribe(subscriber)
    journal.append(entry)
