"""`python -m quantc.cli`."""

from quantc.cli.app import main

if __name__ == "__main__":
    main()
