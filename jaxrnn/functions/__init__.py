"""The public functions, a file for each cell."""
