"""What the documentation shows runs, and where it points there is something.

Python examples run on two simulated cards, whatever the machine has; those of one document continue one another.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
DOCUMENTS = [*READMES, *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")

# `DataParallel` without device_ids takes all GPUs of the machine; Parallel is told by MANYCARD_CARDS.
_TWO_CARDS = """
import manycard.engine.data_parallel as drop_in
choose = drop_in.choose_cards
drop_in.choose_cards = lambda spec="all", **settings: choose("cpu:2" if spec == "all" else spec, **settings)
"""


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _examples(document: Path) -> Iterator[tuple[int, str]]:
    """The Python examples of a document, each with the number of lines before it."""
    text = document.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        if block[1] == "python":
            yield text.count("\n", 0, block.start(2)), block[2]


WITH_EXAMPLES = [document for document in DOCUMENTS if any(_examples(document))]


def test_the_documents_that_show_code_are_found() -> None:
    names = {_name(document) for document in WITH_EXAMPLES}
    assert {"README.md", "README.zh-CN.md", "docs/training.md", "docs/getting-started.md"} <= names


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=_name)
def test_examples_run(document: Path, tmp_path: Path) -> None:
    lines = [_TWO_CARDS, "space = {'__name__': '__main__'}"]
    for before, code in _examples(document):
        # As many empty lines as stand before it: a traceback then names the document's own line.
        padded = "\n" * before + code
        lines.append(f"exec(compile({padded!r}, {_name(document)!r}, 'exec'), space)")
    script = tmp_path / "examples.py"
    script.write_text("\n".join(lines), encoding="utf-8")
    environment = {**os.environ, "MANYCARD_CARDS": "cpu:2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("readme", READMES, ids=_name)
def test_a_readme_opens_with_the_two_commands(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    title, sentence, rest = text.split("\n\n", 2)
    assert title == "# manycard"
    assert len(sentence.splitlines()) == 1
    assert rest.startswith("```bash\nbash scripts/demo\nbash scripts/test\n```\n")
    for command in ("scripts/demo", "scripts/test"):
        assert (ROOT / command).is_file()


def test_the_readmes_show_the_same_examples() -> None:
    """But for comments, which each language has its own."""
    english, chinese = ([_without_comments(code) for _, code in _examples(readme)] for readme in READMES)
    assert english == chinese


def _without_comments(code: str) -> str:
    return re.sub(r"\s+#.*", "", code)


def _links(document: Path) -> Iterator[tuple[str, str]]:
    """Words and target of every link to a file of this repository."""
    prose = _BLOCK.sub("", document.read_text(encoding="utf-8"))
    for link in _LINK.finditer(prose):
        if "://" not in link[2]:
            yield link[1], link[2]


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(document: Path) -> None:
    for words, target in _links(document):
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{_name(document)}: no {target}"
        assert file.is_relative_to(ROOT), f"{_name(document)}: {target} leaves the repository"
        if anchor:
            assert anchor in _anchors(file), f"{_name(document)}: no heading for {target}"
        if test := re.fullmatch(r"`(test_\w+)`", words):
            assert f"def {test[1]}(" in file.read_text(encoding="utf-8"), f"{_name(document)}: no {test[1]} in {target}"


def _anchors(document: Path) -> set[str]:
    """The headings of a document, as links name them."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_document_is_reached_from_the_readmes() -> None:
    for readme in READMES:
        reached = {(readme.parent / target.partition("#")[0]).resolve() for _, target in _links(readme)}
        assert set(DOCUMENTS) - {readme} <= reached


def test_tables_of_figures_are_those_of_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run: python benchmarks/tables.py"
