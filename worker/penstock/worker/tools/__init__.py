"""Entry points for `penstock doctor` and `penstock replay`, which run users' loaders outside of a worker. Of the
worker's modules, `penstock.deploy` may import only the two in this package."""
