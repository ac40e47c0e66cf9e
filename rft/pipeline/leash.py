"""Become a command that dies with its parent: `python -m rft.pipeline.leash <parent pid> COMMAND ...`.

The kernel's promise survives exec, so it holds for programs that know nothing of it.
"""

import os
import sys

from rft.monitor.logs import die_with_parent


def main() -> None:
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):  # it died before the line above
        return
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
