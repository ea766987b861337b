"""`python -m phoenix_launch` is `phoenix-run`; a Ctrl-C while it still loads is an end like any other."""

import gc
import signal
import sys


def main() -> int:
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:  # see cli/loading.py, which is not loaded yet
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from phoenix_launch.cli import main as command_line

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = command_line()
    gc.freeze()  # the process ends, and with it all memory: the interpreter need not search that for garbage
    return code


if __name__ == "__main__":
    sys.exit(main())
