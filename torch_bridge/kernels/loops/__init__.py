"""The time loops, a file for each family: forward and backward kernels that run any cell that the family supports."""
