"""Modules with which `penstock doctor` and `penstock replay` run users' loaders outside of a worker. Besides them,
`penstock.deploy` imports of the worker only what starts a daemon.
"""
