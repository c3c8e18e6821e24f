"""`python -m simulated`: see command.py, which the processes that it starts can import."""

import sys

from simulated.command import main

if __name__ == "__main__":
    sys.exit(main())
