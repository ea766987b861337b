"""`python -m phoenix_launch` is `phoenix-run`; a Ctrl-C while it still loads is an end like any other."""

import sys


def main() -> int:
    try:
        from phoenix_launch.cli import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
