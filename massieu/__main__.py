"""The command ``massieu`` as ``python -m massieu``."""

import sys

from massieu.cli import main

sys.exit(main())
