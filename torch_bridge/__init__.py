"""Triton kernels for GRU and LSTM time loops with episode resets, and what launches them. Never imports jax."""
