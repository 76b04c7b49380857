"""Importing without the collector leaves it as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest

from manycard.importing import without_collector


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_rests_and_is_as_it_was_afterwards(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with without_collector():
            assert not gc.isenabled()
        assert gc.isenabled() is collects
        with pytest.raises(ImportError), without_collector():
            raise ImportError("no such module")
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_nothing_is_collected_while_manycard_is_imported() -> None:
    program = """
        import gc
        begun = []
        gc.callbacks.append(lambda phase, info: begun.append(phase))
        import manycard
        assert gc.isenabled()
        print(len(begun))
    """
    words = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) < 50, "a few before and after, where there were hundreds"
