"""``python -m kvlink`` is the ``kvlink`` command."""

import sys

from kvlink.cli import main

sys.exit(main())
