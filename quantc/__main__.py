"""`python -m quantc`: the command line, where the script `quantc` is not on the path."""

from quantc.cli.app import main

if __name__ == "__main__":
    main()
