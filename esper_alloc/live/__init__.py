"""A running process as it is seen from outside: figures, and lines of code by way of a socket."""
