"""`python -m hotset` is the `hotset` command."""

from hotset.cli import main

# Spawned processes (engine and workers) import this file again, under the name `__mp_main__`.
if __name__ == "__main__":
    main()
