from __future__ import annotations

import json
from pathlib import Path

import pytest

from manycard.errors import SettingError
from manycard.launch.script import Script, exit_status, own_traceback
from tests.unit.launch.processes import Playground

RUN = "import sys; from manycard.launch.script import Script; Script.parse(sys.argv[1:]).run()"

PROBE = """
    import json, multiprocessing, os, pickle, sys
    from concurrent.futures import ProcessPoolExecutor

    class Thing:
        def __init__(self, value): self.value = value

    def double(thing): return Thing(thing.value * 2)

    if __name__ == "__main__":
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            doubled = pool.submit(double, Thing(21)).result().value
        print(json.dumps({
            "argv": sys.argv, "path": sys.path[0], "file": __file__, "package": __package__, "cached": __cached__,
            "spec": __spec__ and __spec__.name, "doc": __doc__, "folder": os.getcwd(), "doubled": doubled,
            "pickled": pickle.loads(pickle.dumps(Thing(1))).value, "future": "annotations" in globals(),
        }))
"""


def _both(place: Playground, *words: str) -> tuple[dict[str, object], dict[str, object]]:
    outputs = []
    for command in (words, ("-c", RUN, *words)):
        done = place.run(*command)
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
    return outputs[0], outputs[1]


def test_a_script_sees_what_it_sees_under_python(place: Playground) -> None:
    place.write("sub/probe.py", PROBE)
    python, ours = _both(place, "sub/probe.py", "--x", "$$")
    assert ours == python
    assert ours["doubled"] == 42


def test_a_module_sees_what_it_sees_under_python(place: Playground) -> None:
    place.write("project/__init__.py", "")
    place.write("project/part.py", "VALUE = 7\n")
    place.write("project/train.py", "from .part import VALUE\n" + PROBE.replace("\n    ", "\n"))
    python, ours = _both(place, "-m", "project.train", "a")
    assert ours == python
    assert ours["package"] == "project"


def test_what_cannot_run_is_refused(place: Playground) -> None:
    place.write("notes.txt", "these are not statements\n")
    place.write("blob", "x = 1\n\0")
    place.write("broken.py", "def (:\n")
    place.write("without_suffix", "print(1)\n")
    for name, problem in {
        "missing.py": "no such file",
        ".": "folder",
        "notes.txt": "not Python",
        "blob": "not Python",
    }.items():
        with pytest.raises(SettingError, match=problem):
            Script(name).check()
    Script("broken.py").check()  # Python's own message says where
    Script("without_suffix").check()


def test_a_module_is_looked_for_without_importing_anything(place: Playground) -> None:
    place.write("loud/__init__.py", "raise RuntimeError('imported')\n")
    place.write("loud/train.py", "")
    Script("loud.train", is_module=True).check()
    for name in ("loud.missing", "absent", "absent.part", "loud.train.deeper"):
        with pytest.raises(SettingError, match="no such module"):
            Script(name, is_module=True).check()


def test_words_that_name_nothing_are_refused() -> None:
    for words in ([], ["-m"]):
        with pytest.raises(SettingError, match="names nothing"):
            Script.parse(words)


def test_the_traceback_begins_in_the_script(place: Playground) -> None:
    place.write("raises.py", "def f():\n    raise ValueError('boom')\nf()\n")
    place.write("broken.py", "def (:\n")
    show = (
        "import sys, traceback\nfrom manycard.launch.script import Script, own_traceback\n"
        "try: Script.parse(sys.argv[1:]).run()\n"
        "except BaseException as e: traceback.print_exception(e.with_traceback(own_traceback(e)))"
    )
    for words in (("raises.py",), ("broken.py",)):
        python, ours = place.run(*words), place.run("-c", show, *words)
        assert ours.stderr == python.stderr
    module = place.run("-c", show, "-m", "raises")
    assert module.stderr.splitlines()[1].endswith('raises.py", line 3, in <module>')


def test_a_traceback_from_elsewhere_is_left_whole() -> None:
    with pytest.raises(ValueError) as caught:
        raise ValueError
    assert own_traceback(caught.value) is caught.value.__traceback__


def test_exit_status_is_pythons() -> None:
    assert exit_status(SystemExit()) == (0, "")
    assert exit_status(SystemExit(3)) == (3, "")
    assert exit_status(SystemExit(-1)) == (255, "")
    assert exit_status(SystemExit("no data")) == (1, "no data\n")


def test_a_link_to_a_script_imports_from_beside_the_script(place: Playground) -> None:
    place.write("real/helper.py", "VALUE = 5\n")
    place.write("real/main.py", "import helper\nprint(helper.VALUE)\n")
    Path("link.py").symlink_to(Path("real/main.py"))
    assert place.run("-c", RUN, "link.py").stdout == "5\n"
