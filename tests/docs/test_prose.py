"""Prose of documents: short sentences, working links, existing names."""

import re
from collections.abc import Iterator
from urllib.parse import unquote

import pytest

from tests.docs import documents, names
from tests.docs.documents import CODE_WORD, ROOT, heading_anchors, passages, passages_in
from tests.docs.marks import BlockError
from tests.docs.sentences import MAX_WORDS, sentences, words

README_LINES = 130
PAGE_LINES = 260
MAX_COLUMNS = 6

DOCUMENTS = documents.documents()
# An entry about an old release may name what no longer exists.
NAMING = [document for document in DOCUMENTS if document != "CHANGELOG.md"]
WRITTEN = [document for document in DOCUMENTS if not documents.is_generated(document)]
# Pages that are read from top to bottom. References and tables of experiments are looked up.
READ = [document for document in WRITTEN if re.fullmatch(r"README\.md|docs/[^/]+\.md", document)]
_TABLE_RULE = re.compile(r"^\|(?: *:?-+:? *\|)+$", re.MULTILINE)


def _report(findings: list[str]) -> None:
    if findings:
        pytest.fail("\n".join(findings), pytrace=False)


@pytest.mark.parametrize("document", WRITTEN)
def test_sentences_are_short(document: str) -> None:
    _report(
        [
            f"{passage.place}: a sentence of {words(sentence)} words (at most {MAX_WORDS}): {sentence}"
            for passage in passages(document)
            if passage.kind == "paragraph"
            for sentence in sentences(passage.text)
            if words(sentence) > MAX_WORDS
        ]
    )


def test_the_readme_is_a_tour() -> None:
    lines = len((ROOT / "README.md").read_text().splitlines())
    assert lines <= README_LINES, f"README.md has {lines} lines (at most {README_LINES})"


@pytest.mark.parametrize("document", READ)
def test_pages_are_short_and_tables_fit(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    lines = len(text.splitlines())
    assert lines <= PAGE_LINES, f"{document} has {lines} lines (at most {PAGE_LINES}): divide it"
    _report(
        [
            f"{document}:{text.count(chr(10), 0, rule.start())}: a table of {columns} columns"
            for rule in _TABLE_RULE.finditer(text)
            if (columns := rule[0].count("|") - 1) > MAX_COLUMNS
        ]
    )


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
    ("text", "count"),
    [
        ("One. Two words! Three of them?", 3),
        ("Grows by 1.5 a year, e.g. slowly, see Eq. 5 there.", 1),
        ("It ends (here). `code` begins.", 2),
        ("It says: so; and goes on.", 1),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text: str, count: int) -> None:
    assert len(list(sentences(text))) == count


def test_a_code_span_is_one_word_and_a_sign_is_none() -> None:
    (passage,) = passages_in("page.md", "Set `a b c` - then *wait* 5 s.")
    assert passage.text == f"Set {CODE_WORD} - then wait 5 s."
    assert words(passage.text) == 6


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
