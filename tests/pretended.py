"""Pretends that this process has other GPUs, for the choice of an implementation and for tracing."""

import importlib.util
import types

import jax


def pretend_gpus(monkeypatch, *devices):
    """Makes this process see `devices` as its GPUs, which works as long as nothing is loaded onto one of them."""
    from torch_bridge import compiler, gpu

    client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    gpus = [types.SimpleNamespace(local_hardware_id=i, client=client) for i in range(len(devices))]
    monkeypatch.setattr(compiler, "interpreting", lambda: False)
    monkeypatch.setattr(gpu, "driver_fails", lambda: None)
    monkeypatch.setattr(gpu, "device", lambda ordinal: devices[ordinal])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend: gpus)
    if importlib.util.find_spec("torch"):
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
