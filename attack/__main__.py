"""``python -m attack [NAME ...] [--seed N] [--share S]``: attack the library and its commands."""

import argparse
import sys

from attack import NAMES, main

parser = argparse.ArgumentParser(prog="attack", description="attack the library and its commands")
parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)}")
parser.add_argument("--seed", type=int, default=0, help="seed of the cases")
parser.add_argument("--share", type=float, default=1.0, help="share of the cases to run")
options = parser.parse_args()
if unknown := set(options.names) - set(NAMES):
    parser.error(f"expected names among {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
sys.exit(main(options.names, seed=options.seed, share=options.share))
