"""`python -m ppma`, which torchrun needs."""

import sys

from ppma.cli import main

sys.exit(main())
