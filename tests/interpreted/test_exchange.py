"""JAX and PyTorch share memory without copies, and without races while memory is freed and reused.

As docs/pytorch_transformations.md requires, an object that the other framework reads is kept until that framework has
read it: every round is finished, and its objects are released, two rounds later. The rounds wait for nothing else,
because the streams order the work.
"""

import collections
import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch_calls import every_cell, torch

import jaxrnn
from torch_bridge import functional, nn

every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)]
)
DRAWS = 3  # several, so that freed memory holds the numbers of another draw


@pytest.fixture(autouse=True)
def the_first_gpu():
    """Makes the first GPU current: JAX computes on it, but leaves the GPU that it used last current."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)


class Size(NamedTuple):
    T: int
    B: int
    H: int  # width of the inputs too
    rounds: int
    busy: int  # size of the matrices whose products keep JAX busy


SIZES = {"cpu": Size(3, 2, 8, 4, 8), "cuda": Size(48, 32, 128, 40, 2048)}


def draw(cell, size, seed):
    """Returns operands in the layout of `jaxrnn`, resets `[T, B]`, and the cotangent `ct [T, B, H]` of the outputs."""
    rng = np.random.default_rng(seed)
    T, B, H, *_ = size
    gates = 3 if cell == "gru" else 4
    shapes = {"xs": (T, B, H), "w_ih": (H, gates * H), "w_hh": (H, gates * H), "h": (B, H), "ct": (T, B, H)}
    shapes |= {"b_ih": (3 * H,), "b_hn": (H,)} if cell == "gru" else {"b": (4 * H,), "c": (B, H)}
    numbers = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    numbers |= {name: numbers[name] / np.float32(H) ** 0.5 for name in ("w_ih", "w_hh")}
    return numbers | {"resets": rng.random((T, B)) < 0.1}


def is_operand(name):
    return name not in ("resets", "ct")


def in_torch(cell, x):
    """Returns `ys` and every gradient: of a GRU by `torch_bridge.functional`, of an LSTM by `torch_bridge.nn`."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items() if is_operand(name)}
    w_ih, w_hh, H = leaves["w_ih"].mT, leaves["w_hh"].mT, x["h"].shape[-1]
    if cell == "gru":
        b_hh = torch.nn.functional.pad(leaves["b_hn"], (2 * H, 0))
        ys, _ = functional.gru(
            leaves["xs"], leaves["h"], w_ih, w_hh, leaves["b_ih"], b_hh, resets=x["resets"], implementation="triton"
        )
    else:
        with torch.device("meta"):  # `functional_call` replaces the weights of the module
            module = nn.LSTM(H, H, implementation="triton")
        b_ih, b_hh = leaves["b"], torch.zeros_like(leaves["b"])
        weights = {"weight_ih_l0": w_ih, "weight_hh_l0": w_hh, "bias_ih_l0": b_ih, "bias_hh_l0": b_hh}
        state = (leaves["h"][None], leaves["c"][None])
        ys, _ = torch.func.functional_call(module, weights, (leaves["xs"], state), {"resets": x["resets"]})
    gradients = torch.autograd.grad(ys, list(leaves.values()), x["ct"])
    return {"ys": ys.detach(), **dict(zip(leaves, gradients, strict=True))}


@functools.partial(jax.jit, static_argnums=0)
def in_jax(cell, x):
    """Returns the results of `in_torch`, computed by `jaxrnn.gru` or `jaxrnn.lstm`."""

    def forward(operands):
        if cell == "gru":
            params = jaxrnn.GRUParams(*(operands[name] for name in ("w_ih", "w_hh", "b_ih", "b_hn")))
            carry, run = operands["h"], jaxrnn.gru
        else:
            params = jaxrnn.LSTMParams(*(operands[name] for name in ("w_ih", "w_hh", "b")))
            carry, run = (operands["c"], operands["h"]), jaxrnn.lstm
        return run(params, carry, operands["xs"], resets=x["resets"], implementation="triton")[1]

    ys, vjp = jax.vjp(forward, {name: value for name, value in x.items() if is_operand(name)})
    return {"ys": ys, **vjp(x["ct"])[0]}


def to_torch(arrays):
    tensors = {name: torch.from_dlpack(x) for name, x in arrays.items()}
    assert {name: x.data_ptr() for name, x in tensors.items()} == {
        name: x.unsafe_buffer_pointer() for name, x in arrays.items()
    }
    return tensors


def to_jax(tensors):
    arrays = {name: jax.dlpack.from_dlpack(x) for name, x in tensors.items()}
    assert {name: x.unsafe_buffer_pointer() for name, x in arrays.items()} == {
        name: x.data_ptr() for name, x in tensors.items()
    }
    return arrays


@functools.partial(jax.jit, static_argnums=1)
def late(tree, busy):
    """Returns new arrays with the values of `tree`, which JAX computes only after a long series of products."""
    product = jax.lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ x), jnp.eye(busy))
    zero = jnp.where(jnp.isnan(product.sum()), 1.0, 0.0)
    return jax.tree.map(lambda x: x | (zero > 0) if x.dtype == bool else x + zero, tree)


@jax.jit
def overwrite(tree):
    """Allocates arrays of the sizes in `tree` and fills them with NaN, which overwrites freed memory of these sizes."""
    return jax.tree.map(lambda x: jnp.full_like(x, True if x.dtype == bool else jnp.nan), tree)


class Streams:
    """Two busy PyTorch streams (none on the CPU) that run rounds in turn and keep their objects for two more rounds."""

    def __init__(self, device):
        self.gpu = device == "cuda"
        if self.gpu:
            self.streams = [torch.cuda.Stream() for _ in range(2)]
            torch.cuda.synchronize()
        self.pending = collections.deque()
        self.overlapped = False

    def turn(self, i):
        return torch.cuda.stream(self.streams[i % 2]) if self.gpu else contextlib.nullcontext()

    def sleep(self):
        if self.gpu:
            torch.cuda._sleep(20_000_000)

    def hold(self, check, *held):
        """Ends a round on its stream; two rounds later, waits for the stream, calls `check` and releases `held`."""
        event = torch.cuda.Event() if self.gpu else None
        if event is not None:
            event.record()
            self.overlapped |= not event.query()
        self.pending.append((event, check, held))
        if len(self.pending) > 2:
            self.finish()

    def finish(self):
        event, check, _ = self.pending.popleft()
        if event is not None:
            event.synchronize()
        check()

    def finish_all(self):
        while self.pending:
            self.finish()
        if self.gpu:
            assert self.overlapped  # otherwise nothing ran concurrently, and the test proves nothing


def assert_bits(got, want):
    assert got.keys() == want.keys()
    for name, x in got.items():
        torch.testing.assert_close(x, want[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def tensors_of(numbers, device):
    return {name: torch.tensor(x, device=device) for name, x in numbers.items()}


@pytest.mark.quick
@every_device
@every_cell
def test_tensors_keep_the_memory_of_deleted_arrays(cell, device):
    size = SIZES[device]
    draws = [draw(cell, size, seed) for seed in range(DRAWS)]
    own = [jax.device_put(numbers) for numbers in draws]
    want = [in_torch(cell, tensors_of(numbers, device)) for numbers in draws]
    jax.block_until_ready((own, overwrite(own[0]), late(own[0], size.busy)))
    streams = Streams(device)
    for i in range(size.rounds):
        with streams.turn(i):
            arrays = late(own[i % DRAWS], size.busy)  # PyTorch's stream waits for the arrays, the host does not
            tensors = to_torch(arrays)
            for x in arrays.values():
                x.delete()  # only the tensors own the memory now
            overwrite(own[0])
            streams.sleep()
            got = in_torch(cell, tensors)
            streams.hold(functools.partial(assert_bits, got, want[i % DRAWS]), tensors)
        del arrays, tensors, got
        overwrite(own[0])
    streams.finish_all()


@every_device
@every_cell
def test_arrays_keep_the_memory_of_dropped_tensors(cell, device):
    size = SIZES[device]
    draws = [draw(cell, size, seed) for seed in range(DRAWS)]
    own = [tensors_of(numbers, device) for numbers in draws]
    if device == "cuda":
        torch.cuda.synchronize()
    results = [in_jax(cell, to_jax(x)) for x in own]
    want = [{name: torch.tensor(np.array(x), device=device) for name, x in result.items()} for result in results]
    junk = jax.block_until_ready(overwrite(draws[0]))
    streams = Streams(device)
    for i in range(size.rounds):
        with streams.turn(i):
            streams.sleep()
            tensors = {name: x.clone() for name, x in own[i % DRAWS].items()}
            arrays = to_jax(tensors)  # JAX waits for this stream, the host does not
            del tensors  # only the arrays own the memory now
            for x in own[0].values():
                torch.full_like(x, True if x.dtype == torch.bool else torch.nan)
            result = in_jax(cell, arrays)
            shared = to_torch(result)  # this stream waits for JAX
            got = {name: x.clone() for name, x in shared.items()}
            # the stream waits for the result, and so for everything that reads `arrays`
            streams.hold(functools.partial(assert_bits, got, want[i % DRAWS]), arrays, result, shared)
        del arrays, result, shared, got
        overwrite(junk)
        if streams.gpu and i % 10 == 9:
            torch.cuda.empty_cache()
    streams.finish_all()


@every_device
@every_cell
def test_alternating_layers_that_share_memory_equal_layers_with_copies(cell, device):
    """Two layers of JAX and two of PyTorch alternate; each is launched before its input has been written."""
    size = SIZES[device]
    draws = [draw(cell, size, seed) for seed in range(DRAWS)]
    arrays = jax.device_put(draws)
    tensors = [tensors_of(numbers, device) for numbers in draws]

    def layers(i, between):
        """Returns the last outputs, and all arrays to keep; `between` converts arrays to PyTorch and to JAX."""
        held = [arrays[i]["xs"]]
        for _ in range(2):
            held.append(in_jax(cell, arrays[i] | {"xs": held[-1]})["ys"])
            held.append(between[0](held[-1]))
            held.append(in_torch(cell, tensors[i] | {"xs": held[-1]})["ys"])
            held.append(between[1](held[-1]))
        return held[-2], held

    by_copies = (lambda x: torch.tensor(np.array(x), device=device)), (lambda x: jnp.array(x.cpu().numpy()))
    want = [{"ys": layers(i, by_copies)[0]} for i in range(DRAWS)]
    jax.block_until_ready(overwrite(draws[0]))
    streams = Streams(device)

    def share(x):
        streams.sleep()
        return to_torch({"ys": x})["ys"]

    for i in range(size.rounds):
        with streams.turn(i):
            got, held = layers(i % DRAWS, (share, lambda x: to_jax({"ys": x})["ys"]))
            streams.hold(functools.partial(assert_bits, {"ys": got}, want[i % DRAWS]), held)
        del got, held
        overwrite(arrays[0])
    streams.finish_all()
