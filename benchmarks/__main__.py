"""``python -m benchmarks [NAMES...] [--json]``: the same as ``massieu bench``."""

import sys

from massieu.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
