"""What the project measures, beside everyone it is measured against: `python -m benchmarks --help`."""
