"""Modules of linen and NNX with block-diagonal recurrent weights equal those with a matrix and zeros off its blocks."""

import functools

import cases
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import every_implementation, kernels_only, launches
from flax import nnx
from flax.errors import ScopeParamShapeError
from flax.traverse_util import flatten_dict, unflatten_dict
from trees import assert_close, normal, random_tree, some_carry, some_resets

import jaxrnn.nnx
from jaxrnn import convert, linen

T, B, D, H, N = 4, 3, 5, 6, 2
LINEN = {"GRU": "GRUCell", "LSTM": "OptimizedLSTMCell", "MGU": "MGUCell", "SimpleRNN": "SimpleCell"}
LINEN_CELLS = ["GRUCell", "LSTMCell", "OptimizedLSTMCell", "MGUCell", "SimpleCell"]
NNX = ["GRU", "LSTM", "SimpleRNN"]
NNX_CELLS = ["GRUCell", "LSTMCell", "OptimizedLSTMCell", "SimpleCell"]
STACKS = [*((linen, name) for name in LINEN), *((jaxrnn.nnx, name) for name in NNX)]
every_stack = pytest.mark.parametrize(("package", "stack"), STACKS, ids=[f"{p.__name__}.{s}" for p, s in STACKS])

xs, resets, highest = normal(0, (T, B, D)), some_resets((T, B)), {"precision": "highest"}


def is_recurrent(path):
    return path[-1] == "kernel" and path[-2].startswith(("h", "dense_h"))


def block_diagonal(kernel):
    """Returns the matrix `[H, gates * H]` of blocks `[N, H / N, gates * H / N]`."""
    blocks, rows, columns = kernel.shape
    by_gate = kernel.reshape(blocks, rows, columns // rows, rows)
    return jnp.concatenate([jax.scipy.linalg.block_diag(*by_gate[:, :, gate]) for gate in range(columns // rows)], -1)


def dense(params):
    """Returns parameters with the recurrent kernels as matrices."""
    flat = flatten_dict(params)
    return unflatten_dict({path: block_diagonal(x) if is_recurrent(path) else x for path, x in flat.items()})


class Functional:
    """A module as `apply(params, ...)` and initial `params`, in the same form for linen and NNX."""

    def __init__(self, package, name, seed=0, **options):
        options = {"time_major": True, "return_carry": True} | highest | options
        if package is linen:
            module = getattr(linen, name)(H, **options)
            self.params = module.init(jax.random.key(seed), xs)["params"]
            self.apply = lambda params, *args, **kwargs: module.apply({"params": params}, *args, **kwargs)
        else:
            module = getattr(jaxrnn.nnx, name)(D, H, rngs=nnx.Rngs(seed), **options)
            graph, state = nnx.split(module, nnx.Param)
            self.params = nnx.to_pure_dict(state)

            def apply(params, *args, **kwargs):
                nnx.replace_by_pure_dict(state_ := nnx.state(nnx.merge(graph, state), nnx.Param), params)
                return nnx.merge(graph, state_)(*args, **kwargs)

            self.apply = apply


def with_gradients(run):
    """Returns a function that computes outputs and the gradients of a sum over them to all arguments."""

    def both(*args):
        outputs = run(*args)
        weights = random_tree(3, jax.eval_shape(run, *args))
        loss = lambda *args: sum(jnp.vdot(x, w) for x, w in zip(*map(jax.tree.leaves, (run(*args), weights))))  # noqa: B905, E731
        return outputs, jax.grad(loss, argnums=tuple(range(len(args))))(*args)

    return jax.jit(both)


OPTIONS = {
    "two-layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True, "time_major": False, "learned_carry": True},
    "reverse-remat": {"reverse": True, "keep_order": True, "remat": True},
}


def arguments(blocked, options):
    """Returns random parameters of a module with blocks, inputs and resets."""
    x, r = (xs, resets) if options.get("time_major", True) else (xs.swapaxes(0, 1), resets.T)
    return random_tree(1, blocked.params), x, r


@functools.cache
def with_zeros(package, stack, name):
    """Returns outputs and gradients of a stack whose recurrent weights are matrices with zeros off the blocks."""
    matrix = Functional(package, stack, implementation="xla", **OPTIONS[name])
    params, x, r = arguments(Functional(package, stack, num_blocks=N, **OPTIONS[name]), OPTIONS[name])
    return with_gradients(lambda params, xs: matrix.apply(dense(params), xs, resets=r))(params, x)


@every_implementation
@pytest.mark.parametrize(
    ("package", "stack", "name"),
    [(*stack, name) for stack, name in cases.deal(OPTIONS, STACKS, STACKS[:2])],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_stacks_with_blocks_equal_a_matrix_with_zeros(package, stack, name, implementation):
    blocked = Functional(package, stack, num_blocks=N, implementation=implementation, **OPTIONS[name])
    params, x, r = arguments(blocked, OPTIONS[name])
    got = with_gradients(lambda params, xs: blocked.apply(params, xs, resets=r))(params, x)
    assert_close(got, with_zeros(package, stack, name), 2e-5)


@pytest.mark.quick("implementation")
@every_implementation
@pytest.mark.parametrize("cell", LINEN_CELLS)
def test_scanned_rnn_with_blocks(cell, implementation):
    """Checks cells of linen, in the module that agents use, with a carry."""
    cell_type = getattr(nn, cell, None) or getattr(linen, cell)  # Flax's class, if it has one
    carry, options = some_carry(cell, (B,), H), {"cell_type": cell_type, "cell_name": "cell"} | highest
    blocked = linen.ScannedRNN(num_blocks=N, implementation=implementation, **options)
    matrix = linen.ScannedRNN(implementation="xla", **options)
    params = random_tree(1, blocked.init(jax.random.key(0), carry, (xs, resets)))
    got = with_gradients(lambda p, *args: blocked.apply(p, args[0], (args[1], resets)))(params, carry, xs)
    want = with_gradients(lambda p, *args: matrix.apply(dense(p), args[0], (args[1], resets)))(params, carry, xs)
    assert_close(got, want, 2e-5)


@pytest.mark.parametrize("wrap", [linen.RNN, nn.RNN], ids=["jaxrnn", "flax"])
@pytest.mark.parametrize("cell", LINEN_CELLS)
def test_cells_of_linen_in_an_rnn_and_by_themselves(cell, wrap):
    """Checks that an `RNN`, Flax's own, which calls the cell for each step, and the dense cell agree."""
    make = getattr(linen, cell)
    rnn, carry = wrap(make(H, num_blocks=N, **highest), time_major=True, return_carry=True), some_carry(cell, (B,), H)
    params = random_tree(1, rnn.init(jax.random.key(0), xs))
    want = linen.RNN(make(H, **highest), time_major=True, return_carry=True)
    assert_close(rnn.apply(params, xs, initial_carry=carry), want.apply(dense(params), xs, initial_carry=carry), 2e-5)


@pytest.mark.parametrize("wrap", [jaxrnn.nnx.RNN, nnx.RNN], ids=["jaxrnn", "flax"])
@pytest.mark.parametrize("cell", NNX_CELLS)
def test_cells_of_nnx_in_an_rnn_and_by_themselves(cell, wrap):
    make, carry = getattr(jaxrnn.nnx, cell), some_carry(cell, (B,), H)
    blocked, matrix = (make(D, H, rngs=nnx.Rngs(0), **highest, **options) for options in ({"num_blocks": N}, {}))
    params = random_tree(1, nnx.to_pure_dict(nnx.state(blocked, nnx.Param)))
    nnx.update(blocked, params)
    nnx.update(matrix, dense(params))
    rnn, want = (make(x, time_major=True, return_carry=True) for make, x in ((wrap, blocked), (nnx.RNN, matrix)))
    assert_close(rnn(xs, initial_carry=carry), want(xs, initial_carry=carry), 2e-5)


@every_stack
def test_seeds_under_vmap(package, stack):
    """Checks `jax.vmap` over parameters: seeds are models beside the blocks."""
    module = Functional(package, stack, num_blocks=N)
    seeds = [random_tree(seed, module.params) for seed in (1, 2)]
    run = lambda params: module.apply(params, xs, resets=resets)  # noqa: E731
    got = jax.vmap(run)(jax.tree.map(lambda *x: jnp.stack(x), *seeds))
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *map(run, seeds)), 2e-5)


@kernels_only
@every_stack
def test_blocks_and_directions_take_one_launch(package, stack, implementation):
    module = Functional(package, stack, num_blocks=N, bidirectional=True, implementation=implementation)
    loss = lambda params: module.apply(params, xs, resets=resets)[1].sum()  # noqa: E731
    assert launches(jax.grad(loss), module.params) == (1, 1)


@every_stack
def test_each_block_is_initialized_like_a_matrix(package, stack):
    """Checks the shapes and the initial values, of which those of all other parameters do not depend on the blocks."""
    blocked, plain = (flatten_dict(Functional(package, stack, num_blocks=n).params) for n in (N, 1))
    assert blocked.keys() == plain.keys()
    kernels = [path for path in plain if is_recurrent(path)]
    assert kernels
    for path, x in plain.items():
        if path not in kernels:
            np.testing.assert_array_equal(blocked[path], x)
            continue
        first, second = blocked[path]
        assert (first.shape, first.dtype) == ((H // N, x.shape[1] // N), x.dtype)
        np.testing.assert_allclose(first @ first.T, jnp.eye(H // N), atol=1e-6)  # orthogonal
        assert not np.allclose(first, second)


@pytest.mark.parametrize("num_blocks", [1, H])
@every_stack
def test_one_block_is_a_matrix_and_h_blocks_are_single_units(package, stack, num_blocks):
    params = flatten_dict(Functional(package, stack, num_blocks=num_blocks).params)
    without = flatten_dict(Functional(package, stack).params)
    for path, x in params.items():
        if num_blocks == 1:
            np.testing.assert_array_equal(x, without[path])
        elif is_recurrent(path):
            assert x.shape == (H, 1, without[path].shape[1] // H)


def test_metadata_of_an_initializer_are_those_of_the_whole_kernel():
    names, orthogonal = (None, None, "model"), nn.initializers.orthogonal()
    theirs = linen.GRUCell(H, num_blocks=N, recurrent_kernel_init=nn.with_partitioning(orthogonal, names))
    kernel = theirs.init(jax.random.key(0), jnp.zeros((B, H)), xs[0])["params"]["hr"]["kernel"]
    assert (kernel.names, kernel.value.shape) == (names, (N, H // N, H // N))
    init = nnx.with_metadata(orthogonal, heads=names)
    kernel = jaxrnn.nnx.GRUCell(D, H, num_blocks=N, recurrent_kernel_init=init, rngs=nnx.Rngs(0)).dense_h.kernel
    assert (kernel.heads, kernel.shape) == (names, (N, H // N, 3 * H // N))


@pytest.mark.parametrize(
    ("num_blocks", "message"),
    [(4, "must divide the width of the carry, 6, got 4"), (0, "at least 1, got 0"), (-2, "at least 1, got -2"),
     (2.0, "num_blocks must be an integer, got 2.0")],
)  # fmt: skip
@every_stack
def test_wrong_numbers_of_blocks_raise(package, stack, num_blocks, message):
    with pytest.raises(ValueError, match=message):
        Functional(package, stack, num_blocks=num_blocks)


def test_the_width_of_the_carry_decides_in_a_cell_of_linen():
    cell = linen.GRUCell(8, num_blocks=4)
    with pytest.raises(ValueError, match="must divide the width of the carry, 6, got 4"):
        cell.init(jax.random.key(0), jnp.zeros((B, 6)), xs[0])


@pytest.mark.parametrize("package", [linen, jaxrnn.nnx])
def test_blocks_exclude_a_projection(package):
    with pytest.raises(ValueError, match=r"num_blocks must be 1 with a projection, .* got 2"):
        Functional(package, "LSTM", num_blocks=2, proj_size=4)


@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize("wrap", [None, linen.RNN, jaxrnn.nnx.RNN], ids=["ScannedRNN", "linen.RNN", "nnx.RNN"])
def test_cells_that_only_flax_runs_have_no_blocks(wrap, implementation):
    options = {"num_blocks": N, "implementation": implementation}
    if wrap is jaxrnn.nnx.RNN:
        cell = jaxrnn.nnx.GRUCell(D, H, gate_fn=nn.relu, rngs=nnx.Rngs(0), **options)
        run = lambda: wrap(cell)(xs)  # noqa: E731
    elif wrap is linen.RNN:
        run = lambda: wrap(linen.GRUCell(H, gate_fn=nn.relu, **options)).init(jax.random.key(0), xs)  # noqa: E731
    else:
        rnn = linen.ScannedRNN(cell_type=nn.ConvLSTMCell, **options)
        with pytest.raises(ValueError, match=r"needs a cell of jaxrnn.linen, got the class .*ConvLSTMCell"):
            rnn.init(jax.random.key(0), jnp.zeros((B, H)), (xs, resets))
        return
    with pytest.raises(NotImplementedError, match="gate_fn is not sigmoid"):
        run()


def test_parameters_of_a_matrix_are_rejected():
    plain = Functional(linen, "GRU").params
    with pytest.raises(ScopeParamShapeError, match="kernel"):
        Functional(linen, "GRU", num_blocks=N).apply(plain, xs)


@pytest.mark.parametrize("source", ["linen", "nnx", "torch"])
def test_blocks_are_converted_there_and_back(source):
    if source == "linen":
        params = convert.from_linen(Functional(linen, "GRU", num_blocks=N).params["layers_0"])
        again = convert.from_linen(convert.to_linen(params))
    elif source == "nnx":
        cell = jaxrnn.nnx.GRUCell(D, H, num_blocks=N, rngs=nnx.Rngs(0))
        params = convert.from_nnx(cell)
        again = convert.from_nnx(convert.to_nnx(params, cell))
    else:
        shapes = (D, 3 * H), (N, H // N, 3 * H // N), (3 * H,), (H,)
        params = jaxrnn.GRUParams(*(jax.random.normal(jax.random.key(k), shape) for k, shape in enumerate(shapes)))
        again = convert.from_torch(convert.to_torch(params))
    assert params.w_hh.shape == (N, H // N, 3 * H // N)
    for x, y in zip(params, again, strict=True):
        np.testing.assert_array_equal(x, y)
