"""The command line ``python -m esper_alloc``: a module a command."""
