"""`zdp-bench`, and `python -m zdp_bench`: run the command line.

Ctrl-C ends it with one line also while its modules are imported, which takes a moment.
"""

import signal


def main() -> None:
    """Run the command line of this process, and exit."""
    try:
        from zdp_bench.cli import main as run_command

        run_command()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process only has to end
        from zdp_bench.errors import print_message

        print_message("interrupted.")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
