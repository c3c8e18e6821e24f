"""python -m penstock.deploy: the command `penstock`, for programs that start daemons with an interpreter at hand."""

from penstock.deploy.cli import main

if __name__ == "__main__":
    main()
