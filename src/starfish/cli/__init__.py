"""The command line: every command parses, calls and prints. Torch is imported inside commands only."""

from __future__ import annotations

import os
import sys

import typer

from starfish.cli import comparing, demo, healing, listing, looking, pruning, shipping
from starfish.console import Interrupted, say
from starfish.errors import UserError

app = typer.Typer(
    name="starfish",
    help="Heal pruned neural networks: lost accuracy comes back in minutes, without labels or the training set.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

COMMANDS = (  # in the order of `starfish --help`
    pruning.prune,
    healing.heal,
    comparing.compare,
    looking.evaluate,
    looking.inspect,
    shipping.slim,
    shipping.export,
    listing.methods,
    listing.pruners,
    listing.models,
    listing.doctor,
    demo.demo,
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """The one place where exceptions become output and exit codes."""
    if "OMP_WAIT_POLICY" not in os.environ:  # waiting threads that spin for long make a shared machine crawl,
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # those that sleep at once make small layers take twice the time
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        app(standalone_mode=False)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except UserError as error:
        say(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        say("interrupted; a heal or a comparison goes on where it stopped when you add --resume")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "show"):  # click's own usage errors
            error.show()
            sys.exit(error.exit_code)
        if "torchvision::nms" in str(error):
            say("error: torchvision does not fit this torch\nhint: `starfish doctor` says what to install")
            sys.exit(2)
        raise
