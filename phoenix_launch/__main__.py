"""`python -m phoenix_launch` is `phoenix-run`."""

import sys

from phoenix_launch.cli import main

sys.exit(main())
