"""`python -m linearize`, which launchers of several processes need: `accelerate launch -m linearize train ...`."""

import sys

from linearize.cli import main

if __name__ == "__main__":
    sys.exit(main())
