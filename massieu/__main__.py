"""``python -m massieu`` is the command ``massieu``."""

import sys

from massieu.cli import main

sys.exit(main())
