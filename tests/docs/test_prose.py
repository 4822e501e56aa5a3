"""Links and names in documents: all lead to something that exists."""

import re
from collections.abc import Iterator
from urllib.parse import unquote

import pytest

from tests.docs import documents, names
from tests.docs.documents import ROOT, heading_anchors, passages
from tests.docs.marks import BlockError

DOCUMENTS = documents.documents()
# An entry about an old release may name what no longer exists.
NAMING = [document for document in DOCUMENTS if document != "CHANGELOG.md"]


def _report(findings: list[str]) -> None:
    if findings:
        pytest.fail("\n".join(findings), pytrace=False)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    _report(
        [
            f"{passage.place}: {problem}"
            for passage in passages(document)
            for link in passage.links
            if (problem := _broken(document, link))
        ]
    )


def _broken(document: str, link: str) -> str | None:
    """Return what is wrong with a link inside the repository; other links are not followed."""
    if re.match(r"[a-z]+:", link):
        return None
    name, _, fragment = unquote(link).partition("#")
    target = (ROOT / document).parent / name if name else ROOT / document
    if not target.exists():
        return f"{link} leads nowhere"
    path = str(target.resolve().relative_to(ROOT.resolve()))
    if fragment and target.suffix == ".md" and fragment not in heading_anchors(path):
        return f"{link}: {path} has no such heading"
    return None


@pytest.mark.parametrize("document", NAMING)
def test_names_in_code_spans_exist(document: str) -> None:
    _report(
        [
            f"{passage.place}: {problem}"
            for passage in passages(document)
            for span in passage.code
            for problem in _wrong_names(span)
        ]
    )


def _wrong_names(span: str) -> Iterator[str]:
    for check in (names.check_metrics, names.check_setting, names.check_file, names.check_module):
        try:
            check(span)
        except BlockError as exc:
            yield str(exc)


def test_every_page_can_be_reached_from_the_front_page() -> None:
    reached, ahead = set(), ["docs/index.md"]
    while ahead:
        document = ahead.pop()
        if document in reached or document not in DOCUMENTS:
            continue
        reached.add(document)
        for passage in passages(document):
            for link in passage.links:
                if not re.match(r"[a-z]+:", link) and (name := link.partition("#")[0]):
                    target = ((ROOT / document).parent / name).resolve()
                    ahead.append(str(target.relative_to(ROOT.resolve())))
    pages = {document for document in DOCUMENTS if document.startswith("docs/")}
    assert pages <= reached, f"no links lead to {', '.join(sorted(pages - reached))}"


@pytest.mark.parametrize(
    ("span", "is_wrong"),
    [
        ("ewsjf_dispatches_total", False),
        ("ewsjf_queue_wait_seconds_bucket", False),
        ("ewsjf_nothing_total", True),
        ("models[].scheduler.max_waiting", False),
        ("models[0].scheduler.max_waiting", False),
        ("scheduler.max_waiting", False),
        ("scheduler.max_waitings", True),
        ("Scheduler.handle", False),
        ("scripts/check", False),
        ("scripts/nothing", True),
        ("experiments/<name>/README.md", False),
        ("out/report.json", False),
        ("text/plain", False),
        ("serve_app.errors", False),
        ("serve_app.errors:Outcome", False),
        ("serve_app.errors.Nothing", True),
    ],
)
def test_only_names_that_do_not_exist_are_found(span: str, is_wrong: bool) -> None:
    assert bool(list(_wrong_names(span))) == is_wrong
