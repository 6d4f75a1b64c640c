"""`python -m hotset` is the `hotset` command."""

from hotset.cli import main

# The engine's process is spawned and imports this file again, under another name.
if __name__ == "__main__":
    main()
