"""What a user meets when something goes wrong: one line on stderr and an exit status, never a traceback."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn


class UsageError(Exception):
    """Something the user gave cannot be used (exit status 2). The message names it, its value, and what to do."""


class RunError(Exception):
    """The run itself failed, such as by divergence or a full disk (exit status 1)."""


class Interrupted(BaseException):
    """The run was stopped from outside, after it saved. `status` is 130 (Ctrl-C) or 143 (terminated).

    Like KeyboardInterrupt no Exception: a library that catches all of those (tqdm does) must not go on.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Parser(argparse.ArgumentParser):
    """argparse, with its errors raised like all others (one line instead of the whole usage text)."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help shows what can be given)")


def run(main: Callable[[], None], reader_may_leave: bool = False) -> NoReturn:
    """Run a script's `main` and exit: 0 done, 1 the run failed, 2 usage or input, 130 interrupted, 143 terminated.

    reader_may_leave: what reads stdout may stop reading, as in `sample.py | head`, and that is no failure.
    """

    def terminated(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted("terminated", 143)  # an exception, so that what is half-made is removed

    signal.signal(signal.SIGTERM, terminated)
    # Python has None for a closed stream
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # the platform's encoding may lack the letters of the user's own text
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    try:
        main()
        sys.stdout.flush()
        sys.exit(0)
    except UsageError as error:
        status, message = 2, f"error: {error}"
    except Interrupted as error:
        status, message = error.status, str(error)
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it must not be flushed again at exit
        if reader_may_leave:
            sys.exit(0)
        status, message = 1, "error: nobody reads the output any more; send it to a file to go on without"
    except ModuleNotFoundError as error:
        status, message = 2, f"error: the package {error.name} is missing: pip install -r requirements.txt"
    except RunError as error:
        status, message = 1, f"error: {error}"
    except OSError as error:
        status, message = 1, f"error: {error.filename or 'output'}: {error.strerror or error}"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said: a late Ctrl-C shall not add a traceback
    print(" ".join(message.split("\n")), file=sys.stderr)
    sys.exit(status)
