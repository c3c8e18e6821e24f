"""The parts of a worker that `penstock.deploy` may use, to run users' loaders outside of one: these two modules and no
other."""
