"""The only two modules of a worker that `penstock.deploy` may use: they run users' loaders outside of a worker."""
