"""Starting ranks, collecting the first error, stopping cleanly; and running a script in place."""

from manycard.launch.ending import end_family
from manycard.launch.ranks import cards_setting, launch_script
from manycard.launch.script import Script, exit_status, own_traceback

__all__ = ["Script", "cards_setting", "end_family", "exit_status", "launch_script", "own_traceback"]
