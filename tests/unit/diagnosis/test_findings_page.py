"""The page of findings is up to date, and every test that it names is there."""

from __future__ import annotations

from tests.unit.diagnosis.findings_page import PAGE, ROOT, page, sections


def test_the_page_is_the_one_that_the_tests_make() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.unit.diagnosis.findings_page"


def test_every_finding_has_a_test_that_plants_it_and_one_without_it() -> None:
    rows = [row for _, found in sections().values() for row in found]
    for _, *tests in rows:
        for test in tests:
            path, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), test
    causes = [cause for cause, *_ in rows]
    assert len(set(causes)) == len(causes) >= 40
