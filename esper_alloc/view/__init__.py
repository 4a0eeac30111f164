"""One HTML file that shows a recording of the black box. Needs numpy."""
