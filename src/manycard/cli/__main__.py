"""``python -m manycard.cli``, the same as ``manycard``."""

import sys

from manycard.cli import main

sys.exit(main())
