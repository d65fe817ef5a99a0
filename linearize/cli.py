"""The command line: runs a command and says what went wrong.

With `--json`, stdout is one JSON document (also for an error) and everything else goes to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import click

from linearize.commands import cli
from linearize.console import printable
from linearize.errors import LinearizeError, ResourceError, out_of_memory

ISSUES = "the project's issue tracker"
INTERRUPTED = 130
RESUMABLE = (["eval"], ["train"], ["run"])
BROKEN_PIPE = 128 + 13  # as the shell reports a program that SIGPIPE ended


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or one of those in docs/errors.md."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with _terminate_as_interrupt():
        return _leave(_run(arguments))


def _run(arguments: list[str]) -> int:
    try:
        with cli.make_context("linearize", list(arguments)) as context:
            cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        return _usage(error, arguments)
    except LinearizeError as error:
        if hasattr(error, "elsewhere"):  # the process that failed says it, before a launcher ends all
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1)
            return error.exit_code
        return _fail(error, arguments)
    except (KeyboardInterrupt, click.Abort):
        goes_on = ["--resume"] if arguments[:1] in RESUMABLE and "--resume" not in arguments else []
        again = f"to run it again: {shlex.join(['linearize', *arguments, *goes_on])}"
        return _say(arguments, "interrupted", again, INTERRUPTED, text=f"interrupted; {again}")
    except BrokenPipeError:
        # Python flushes stdout once more at exit, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOMEM):
            return _fail(ResourceError(f"{error.filename or 'a file'}: {error.strerror}"), arguments, error)
        return _bug(error, arguments)
    except Exception as error:
        if out_of_memory(error):
            return _fail(ResourceError("out of memory", "Use a machine with more"), arguments, error)
        return _bug(error, arguments)
    return 0


def _leave(code: int) -> int:
    """Return `code`; where it is one of several processes that failed, end it with that code at once.

    What connects processes can abort one whose interpreter is taken down, and the code would be another.
    """
    if code and "LOCAL_RANK" in os.environ and "torch" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a command the way Ctrl-C does: what was staged is cleaned up, the exit code is 130."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, where signals can't be handled
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _fail(error: LinearizeError, arguments: list[str], cause: BaseException | None = None) -> int:
    text = f"error: {error}"
    return _say(arguments, error.what, error.fix, error.exit_code, text=text, error=cause or error)


def _usage(error: click.ClickException, arguments: list[str]) -> int:
    context = getattr(error, "ctx", None)
    if not arguments:  # click's way to print the help when a command is missing
        error.show()
        return 2
    mend = f"see: {context.command_path} --help" if context else ""
    return _say(arguments, error.format_message(), mend, 2)


def _bug(error: Exception, arguments: list[str]) -> int:
    what = f"{type(error).__name__}: {error}"
    again = f"run it again with --debug and report the traceback in {ISSUES}"
    return _say(arguments, f"this is a bug of linearize ({what})", again, 1, error=error)


def _say(
    arguments: list[str],
    what: str,
    mend: str,
    code: int,
    *,
    text: str = "",
    error: BaseException | None = None,
) -> int:
    """Report what went wrong, on stderr and with `--json` also on stdout; returns `code`."""
    if error is not None and ("--debug" in arguments or os.environ.get("LINEARIZE_DEBUG", "0") not in ("", "0")):
        click.echo(printable("".join(traceback.format_exception(error)), keep="\n\t"), err=True)
    text = text or f"error: {what}" + (f"\n{mend}" if mend else "")
    click.echo(printable(text, keep="\n"), err=True)  # some messages list several problems, one a line
    if "--json" in arguments:
        click.echo(json.dumps({"error": {"what": what, "mend": mend, "exit_code": code}}, indent=2))
    return code


if __name__ == "__main__":
    sys.exit(main())
