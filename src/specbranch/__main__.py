"""`python -m specbranch`: the command line."""

from specbranch.cli.main import main

if __name__ == "__main__":
    main()
