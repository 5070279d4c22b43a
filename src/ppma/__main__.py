"""`python -m ppma`, which torchrun needs."""

import sys

from ppma_cli import main

sys.exit(main())
