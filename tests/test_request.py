"""Requests on the scheduler's clock."""

import pickle
from dataclasses import replace

import msgspec

from serve_app.request import PriorityClass, Request
from tests.builders import request


def test_every_copy_of_a_request_has_the_shortcuts_to_its_submission() -> None:
    asked = request("r1", tenant="acme", priority=PriorityClass.BATCH)
    document = msgspec.to_builtins(asked)
    assert not {"request_id", "tenant", "priority", "spec", "shape"} & document.keys()
    for copy in (replace(asked), pickle.loads(pickle.dumps(asked)), msgspec.convert(document, Request)):
        assert copy == asked
        assert (copy.request_id, copy.tenant, copy.priority) == ("r1", "acme", PriorityClass.BATCH)
        assert (copy.spec, copy.shape) == (asked.submission.spec, asked.submission.spec.shape)
    renamed = replace(asked, submission=msgspec.structs.replace(asked.submission, request_id="r2"))
    assert renamed.request_id == "r2"
