"""`python -m zdp_bench` is `zdp-bench`."""

from zdp_bench.cli import main

if __name__ == "__main__":
    main()
