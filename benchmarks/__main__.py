"""``python -m benchmarks [NAMES...] [--json]``: alias of ``massieu bench``."""

import sys

from massieu.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
