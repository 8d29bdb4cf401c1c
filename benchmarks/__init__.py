"""The benchmarks, which compare this project with other implementations; see `python -m benchmarks --help`."""
