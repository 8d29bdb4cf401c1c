"""Messages of wrong calls name the function or class, the argument as the user wrote it, what came and what to do.

The table has a wrong call for each line. `test_errors.py` has those of the functions that are checked under `jit` too.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.sparse import BCOO

import jaxrnn
from jaxrnn import convert, linen
from jaxrnn import nnx as fused
from jaxrnn.checks import Caller, check_precision

T, B, H, D = 4, 3, 6, 2
Z, KEY = jnp.zeros, jax.random.key(0)
GRU = jaxrnn.GRUParams(Z((D, 3 * H)), Z((H, 3 * H)), Z(3 * H), Z(H))
LSTM = jaxrnn.LSTMParams(Z((D, 4 * H)), Z((H, 4 * H)), Z(4 * H))
MGU = jaxrnn.MGUParams(Z((D, 2 * H)), Z((H, 2 * H)), Z(2 * H), Z(H))
SIMPLE = jaxrnn.SimpleParams(Z((D, H)), Z((H, H)), Z(H))
FUNCTIONS = {
    "gru": (jaxrnn.gru, GRU), "lstm": (jaxrnn.lstm, LSTM), "mgu": (jaxrnn.mgu, MGU),
    "simple_rnn": (jaxrnn.simple_rnn, SIMPLE),
}  # fmt: skip
XS, RESETS, H0 = Z((T, B, D)), Z((T, B), bool), Z((B, H))
BATCH_MAJOR, PAIR = Z((B, T, D)), (H0, H0)
KEYS, F8 = jax.random.split(KEY, XS.shape), jnp.float8_e4m3fn

# Names that a user of jaxrnn has not written and cannot look up.
INTERNAL = re.compile("ArrayImpl|Tracer|ShapedArray|NoneType|PyTreeDef|_DimExpr|FusedCell|FusedStack|w_hh must be.*RNN")


def norm_gru(**options):
    """Returns a call of `jaxrnn.norm_gru` with valid arguments but for the options."""
    return lambda: jaxrnn.norm_gru(jaxrnn.NormGRUParams(Z((D, 3 * H)), Z((H, 3 * H)), Z(3 * H)), H0, XS, **options)


def call(name, params=None, carry=None, xs=XS, **options):
    """Calls a function of jaxrnn with valid arguments, except for those that are given."""
    function, valid = FUNCTIONS[name]
    carry = (PAIR if name == "lstm" else H0) if carry is None else carry
    return function(valid if params is None else params, carry, xs, **options)


def wrong(name, /, **arguments):
    return functools.partial(call, name, **arguments)


def apply(module, *args, **options):
    """Initializes and runs a module of linen."""
    return lambda: jax.eval_shape(lambda: module.init_with_output(KEY, *args, **options))


def reuse(module, other, *args, **options):
    """Runs a module of linen with the parameters of another."""
    return lambda: module.apply(other.init(KEY, XS), *args, **options)


def rngs():
    return nnx.Rngs(0)


def made(module, *args, **options):
    """Makes a module of NNX with `rngs`, and calls it if there are arguments besides those of its constructor."""
    return lambda: getattr(fused, module)(*args, rngs=rngs(), **options)


def ran(module, *args, **options):
    """Runs a cell, an RNN of a GRU or LSTM cell, or a stack of NNX, with D inputs and H units."""

    def run():
        one = getattr(fused, module.removeprefix("RNN of "))(D, H, rngs=rngs())
        return (fused.RNN(one) if module.startswith("RNN") else one)(*args, **options)

    return run


def exported(function, *shapes):
    """Exports a function of arrays with symbolic shapes."""
    scope = jax.export.SymbolicScope()
    shapes = [jax.export.symbolic_shape(shape, scope=scope) for shape in shapes]
    return jax.export.export(jax.jit(function))(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def stacked(params):
    return jax.tree.map(lambda x: jnp.stack([x, x]), params)


def object_array(*shape):
    return np.full(shape, None)


def nnx_params(cell):
    """Returns the parameters of a cell of NNX as a mapping."""
    return nnx.to_pure_dict(nnx.state(cell(D, H, rngs=nnx.Rngs(0)), nnx.Param))


def linen_params(cell):
    return cell.init(KEY, cell.initialize_carry(KEY, (B, D)), XS[0])["params"]


PRECISIONS = "default, fastest, bfloat16, high, bfloat16_3x, tensorfloat32, highest, float32"

# Of every function or class: (wrong call, part of the message after the name)
TABLE = {
    "gru": [
        # weights
        (
            wrong("gru", params=linen_params(nn.GRUCell(H))),
            "got a dict with ir, hr, iz, hz, in, hn; use jaxrnn.convert.from_linen",
        ),
        (wrong("gru", params={"params": {}}), "got a dict with params; use jaxrnn.convert.from_linen"),
        (lambda: call("gru", params=nnx.GRUCell(D, H, rngs=rngs())), "got GRUCell; use jaxrnn.convert.from_nnx"),
        (
            lambda: call("gru", params=nnx.state(nnx.GRUCell(D, H, rngs=rngs()))),
            "got State; use jaxrnn.convert.from_nnx",
        ),
        (wrong("gru", params={"weight_ih_l0": np.zeros((3 * H, D))}), "use jaxrnn.convert.from_torch"),
        (wrong("gru", params=linen.GRUCell(H)), "got GRUCell; use jaxrnn.convert.from_linen"),
        (
            wrong("gru", params=LSTM),
            "params must be GRUParams(w_ih, w_hh, b_ih, b_hn), got LSTMParams; call jaxrnn.lstm",
        ),
        (wrong("gru", params=MGU), "got MGUParams; call jaxrnn.mgu"),
        (wrong("gru", params=SIMPLE), "got SimpleParams; call jaxrnn.simple_rnn"),
        (wrong("gru", params=H0), "got an array float32[3, 6]; make them with jaxrnn.GRUParams"),
        (lambda: jaxrnn.gru(None, H0, XS), "params must be GRUParams(w_ih, w_hh, b_ih, b_hn), got None; make them"),
        (wrong("gru", params="weights"), "got 'weights'"),
        (wrong("gru", params=jaxrnn.GRUParams), "got the class GRUParams"),
        (
            wrong("gru", params=stacked(GRU)),
            "params.w_ih must be [D, 3H], got (2, 2, 18); run the stacked weights of several models with jax.vmap",
        ),
        (
            wrong("gru", params=GRU._replace(w_ih=Z((2, D, 3 * H)))),
            "params.w_ih must be (2, 18) for xs of width 2 and a carry of width 6, got (2, 2, 18); run",
        ),
        (
            wrong("gru", params=GRU._replace(w_hh=GRU.w_hh.T)),
            "got (18, 6); transpose it, or use jaxrnn.convert.from_torch",
        ),
        (
            wrong("gru", params=GRU._replace(b_ih=[0.0] * 18)),
            "params.b_ih must be an array, got a list of 18; convert it with jnp.asarray",
        ),
        (wrong("gru", params=jax.eval_shape(lambda: GRU)), "params.w_ih must be an array, got a jax.ShapeDtypeStruct"),
        # layouts
        (wrong("gru", xs=BATCH_MAJOR), "got (3, 6); pass time_major=False if xs is [*batch, T, D]"),
        (wrong("gru", time_major=False), "got (3, 6); pass time_major=True if xs is [T, *batch, D]"),
        (wrong("gru", xs=XS[0]), "xs seems to have no time axis: add it with jnp.expand_dims"),
        (wrong("gru", xs=H0, carry=XS), "carry and xs seem to be swapped"),
        (wrong("gru", carry=Z((H, B))), "carry seems to be [H, B]: swap the arguments of the function that made it"),
        (
            wrong("gru", xs=(XS, RESETS)),
            "xs must be an array, got a tuple of 2; pass one array, and resets by its name",
        ),
        (
            wrong("gru", carry=Z((B + 2, H))),
            (
                "carry must be [*batch, H] with batch axes (3,) as in xs [T, *batch, D] = (4, 3, 2), "
                "got (5, 6); make carry"
            ),
        ),
        (wrong("gru", carry=XS, xs=H0), "carry must be [*batch, H] with batch axes ()"),
        (wrong("gru", resets=RESETS.T), "got (3, 4); move its time axis with jnp.moveaxis"),
        (wrong("gru", resets=RESETS[..., None]), "got (4, 3, 1); remove its last axis"),
        (wrong("gru", resets=RESETS[0]), "resets must be [T, *batch] = (4, 3) as in xs (4, 3, 2), got (3,)"),
        # dtypes and types
        (wrong("gru", carry=Z((B, H), complex)), "carry must be floating point, got complex64; convert it first"),
        (
            wrong("gru", carry=0.0),
            "carry must be one array for a GRU, [*batch, H], got float; pass zeros for a new "
            "episode, as initialize_carry of a module returns",
        ),
        (
            wrong("gru", carry=PAIR),
            "carry must be one array for a GRU, [*batch, H], got a tuple of 2; only an LSTM has a pair (c, h)",
        ),
        (wrong("gru", carry=[0.0] * H), "got a list of 6; convert it with jnp.asarray"),
        (wrong("gru", carry=[[0.0] * H] * 2), "got a list of 2; convert it with jnp.asarray"),
        (wrong("gru", carry=[H0]), "got a list of 1; pass its only element"),
        (wrong("gru", carry=BCOO.fromdense(H0)), "carry must be one array for a GRU, [*batch, H], got BCOO; pass its"),
        (wrong("gru", xs=BCOO.fromdense(XS)), "xs must be an array, got BCOO; pass its todense()"),
        (wrong("gru", resets=BCOO.fromdense(RESETS)), "resets must be an array, got BCOO; pass its todense()"),
        (wrong("gru", params=GRU._replace(w_ih=BCOO.fromdense(GRU.w_ih))), "params.w_ih must be an array, got BCOO"),
        (wrong("gru", xs=KEYS), "xs must be an array of numbers, got dtype key<fry>; it holds random keys"),
        (wrong("gru", carry=XS.astype(F8)[0]), "carry must have a dtype that JAX promotes, got float8_e4m3fn"),
        (wrong("gru", xs=XS.astype(F8)), "xs must have a dtype that JAX promotes, got float8_e4m3fn; convert it"),
        (
            wrong("gru", params=GRU._replace(w_hh=GRU.w_hh.astype(F8))),
            "params.w_hh must have a dtype that JAX promotes",
        ),
        (wrong("gru", xs=XS.astype(bool)), "xs must be floating point, got bool; convert it first"),
        (wrong("gru", xs=XS.astype(jnp.uint8)), "xs must be floating point, got uint8; convert it first"),
        (
            wrong("gru", xs=object_array(T, B, D)),
            "xs must be an array of numbers, got dtype object; convert it with astype",
        ),
        (
            wrong("gru", xs=np.zeros((T, B, D), str)),
            "xs must be an array of numbers, got dtype <U1; convert it with astype",
        ),
        (wrong("gru", xs="xs"), "xs must be an array, got 'xs'; pass an array of numbers"),
        (wrong("gru", xs=(XS, XS)), "xs must be an array, got a tuple of 2; convert it with jnp.asarray"),
        (wrong("gru", xs={"obs": XS}), "xs must be an array, got a dict with obs; pass an array of numbers"),
        (wrong("gru", resets=Z((T, B), complex)), "resets must be real, got complex64; pass its real part"),
        (wrong("gru", resets=True), "resets must be an array, got bool; convert it with jnp.asarray"),
        (wrong("gru", resets=object_array(T, B)), "resets must be an array of numbers, got dtype object"),
        # reset states
        (
            wrong("gru", resets=RESETS, reset_state=Z((B, 1))),
            "reset_state must be [H] = (6,), [*batch, H] = (3, 6) or [T, *batch, H] = (4, 3, 6), got (3, 1)",
        ),
        (wrong("gru", resets=RESETS, reset_state=Z((B, T, H))), "got (3, 4, 6)"),
        (
            wrong("gru", resets=RESETS, reset_state=PAIR),
            "reset_state must be one array for a GRU, [*batch, H], got a tuple of 2",
        ),
        (
            wrong("gru", resets=RESETS, reset_state=0.0),
            "reset_state must be one array for a GRU, [*batch, H], got float",
        ),
        # options
        (
            wrong("gru", precision="foo"),
            f"precision must be None, a jax.lax.Precision, one of {PRECISIONS}, a pair of these",
        ),
        (wrong("gru", precision="HIGHEST"), "got 'HIGHEST'; did you mean \"highest\"?"),
        (
            wrong("gru", precision=("high", "hihg")),
            "a pair of these, or a jax.lax.DotAlgorithmPreset, got ('high', 'hihg')",
        ),
        (wrong("gru", precision=["high", "high"]), "got ['high', 'high']"),
        (wrong("gru", precision=jnp.float32), "got the class float32"),
        (
            wrong("gru", implementation="Triton"),
            'implementation must be "triton", "xla" or None, got \'Triton\'; did you mean "triton"?',
        ),
        (wrong("gru", implementation="trition"), "got 'trition'; did you mean \"triton\"?"),
        (wrong("gru", implementation="cuda"), "got 'cuda'; did you mean \"triton\"?"),
        (wrong("gru", implementation="scan"), "got 'scan'; did you mean \"xla\"?"),
        (wrong("gru", implementation=["xla"]), "got ['xla']"),
        (wrong("gru", implementation=H0), "got an array float32[3, 6]"),
        (wrong("gru", reverse="yes"), "reverse must be True or False, got 'yes'; pass a Python bool"),
        (wrong("gru", reverse=None), "reverse must be True or False, got None"),
        (wrong("gru", reverse=jnp.array(True)), "reverse must be True or False, got an array bool[]"),
        (wrong("gru", time_major="T"), "time_major must be True or False, got 'T'"),
        (wrong("gru", remat="dots"), "remat must be True or False, got 'dots'"),
        # symbolic dimensions
        (
            lambda: exported(lambda c, x: jaxrnn.gru(GRU, c, x), "b,6", "t,a,2"),
            "with batch axes (a,) as in xs [T, *batch, D] = (t, a, 2), got (b, 6)",
        ),
        (
            lambda: exported(lambda w, c, x: jaxrnn.gru(GRU._replace(w_hh=w), c, x), "n,m,3*m", "b,6", "t,b,2"),
            (
                "params.w_hh must have a known number of blocks and units, got (n, m, 3*m); use "
                "symbolic dimensions for time"
            ),
        ),
    ],
    "lstm": [
        (
            lambda: jaxrnn.lstm(LSTM, None, XS),
            (
                "carry must be a pair (c, h) for an LSTM, two arrays [*batch, H], got None; "
                "pass both, for a new episode the zeros that initialize_carry of a module returns"
            ),
        ),
        (wrong("lstm", carry=H0), "got an array float32[3, 6]; pass both, for a new episode"),
        (wrong("lstm", carry=jnp.stack(PAIR)), "got an array float32[2, 3, 6]; pass both, for a new episode"),
        (
            wrong("lstm", carry={"c": H0, "h": H0}),
            "got a dict with c, h; pass both, for a new episode the zeros that initialize_carry",
        ),
        (wrong("lstm", carry=(H0, None)), "carry[1] must be an array, got None"),
        (wrong("lstm", carry=(PAIR, PAIR)), "carry[1] must be one array [*batch, H], got a tuple of 2"),
        (lambda: jax.jit(lambda c: call("lstm", carry=c))(H0), "got an array float32[3, 6]; pass both, for a"),
        (
            wrong("lstm", resets=RESETS, reset_state=(H0,) * 3),
            "reset_state must be a pair (c, h) for an LSTM, two arrays [*batch, H], got a tuple of 3",
        ),
        (wrong("lstm", params=GRU), "params must be LSTMParams(w_ih, w_hh, b, w_hr), got GRUParams; call jaxrnn.gru"),
        (
            wrong("lstm", params=LSTM._replace(w_hh=Z((2, 4 * H)), w_hr=Z((2, H))), carry=(H0, Z((B, 2)))),
            "params.w_hr must be (6, 2) for xs of width 2 and a carry of width 2, got (2, 6); transpose it",
        ),
        (wrong("lstm", return_cells="yes"), "return_cells must be True or False, got 'yes'"),
    ],
    "mgu": [
        (wrong("mgu", params=GRU), "params must be MGUParams(w_ih, w_hh, b_ih, b_hn), got GRUParams; call jaxrnn.gru"),
        (wrong("mgu", carry=H0.astype(int)), "carry must be floating point, got int32; convert it first"),
    ],
    "simple_rnn": [
        (wrong("simple_rnn", params=GRU), "params must be SimpleParams(w_ih, w_hh, b), got GRUParams; call jaxrnn.gru"),
        (
            wrong("simple_rnn", activation="ReLU"),
            'activation must be "tanh" or "relu", got \'ReLU\'; did you mean "relu"?',
        ),
        (wrong("simple_rnn", activation="gelu"), 'activation must be "tanh" or "relu", got \'gelu\''),
        (wrong("simple_rnn", activation=["tanh"]), "got ['tanh']"),
    ],
    "norm_gru": [
        (norm_gru(norm=np.ones(3)), 'norm_gru: norm must be "rms" or "layer", got an array'),
        (norm_gru(epsilon="a"), "norm_gru: epsilon must be a number, got 'a'; pass a Python float"),
        (norm_gru(epsilon=-1.0), "norm_gru: epsilon must be finite and not negative, got -1.0; the default is 1e-4"),
        (norm_gru(update_bias=None), "norm_gru: update_bias must be a number, got None; pass a Python float"),
        (norm_gru(update_bias=float("inf")), "norm_gru: update_bias must be finite, got inf; the default is -1"),
    ],
    "rms_norm": [
        (lambda: jaxrnn.rms_norm(None), "x must be an array, got None"),
        (lambda: jaxrnn.rms_norm((H0,)), "x must be an array, got a tuple of 1; convert it with jnp.asarray"),
        (lambda: jaxrnn.rms_norm(H0.astype(int)), "x must be floating point, got int32; convert it first"),
        (
            lambda: jaxrnn.rms_norm(H0, Z((1, H))),
            "weight must be [N] = (6,) as in x (3, 6), got (1, 6); the norm is over the last axis",
        ),
        (lambda: jaxrnn.rms_norm(H0, 1e-5), "weight must be an array, got float"),
        (lambda: jaxrnn.rms_norm(H0, epsilon="1e-5"), "epsilon must be a number, got '1e-5'; pass a Python float"),
        (
            lambda: jax.jit(lambda e: jaxrnn.rms_norm(H0, epsilon=e))(1e-5),
            "epsilon must be a number, got an array float32[]; pass a Python float",
        ),
        (
            lambda: jaxrnn.rms_norm(H0, residual=Z(H)),
            "residual must have the shape and dtype of x, float32[3, 6], got float32[6]; broadcast or convert it",
        ),
        (lambda: jaxrnn.rms_norm(H0, implementation="Triton"), 'did you mean "triton"?'),
    ],
    "layer_norm": [
        (lambda: jaxrnn.layer_norm(H0, Z(B)), "weight must be [N] = (6,) as in x (3, 6), got (3,)"),
        (lambda: jaxrnn.layer_norm(H0, epsilon=-1.0), "epsilon must be finite and not negative, got -1.0"),
    ],
    "RNN": [
        # linen
        (
            apply(linen.RNN(linen.GRUCell), XS),
            (
                "cell must be a cell, an instance of flax.linen.RNNCellBase, got the class GRUCell; "
                "make an instance, such as GRUCell(features=128)"
            ),
        ),
        (apply(linen.RNN(nn.OptimizedLSTMCell), XS), "make an instance, such as OptimizedLSTMCell(features=128)"),
        (apply(linen.RNN("gru"), XS), "got 'gru'; make one, such as jaxrnn.linen.GRUCell(features=128)"),
        (apply(linen.RNN(linen.GRU(H)), XS), "got GRU; call the stack itself"),
        (
            lambda: apply(linen.RNN(nnx.GRUCell(D, H, rngs=rngs())), XS)(),
            "got GRUCell; make one, such as jaxrnn.linen.GRUCell",
        ),
        (
            apply(linen.RNN(linen.GRUCell(H)), XS, initial_carry=H0),
            (
                "initial_carry must be [*batch, H] with batch axes (4,) as in inputs [*batch, T, D] "
                "= (4, 3, 2), got (3, 6); pass time_major=True if inputs is [T, *batch, D]"
            ),
        ),
        (
            apply(linen.RNN(linen.GRUCell(H)), XS, resets=RESETS.T),
            "resets must be [*batch, T] = (4, 3) as in inputs, got (3, 4); move",
        ),
        (apply(linen.RNN(linen.GRUCell(H)), XS, resets=RESETS.astype(complex)), "resets must be real, got complex64"),
        (apply(linen.RNN(linen.GRUCell(H)), XS.astype(complex)), "inputs must be real, got complex64"),
        (apply(linen.RNN(linen.GRUCell(H)), XS.astype(F8)), "inputs must have a dtype that JAX promotes, got float8"),
        (
            apply(linen.RNN(linen.GRUCell(H)), XS.astype(jnp.int4)),
            "inputs must have a dtype that JAX promotes, got int4",
        ),
        (apply(linen.RNN(linen.GRUCell(H)), BCOO.fromdense(XS)), "inputs must be an array, got BCOO; pass its todense"),
        (apply(linen.RNN(linen.GRUCell(H)), KEYS), "inputs must be an array of numbers, got dtype key<fry>"),
        (
            apply(linen.RNN(linen.GRUCell(H)), [[0.0]]),
            "inputs must be an array, got a list of 1; convert it with jnp.asarray",
        ),
        (apply(linen.RNN(linen.GRUCell(H)), None), "inputs must be an array, got None"),
        (
            apply(linen.RNN(linen.GRUCell(H)), Z(D)),
            "inputs must be [*batch, T, D], got (2,); add the axes that are missing",
        ),
        (apply(linen.RNN(linen.GRUCell(H)), (XS, RESETS)), "inputs must be an array, got a tuple of 2"),
        (
            apply(linen.RNN(linen.GRUCell(H)), XS, initial_carry=Z((T, H), int)),
            "initial_carry must be floating point, got int32",
        ),
        (
            apply(linen.RNN(linen.GRUCell(H)), XS, initial_carry="zeros"),
            "initial_carry must be one array for a GRU, [*batch, H], got 'zeros'; pass zeros for a new "
            "episode, as initialize_carry of a module returns",
        ),
        (
            apply(linen.RNN(linen.LSTMCell(H)), XS, initial_carry=Z((T, H))),
            (
                "initial_carry must be a pair (c, h) for an LSTM, two arrays [*batch, H], got an "
                "array float32[4, 6]; pass both, for a new episode the zeros that initialize_carry of a module returns"
            ),
        ),
        (
            apply(linen.RNN(linen.LSTMCell(H)), XS, resets=RESETS, reset_carry=Z(H)),
            "reset_carry must be a pair (c, h) for an LSTM",
        ),
        (
            apply(linen.RNN(linen.GRUCell(H)), XS, resets=RESETS, reset_carry=Z(H + 1)),
            "reset_carry must be [H] = (6,), [*batch, H] = (4, 6) or [*batch, T, H] = (4, 3, 6), got (7,)",
        ),
        (
            apply(linen.RNN(linen.GRUCell(H)), XS, seq_lengths=np.array([1, 2, 3, 4])),
            "seq_lengths must be between 0 and T = 3, got 4; clip it, or pad the sequences",
        ),
        (
            apply(linen.RNN(linen.GRUCell(H)), XS, seq_lengths=jnp.array([1, 2, 3, -1])),
            "seq_lengths must be between 0 and T = 3, got -1",
        ),
        (apply(linen.RNN(linen.GRUCell(H)), XS[0], seq_lengths=4), "seq_lengths must be between 0 and T = 3, got 4"),
        (
            apply(linen.RNN(linen.GRUCell(H)), XS, seq_lengths=RESETS),
            (
                "seq_lengths must be [*batch] = (4,) as in inputs, got (4, 3); pass the length of "
                "each sequence, not a mask"
            ),
        ),
        (apply(linen.RNN(linen.GRUCell(H)), XS, reverse="yes"), "reverse must be True or False, got 'yes'"),
        (
            apply(linen.RNN(linen.GRUCell(H)), XS, keep_order=Z(2)),
            "keep_order must be True or False, got an array float32[2]",
        ),
        (apply(linen.RNN(linen.GRUCell(H), return_carry="yes"), XS), "return_carry must be True or False, got 'yes'"),
        (apply(linen.RNN(linen.GRUCell(H), time_major="yes"), XS), "time_major must be True or False, got 'yes'"),
        (apply(linen.RNN(linen.GRUCell(H), unroll="all"), XS), "unroll must be an integer, got 'all'"),
        (apply(linen.RNN(linen.GRUCell(H), unroll=-1), XS), "unroll must be at least 0, got -1"),
        (
            apply(linen.RNN(linen.GRUCell(H), implementation="gpu"), XS),
            'implementation must be "triton", "xla" or None, got \'gpu\'; did you mean "triton"?',
        ),
        (apply(linen.RNN(linen.GRUCell(H, precision="foo")), XS), "precision must be None, a jax.lax.Precision"),
        (
            apply(linen.RNN(nn.GRUCell(H, gate_fn=nn.relu)), XS, resets=RESETS.T),
            "resets must be [*batch, T] = (4, 3) as in inputs, got (3, 4)",
        ),
        (
            apply(linen.RNN(nn.LSTMCell(H, gate_fn=nn.relu)), XS, resets=RESETS, reset_carry=Z(H)),
            (
                "reset_carry must have the structure of the carry, a tuple of 2, got an array float32[6]; pass what "
                "initialize_carry of the module returns"
            ),
        ),
        # NNX
        (
            lambda: fused.RNN(fused.GRUCell),
            (
                "an instance of flax.nnx.RNNCellBase, got the class GRUCell; make an instance, such "
                "as GRUCell(in_features=64, hidden_features=128, rngs=rngs)"
            ),
        ),
        (lambda: fused.RNN(linen.GRUCell(H)), "got GRUCell; make one, such as jaxrnn.nnx.GRUCell"),
        (lambda: fused.RNN(fused.GRU(D, H, rngs=rngs())), "got GRU; call the stack itself"),
        (
            ran("RNN of GRUCell", Z((T, B, D + 1))),
            (
                "inputs must have the width in_features = 2, got 3; make the module with "
                "in_features=3, or pass an array of width 2"
            ),
        ),
        (
            ran("RNN of GRUCell", XS, initial_carry=Z((T, H + 1))),
            "initial_carry must have the width hidden_features = 6, got 7",
        ),
        (ran("RNN of GRUCell", XS, initial_carry=H0), "got (3, 6); pass time_major=True if inputs is [T, *batch, D]"),
        (ran("RNN of LSTMCell", XS, initial_carry=(None, None)), "initial_carry must be an array, got None"),
        (
            ran("RNN of GRUCell", XS, seq_lengths=np.array([1, 2, 3, 9])),
            "seq_lengths must be between 0 and T = 3, got 9",
        ),
        (ran("RNN of GRUCell", XS, resets=RESETS, reset_carry=Z(H + 1)), "reset_carry must be [H] = (6,)"),
        (ran("RNN of GRUCell", [0.0]), "inputs must be an array, got a list of 1"),
        (lambda: fused.RNN(fused.GRUCell(D, H, rngs=rngs()), unroll=1.5), "unroll must be an integer, got 1.5"),
    ],
    "GRUCell": [
        (
            reuse(linen.RNN(linen.GRUCell(H)), linen.RNN(linen.GRUCell(H)), Z((T, B, D + 1))),
            (
                "inputs must be 2 wide, as those that the parameters at cell were made for, got 3; "
                "pass inputs of that width"
            ),
        ),
        (
            reuse(linen.RNN(linen.GRUCell(H + 1)), linen.RNN(linen.GRUCell(H)), XS),
            (
                "the carry must be 6 wide, as that which the parameters at cell were made for, got 7; pass a carry of "
                "that width and set features=6 if the module has features, or call init with this carry"
            ),
        ),
        (
            reuse(linen.RNN(linen.GRUCell(H)), linen.RNN(linen.GRUCell(H)), XS, initial_carry=Z((T, H + 1))),
            "the carry must be 6 wide, as that which the parameters at cell were made for, got 7; pass a carry of that",
        ),
        (
            reuse(linen.RNN(linen.GRUCell(H)), linen.RNN(linen.LSTMCell(H)), XS),
            "the parameters at cell must have ir, got ii, if, ig, io, hi, hf, hg, ho; pass the variables",
        ),
        (
            reuse(linen.GRU(H, num_layers=2), linen.GRU(H), XS),
            "the parameters at layers_1 must have ir, got none; pass the variables",
        ),
        (
            lambda: linen.GRUCell(H).apply(linen_params(linen.GRUCell(H)), H0, XS[0]),
            (
                "the parameters at the top level must have ir, got none; pass the variables that "
                'init of this module returned, {"params": ...}'
            ),
        ),
        (apply(linen.RNN(linen.GRUCell(-1)), XS), "features must be at least 1, got -1"),
        (apply(linen.RNN(linen.GRUCell(0)), XS), "features must be at least 1, got 0"),
        (apply(linen.RNN(linen.GRUCell((H,))), XS), "features must be an integer, got (6,); pass one int"),
        (apply(linen.RNN(linen.GRUCell("6")), XS), "features must be an integer, got '6'"),
        (
            apply(linen.RNN(linen.GRUCell(H, dtype=jnp.int32)), XS),
            "dtype must be a floating-point dtype or None, got int32; use float32",
        ),
        (
            apply(linen.RNN(linen.GRUCell(H, dtype="foo")), XS),
            "dtype must be a floating-point dtype or None, got 'foo'",
        ),
        (
            apply(linen.GRUCell(H, param_dtype=jnp.int32), H0, XS[0]),
            "param_dtype must be a floating-point dtype or None, got int32",
        ),
        (
            apply(linen.GRUCell(H), None, XS[0]),
            "carry must be one array for a GRU, [*batch, H], got None; pass zeros for a new episode, as "
            "initialize_carry of a module returns",
        ),
        (
            apply(linen.GRUCell(H), PAIR, XS[0]),
            "carry must be one array for a GRU, [*batch, H], got a tuple of 2; only an LSTM",
        ),
        (apply(linen.GRUCell(H), H0, (XS[0], RESETS[0])), "inputs must be an array, got a tuple of 2"),
        (
            apply(linen.GRUCell(H), Z((B + 1, H)), XS[0]),
            "carry must have batch axes that can be broadcast with those of inputs (3,), got (4,); initialize_carry",
        ),
        (apply(linen.GRUCell(H, precision="foo"), H0, XS[0]), "precision must be None"),
        (
            lambda: linen.GRUCell(H).initialize_carry((B, D), KEY),
            (
                "input_shape must be the shape of one step's inputs, (*batch, D), got an array "
                "key<fry>[]; call initialize_carry(rng, input_shape)"
            ),
        ),
        (lambda: linen.GRUCell(H).initialize_carry(KEY, B), "got 3; call initialize_carry(rng, input_shape)"),
        (lambda: fused.GRUCell(D, -1, rngs=rngs()), "hidden_features must be at least 1, got -1"),
        (lambda: fused.GRUCell(2.0, H, rngs=rngs()), "in_features must be an integer, got 2.0"),
        (lambda: fused.GRUCell(D, H, rngs=0), "rngs must be an nnx.Rngs, got 0; pass nnx.Rngs(seed)"),
        (lambda: fused.GRUCell(D, H, rngs=KEY), "rngs must be an nnx.Rngs, got an array key<fry>[]"),
        (ran("GRUCell", XS[0], H0), "inputs must have the width in_features = 2, got 6"),
        (ran("GRUCell", H0, None), "inputs must be an array, got None"),
        (
            lambda: fused.GRUCell(D, H, rngs=rngs()).initialize_carry(rngs(), (B, D)),
            "got Rngs; call initialize_carry(input_shape, rngs)",
        ),
    ],
    "LSTMCell": [
        (
            apply(linen.LSTMCell(H), H0, XS[0]),
            (
                "carry must be a pair (c, h) for an LSTM, two arrays [*batch, H], got an array float32[3, 6]; pass "
                "both, for a new episode the zeros that initialize_carry of a module returns"
            ),
        ),
        (ran("LSTMCell", H0, XS[0]), "carry must be a pair (c, h) for an LSTM"),
    ],
    "ScannedRNN": [
        (
            apply(linen.ScannedRNN(), H0, XS),
            "x must be the pair (ins, resets), got an array float32[4, 3, 2]; pass resets too",
        ),
        (apply(linen.ScannedRNN(), H0, (XS, RESETS, RESETS)), "got a tuple of 3; leave out the others"),
        (apply(linen.ScannedRNN(), H0, (RESETS, XS)), "x must be (ins, resets), got (resets, ins); swap them"),
        (apply(linen.ScannedRNN(), (XS, RESETS), H0), "x must be the pair (ins, resets), got an array float32[3, 6]"),
        (apply(linen.ScannedRNN(), H0, ({"obs": XS}, RESETS)), "ins must be an array, got a dict with obs"),
        (apply(linen.ScannedRNN(), H0, (BATCH_MAJOR, RESETS.T)), "ins seems to be [*batch, T, D]: move its time axis"),
        (apply(linen.ScannedRNN(), H0, (XS[0], RESETS[0])), "ins seems to have no time axis"),
        (
            apply(linen.ScannedRNN(nn.GRUCell(H)), H0, (XS, RESETS)),
            "hidden_state_dim must be an integer or None, got GRUCell; a cell is given as cell_type",
        ),
        (
            lambda: linen.ScannedRNN("lstm").initialize_carry(B, H),
            "hidden_state_dim must be an integer or None, got 'lstm'",
        ),
        (apply(linen.ScannedRNN(cell_name=3), H0, (XS, RESETS)), "cell_name must be a string or None, got 3; pass a"),
        (
            apply(linen.ScannedRNN(), H0, (XS, RESETS.T)),
            "resets must be [T, *batch] = (4, 3) as in ins (4, 3, 2), got (3, 4)",
        ),
        (
            apply(linen.ScannedRNN(), None, (XS, RESETS)),
            "carry must be an array [*batch, H], or a pair (c, h) of them for an LSTM, got None; initialize_carry",
        ),
        (
            apply(linen.ScannedRNN(), PAIR, (XS, RESETS)),
            "carry must be one array for a GRU, [*batch, H], got a tuple of 2",
        ),
        (apply(linen.ScannedRNN(cell_type="lstm"), H0, (XS, RESETS)), "carry must be a pair (c, h) for an LSTM"),
        (
            apply(linen.ScannedRNN(hidden_state_dim=H + 1), H0, (XS, RESETS)),
            "carry must be hidden_state_dim = 7 wide, got 6",
        ),
        (
            apply(linen.ScannedRNN(cell_type="GRU"), H0, (XS, RESETS)),
            (
                "cell_type must be a cell class of linen, a functools.partial of one, or one of gru, lstm, "
                "optimized_lstm, optimised_lstm, mgu, simple, norm_gru, got 'GRU'; did you mean \"gru\"?"
            ),
        ),
        (apply(linen.ScannedRNN(cell_type=linen.GRUCell(H)), H0, (XS, RESETS)), "got GRUCell"),
        (
            apply(linen.ScannedRNN(cell_type=functools.partial(linen.GRUCell, H, param_dtype=None)), H0, (XS, RESETS)),
            "must have only keyword arguments other than features, dtype, param_dtype, num_blocks, name, parent, "
            "got 6, param_dtype; leave these out",
        ),
        (
            apply(linen.ScannedRNN(cell_type=functools.partial(jnp.add, H)), H0, (XS, RESETS)),
            "cell_type must be a cell class of linen, a functools.partial of one, or one of",
        ),
        (apply(linen.ScannedRNN(cell_type=linen.GRU), H0, (XS, RESETS)), "got the class GRU"),
        (apply(linen.ScannedRNN(cell_type=nnx.GRUCell), H0, (XS, RESETS)), "got the class GRUCell"),
        (lambda: linen.ScannedRNN.initialize_carry(B), "hidden_size must be an integer, got None; pass it"),
        (lambda: linen.ScannedRNN.initialize_carry(B, -1), "hidden_size must be at least 1, got -1"),
        (lambda: linen.ScannedRNN.initialize_carry(B, 6.0), "hidden_size must be an integer, got 6.0"),
        (
            lambda: linen.ScannedRNN.initialize_carry(None, H),
            "batch_size must be an integer or a tuple, got None; pass the sizes of all",
        ),
        (
            lambda: linen.ScannedRNN.initialize_carry(np.array([2, 3]), H),
            "batch_size must be an integer or a tuple, got an array int64[2]; pass the sizes of all",
        ),
        (
            lambda: linen.HiddenFirstScannedRNN.initialize_carry(H, (4, 2)),
            "batch_size must be separate integers, got ((4, 2),); pass the sizes of all",
        ),
    ],
    "ResetRNN": [
        (
            apply(linen.ResetRNN(linen.GRUCell(H)), XS),
            "inputs must be the pair (xs, resets), got an array float32[4, 3, 2]",
        ),
        (apply(linen.ResetRNN(linen.GRUCell), (XS, RESETS)), "got the class GRUCell; make an instance"),
        (
            apply(linen.ResetRNN(linen.GRUCell(H)), (XS, RESETS), reset_carry=(H0, H0)),
            "reset_carry must have the structure of the carry",
        ),
        (
            apply(linen.ResetRNN(linen.GRUCell(H)), (XS, RESETS), reset_carry=Z(H + 1)),
            "reset_carry must have the structure of the carry and shapes that can be broadcast to (3, 6), got (7,)",
        ),
        (
            apply(linen.ResetRNN(linen.LSTMCell(H)), (XS, RESETS), reset_carry=Z(H)),
            "reset_carry must have the structure of the carry",
        ),
        (
            apply(linen.ResetRNN(linen.GRUCell(H)), (BATCH_MAJOR, RESETS.T), initial_carry=H0),
            "initial_carry must be [*batch, H] with batch axes (4,) as in xs",
        ),
    ],
    "GRU": [
        (apply(linen.GRU(-1), XS), "features must be at least 1, got -1"),
        (apply(linen.GRU((H, H)), XS), "features must be an integer, got (6, 6)"),
        (apply(linen.GRU(H, num_layers=2.0), XS), "num_layers must be an integer, got 2.0"),
        (
            apply(linen.GRU(H, num_layers=2, dropout_rate="half"), XS),
            "dropout_rate must be between 0 and 1, got 'half'",
        ),
        (apply(linen.GRU(H, bidirectional="yes"), XS), "bidirectional must be True or False, got 'yes'"),
        (
            apply(linen.GRU(H, norm="RMS"), XS),
            (
                'norm must be "rms", "layer", None, or a class or function that makes a module, got '
                "'RMS'; did you mean \"rms\"?"
            ),
        ),
        (
            apply(linen.GRU(H), XS, initial_carry=Z((T, H))),
            (
                "each of 1 layers: an array [..., 6]; got an array float32[4, 6]; initialize_carry "
                "of the stack returns one"
            ),
        ),
        (
            apply(linen.GRU(H, num_layers=2), XS, initial_carry=Z((2, T, H))),
            "got an array float32[2, 4, 6]; initialize_carry of the stack returns one",
        ),
        (apply(linen.GRU(H), XS, initial_carry=(0.0,)), "got (float,); initialize_carry of the stack returns one"),
        (
            apply(linen.GRU(H), XS, initial_carry=(H0,)),
            (
                "initial_carry must be [*batch, H] with batch axes (4,) as in inputs [*batch, T, D] "
                "= (4, 3, 2), got (3, 6); pass time_major=True"
            ),
        ),
        (apply(linen.GRU(H), XS, initial_carry=(Z((T, H), int),)), "initial_carry must be floating point, got int32"),
        (
            apply(linen.GRU(H), XS, resets=RESETS.T),
            "resets must be [*batch, T] = (4, 3) as in inputs (4, 3, 2), got (3, 4)",
        ),
        (apply(linen.GRU(H), XS, seq_lengths=np.array([1, 2, 3, 9])), "seq_lengths must be between 0 and T = 3, got 9"),
        (apply(linen.GRU(H), [[0.0]]), "inputs must be an array, got a list of 1"),
        (apply(linen.GRU(H), Z(D)), "inputs must be [*batch, T, D], got (2,)"),
        (apply(linen.GRU(H, precision=("foo", "high")), XS), "precision must be None"),
        (apply(linen.GRU(H, remat="dots"), XS), "remat must be True or False, got 'dots'"),
        (apply(linen.GRU(H, return_carry="yes"), XS), "return_carry must be True or False, got 'yes'"),
        (lambda: linen.GRU(H).initialize_carry((B, D), KEY), "call initialize_carry(rng, input_shape)"),
        (
            lambda: linen.GRU(H, learned_carry=True).initialize_carry(KEY, (B, D)),
            "learned_carry must be False for a stack without variables, got True; call stack.apply",
        ),
        (apply(linen.GRU(H), XS.astype(F8)), "inputs must have a dtype that JAX promotes, got float8"),
        (apply(linen.GRU(H), XS.astype(complex)), "inputs must be real, got complex64; pass its real part"),
        (apply(linen.GRU(H, param_dtype=F8), XS), "param_dtype must be a floating-point dtype or None, got float8"),
        (made("GRU", D, -1), "hidden_features must be at least 1, got -1"),
        (made("GRU", D, H, num_layers=1.5), "num_layers must be an integer, got 1.5"),
        (made("GRU", D, H, norm="batch"), "got 'batch'"),
        (lambda: fused.GRU(D, H, rngs=0), "rngs must be an nnx.Rngs, got 0"),
        (ran("GRU", Z((T, B, D + 1))), "inputs must have the width in_features = 2, got 3"),
        (
            ran("GRU", XS, initial_carry=Z((T, H))),
            "got an array float32[4, 6]; initialize_carry of the stack returns one",
        ),
        (ran("GRU", XS, seq_lengths=np.array([1, 2, 3, 9])), "seq_lengths must be between 0 and T = 3, got 9"),
    ],
    "LSTM": [
        (
            apply(linen.LSTM(H), XS, initial_carry=(Z((T, H)),) * 2),
            (
                "a pair (c [..., 6], h [..., 6]); got (an array float32[4, 6], an array float32[4, "
                "6]); initialize_carry of the stack"
            ),
        ),
        (apply(linen.LSTM(H, proj_size=2.0), XS), "proj_size must be an integer, got 2.0"),
        (made("LSTM", D, H, proj_size=-1), "proj_size must be at least 1, got -1"),
    ],
    "SimpleRNN": [
        (
            apply(linen.SimpleRNN(H, activation_fn="relu"), XS),
            "activation_fn must be a function, got 'relu'; pass jax.nn.relu",
        ),
        (made("SimpleRNN", D, H, activation_fn="relu"), "activation_fn must be a function, got 'relu'"),
    ],
    "RMSNorm": [
        (apply(linen.RMSNorm(), "x"), "x must be an array, got 'x'; pass an array of numbers"),
        (made("RMSNorm", -1), "num_features must be at least 1, got -1"),
        (made("RMSNorm", (H,)), "num_features must be an integer, got (6,)"),
        (
            lambda: fused.RMSNorm(H, rngs=rngs())(Z((B, H + 1))),
            "x must have the width num_features = 6, got 7; make the module with num_features=7",
        ),
        (lambda: fused.RMSNorm(H, rngs=0), "rngs must be an nnx.Rngs, got 0"),
    ],
    "LayerNorm": [
        (apply(linen.LayerNorm(), None), "x must be an array, got None"),
        (
            apply(linen.LayerNorm(), object_array(B, H)),
            "x must be an array, got an array object[3, 6]; pass an array of numbers",
        ),
        (apply(linen.LayerNorm(), H0.astype(F8)), "x must have a dtype that JAX promotes, got float8"),
        (apply(linen.LayerNorm(), 1.0), "x must be [*rows, N], got a scalar"),
        (apply(linen.LayerNorm(epsilon="small"), H0), "epsilon must be a number, got 'small'"),
        (apply(linen.LayerNorm(dtype=int), H0), "dtype must be a floating-point dtype or None, got int"),
        (
            lambda: linen.LayerNorm().apply(linen.LayerNorm().init(KEY, H0), Z((B, H + 1))),
            "x must have the width of the parameter scale, 6, got 7; pass an array of that width",
        ),
        (
            apply(linen.LayerNorm(), H0, residual=Z((B, 1))),
            "residual must have the shape and dtype of x, float32[3, 6], got float32[3, 1]",
        ),
    ],
    "from_linen": [
        (
            lambda: convert.from_linen(nn.GRUCell(H)),
            'got a GRUCell; pass the parameters that init returned, variables["params"]',
        ),
        (lambda: convert.from_linen(linen.RNN(linen.GRUCell(H)).init(KEY, XS)), "got cell; pass its part ['cell']"),
        (
            lambda: convert.from_linen(linen.GRU(H, num_layers=2).init(KEY, XS)),
            "pass its part ['layers_0'] or ['layers_1']",
        ),
        (lambda: convert.from_linen(nnx.GRUCell(D, H, rngs=rngs())), "got a GRUCell; use from_nnx"),
        (lambda: convert.from_linen(nnx_params(nnx.GRUCell)), "got dense_h, dense_i; use from_nnx"),
        (lambda: convert.from_linen(GRU), "got a GRUParams; parameters of jaxrnn are converted already"),
        (lambda: convert.from_linen(None), "got None; pass the parameters of one cell"),
        (
            lambda: convert.from_linen(dict.fromkeys(("ir", "iz", "in", "hr", "hz", "hn"), H0)),
            "ir must be a layer with a kernel, got an array float32[3, 6]",
        ),
        (
            lambda: convert.from_linen(stacked(linen_params(nn.GRUCell(H)))),
            (
                "kernels must be [D, H] and [H, H], got (2, 2, 6) and (2, 6, 6); convert stacked "
                "weights of several models with jax.vmap"
            ),
        ),
        (
            lambda: convert.from_linen(jax.eval_shape(lambda: linen_params(nn.GRUCell(H)))),
            "must be floating point, got a jax.ShapeDtypeStruct",
        ),
    ],
    "from_nnx": [
        (lambda: convert.from_nnx(nnx.RNN(nnx.GRUCell(D, H, rngs=rngs()))), "got a RNN with nothing; pass its cell"),
        (
            lambda: convert.from_nnx(fused.GRU(D, H, rngs=rngs())),
            "got a GRU with nothing; pass an element of its layers",
        ),
        (
            lambda: convert.from_nnx(nn.GRUCell(H)),
            "got a GRUCell with nothing; use from_linen with the parameters of its cell",
        ),
        (lambda: convert.from_nnx(linen_params(nn.GRUCell(H))), "with ir, hr, iz, hz, in, hn; use from_linen"),
        (
            lambda: convert.from_nnx(nnx.split(nnx.GRUCell(D, H, rngs=rngs()))),
            "got a tuple with nothing; pass the cell itself",
        ),
        (lambda: convert.from_nnx(nnx.GRUCell), "got the class GRUCell; pass an instance"),
    ],
    "from_torch": [
        (
            lambda: convert.from_torch(linen.RNN(linen.GRUCell(H))),
            "source must be a module or its state dict, got a RNN; use from_linen with the parameters of its cell",
        ),
        (lambda: convert.from_torch(nnx.GRUCell(D, H, rngs=rngs())), "got a GRUCell; use from_nnx"),
        (lambda: convert.from_torch({"params": linen_params(nn.GRUCell(H))}), "got params; use from_linen"),
        (lambda: convert.from_torch(nnx_params(nnx.LSTMCell)), "if_, ig, ii, io; use from_nnx"),
        (lambda: convert.from_torch(jaxrnn.LSTMParams), "got the class LSTMParams; pass an instance"),
        (lambda: convert.from_torch(GRU), "got a GRUParams; parameters of jaxrnn are converted already"),
        (
            lambda: convert.from_torch("model.pt"),
            "got 'model.pt'; pass a torch.nn.GRU, LSTM, RNN or one of their cells",
        ),
        (
            lambda: convert.from_torch({}),
            (
                "source must have weight_ih_l0 (of a GRU, LSTM, MGU or simple cell) or weight_ih (of a GRUCell, for "
                "example), got nothing; pass a torch.nn.GRU"
            ),
        ),
        (
            lambda: convert.from_torch({"weight_ih": None, "weight_hh": None}),
            "weight_ih must be floating point, got None; pass an array of numbers",
        ),
        (
            lambda: convert.from_torch({"weight_ih": [[1.0], [1.0, 2.0]], "weight_hh": [[1.0]]}),
            "weight_ih must be floating point, got a list of 2",
        ),
        (lambda: convert.from_torch({}, prefix=None), "prefix must be a string, got None; leave it out"),
    ],
    "from_keras": [
        (
            lambda: convert.from_keras("model.keras"),
            "source must be a layer, or the list that its get_weights() returns, got a string; pass the layer",
        ),
        (lambda: convert.from_keras({"kernel": H0}), "got a mapping with kernel; pass the layer"),
        (
            lambda: convert.from_keras([]),
            "source must be the kernel, recurrent kernel and bias of one layer, got 0 arrays",
        ),
    ],
    "from_haiku": [
        (lambda: convert.from_haiku(None), "params must be the parameters of the linear layer in an hk.LSTM, w and b"),
        (lambda: convert.from_haiku(linen_params(nn.GRUCell(H))), "got ir, hr, iz, hz, in, hn; use from_linen"),
    ],
    "to_torch": [
        (
            lambda: convert.to_torch(LSTM._replace(w_hh=Z((2, 3, 12)), w_hr=Z((H, 2)))),
            "params.w_hh must be a matrix with a projection, params.w_hr, got (2, 3, 12), the blocks of a",
        ),
        (
            lambda: convert.to_torch(stacked(GRU)),
            "got (2, 6, 18), the stacked weights of several models; convert them one by one",
        ),
        (
            lambda: convert.to_torch(GRU._asdict()),
            "params must be GRUParams, LSTMParams, MGUParams or SimpleParams, got a dict with w_ih",
        ),
        (lambda: convert.to_torch(GRU._replace(b_hn=None)), "params.b_hn must be an array, got None"),
        (
            lambda: convert.to_torch(GRU._replace(b_hn=[0.0] * H)),
            "params.b_hn must be an array, got a list of 6; convert it with jnp.asarray",
        ),
        (lambda: convert.to_torch(GRU, layer="0"), "layer must be an integer, got '0'"),
        (lambda: convert.to_torch(GRU, layer=-1), "layer must be at least 0, got -1"),
        (
            lambda: jax.jit(convert.to_torch)(GRU),
            "params must have known values, got traced arrays; call to_torch outside of jax.jit",
        ),
    ],
    **{
        name: [
            (
                functools.partial(getattr(convert, name), LSTM._replace(w_hh=Z((2, 3, 9)))),
                "params.w_hh of LSTMParams must be [N, H / N, 4H / N], got (2, 3, 9)",
            )
        ]
        for name in ("to_linen", "to_equinox", "to_haiku", "to_keras")
    },
    "to_nnx": [
        (
            lambda: convert.to_nnx(GRU, nnx.GRUCell),
            "cell must be an nnx.GRUCell, OptimizedLSTMCell or SimpleCell (dense_i, dense_h) or an nnx.LSTMCell",
        ),
        (lambda: convert.to_nnx(GRU, None), "got None; pass the cell itself"),
    ],
}

ROWS = [(name, *row) for name, rows in TABLE.items() for row in rows]


@pytest.mark.quick("name")
@pytest.mark.parametrize(("name", "wrong_call", "text"), ROWS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(ROWS)])
def test_message_names_the_argument_and_the_remedy(name, wrong_call, text):
    with pytest.raises(ValueError) as caught:
        wrong_call()
    message = str(caught.value).partition("\n-----")[0]  # JAX appends a note on its traceback
    assert message.startswith(f"{name}: ") and text in message
    assert re.search(r" must (be|have) .*\bgot ", message), message
    assert not INTERNAL.search(message), message


# Other forms: (wrong call, error, part of the message)
OTHERS = [
    (
        wrong("gru", reset_state=H0),
        ValueError,
        "gru: reset_state is given but resets is None; pass resets, or leave it out",
    ),
    (
        apply(linen.RNN(linen.GRUCell(H)), XS, reset_carry=Z(H)),
        ValueError,
        "RNN: reset_carry is given but resets is None",
    ),
    (
        wrong("gru", params=GRU._replace(w_hh=Z((4, 1, 3)))),
        ValueError,
        "gru: params.w_hh has 4 blocks, which do not divide a carry of width 6; pass w_hh [H, 3H]",
    ),
    (
        lambda: jax.jit(lambda x: linen.RNN(linen.GRUCell(H)).init(KEY, XS, reverse=x))(True),
        ValueError,
        "RNN: reverse must be known when the program is traced; make it a static",
    ),
    (
        lambda: jax.vmap(call, (None, 0))("gru", stacked(GRU)._replace(b_hn=Z((3, H)))),
        ValueError,
        "inconsistent sizes",
    ),  # JAX's
    (
        lambda: exported(lambda c, x: jaxrnn.gru(GRU, c, x, implementation="triton"), "b,6", "t,b,2"),
        NotImplementedError,
        (
            "gru: the Triton implementation needs sizes that are known when the program is "
            "traced, but an array is (b, 6), with symbolic dimensions of jax.export: pass "
            'implementation="xla"'
        ),
    ),
    (
        lambda: exported(lambda x: jaxrnn.rms_norm(x, implementation="triton"), "b,n"),
        NotImplementedError,
        "rms_norm: the Triton implementation needs sizes that are known",
    ),
    (
        lambda: exported(lambda x: jaxrnn.rms_norm(x, implementation="triton"), "b,8"),
        NotImplementedError,
        "but an array is (b, 8)",
    ),
    (
        apply(linen.RNN(nn.GRUCell(H, gate_fn=nn.relu), implementation="triton"), XS),
        NotImplementedError,
        (
            'RNN: implementation="triton" cannot run a cell whose gate_fn is not sigmoid or '
            "whose activation_fn is not tanh; use implementation=None"
        ),
    ),
    (
        apply(linen.RNN(nn.GRUCell(H, gate_fn=nn.relu), precision="high"), XS),
        NotImplementedError,
        "RNN: precision cannot be set for a cell",
    ),
    (
        apply(linen.SimpleRNN(H, activation_fn=nn.gelu), XS),
        NotImplementedError,
        "SimpleRNN: a stack cannot run a cell whose activation_fn is neither tanh nor relu; use one RNN per layer",
    ),
    (
        apply(linen.LayerNorm(implementation="triton"), H0, mask=H0 > 0),
        NotImplementedError,
        "on one device, and this norm has a mask; use implementation=None",
    ),
]


@pytest.mark.parametrize(("wrong_call", "error", "text"), OTHERS, ids=range(len(OTHERS)))
def test_other_wrong_calls_say_what_to_do(wrong_call, error, text):
    with pytest.raises(error, match=re.escape(text)) as caught:
        wrong_call()
    assert not INTERNAL.search(str(caught.value))


@pytest.mark.torch
def test_from_torch_names_modules_of_another_kind():
    import torch

    for source, text in {
        torch.nn.GRU: "source must be a module or its state dict, got the class GRU; pass an instance",
        torch.nn.MultiheadAttention(4, 2): r"got in_proj_weight, .*; pass a torch\.nn\.GRU, LSTM, RNN or one of",
        torch.nn.GRU(D, H, device="meta"): "weight_ih_l0 must have values, got a tensor on the device meta; load",
    }.items():
        with pytest.raises(ValueError, match=f"from_torch: .*{text}"):
            convert.from_torch(source)
    with pytest.raises(ValueError, match=r"gru: xs must be an array of numbers, got dtype torch\.float32; convert it"):
        call("gru", xs=torch.zeros(T, B, D))
    with pytest.raises(ValueError, match=r"from_linen: .* got a GRU; use from_torch"):
        convert.from_linen(torch.nn.GRU(D, H))


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_block_weights_that_convert_makes_dense_compute_the_same(name):
    blocks, gates = 3, 3 if name == "gru" else 4
    keys = iter(jax.random.split(KEY, 8))
    params = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), FUNCTIONS[name][1])
    params = params._replace(w_hh=jax.random.normal(KEY, (blocks, H // blocks, gates * H // blocks)))
    dense = convert.from_linen(convert.to_linen(params, dense=True))
    xs = jax.random.normal(KEY, XS.shape)
    want, got = (call(name, params=one, xs=xs, precision="highest")[1] for one in (params, dense))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert dense.w_hh.shape == (H, gates * H)


EMPTY = {"T": (0, B, D, H), "B": (T, 0, D, H), "D": (T, B, 0, H), "H": (T, B, D, 0)}


@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_empty_sizes_run(name, sizes):
    """Without steps the carry is returned; empty results have their shapes."""
    steps, batch, inputs, hidden = sizes
    function, params = FUNCTIONS[name]
    resized = {H: hidden, D: inputs} | {gates * H: gates * hidden for gates in (2, 3, 4)}
    params = jax.tree.map(lambda x: jnp.full([resized[size] for size in x.shape], 0.1), params)
    carry = jnp.full((batch, hidden), 0.5)
    carry = (carry, carry) if name == "lstm" else carry
    last, ys = function(params, carry, Z((steps, batch, inputs)))
    assert ys.shape == (steps, batch, hidden)
    jax.tree.map(lambda x: np.testing.assert_equal(x.shape, (batch, hidden)), last)
    if steps == 0:
        jax.tree.map(np.testing.assert_array_equal, last, carry)


def test_values_are_not_checked_and_a_reset_discards_a_nan():
    assert np.isnan(call("gru", carry=H0 * jnp.nan)[1]).all()
    ys = call("gru", carry=H0 * jnp.nan, resets=RESETS.at[2].set(True))[1]
    assert np.isnan(ys[:2]).all() and np.isfinite(ys[2:]).all()


def test_float64_of_numpy_is_rounded_without_x64():
    """JAX rounds all arrays of NumPy that way."""
    carry, ys = call("gru", xs=np.zeros((T, B, D)), carry=np.zeros((B, H)))
    assert carry.dtype == ys.dtype == jnp.float32


VALID_PRECISIONS = [
    None, *PRECISIONS.split(", "), *jax.lax.Precision, *jax.lax.DotAlgorithmPreset,
    *jax.lax.DotAlgorithmPreset.__members__, ("high", "highest"),
    (jax.lax.Precision.HIGH,) * 2,
]  # fmt: skip


@pytest.mark.parametrize("precision", VALID_PRECISIONS, ids=str)
def test_precisions_of_jax_are_accepted(precision):
    check_precision(precision, Caller("gru"))
    assert takes_precision(precision)


def takes_precision(precision):
    """Returns whether `jax.lax.dot` takes a precision; some algorithms take other dtypes, but are known."""
    x = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    try:
        jax.eval_shape(functools.partial(jax.lax.dot, precision=precision), x, x)
    except ValueError as error:
        return "Precision argument must be" not in str(error)
    return True


@pytest.mark.parametrize(
    "precision", ["HIGH", ("high", jax.lax.Precision.HIGH), (None, "high"), ("high",) * 3], ids=str
)
def test_precisions_that_jax_rejects_are_rejected(precision):
    assert not takes_precision(precision)
    with pytest.raises(ValueError, match="gru: precision must be None"):
        check_precision(precision, Caller("gru"))


def test_traced_lengths_beyond_the_end_are_clipped():
    rnn = linen.RNN(linen.GRUCell(H), return_carry=True)
    variables = rnn.init(KEY, XS)
    xs = jax.random.normal(KEY, XS.shape)
    run = jax.jit(lambda lengths: rnn.apply(variables, xs, seq_lengths=lengths)[0])
    np.testing.assert_array_equal(run(jnp.array([B, B, B, B + 5])), run(jnp.array([B, B, B, B])))


def test_symbolic_widths_can_be_exported():
    def run(w_ih, w_hh, b_ih, b_hn, carry, xs):
        return jaxrnn.gru(jaxrnn.GRUParams(w_ih, w_hh, b_ih, b_hn), carry, xs)[1]

    program = exported(run, "d,3*h", "h,3*h", "3*h", "h", "b,h", "t,b,d")
    arrays = [jax.random.normal(KEY, x.shape) for x in (*GRU, H0, XS)]
    np.testing.assert_allclose(program.call(*arrays), run(*arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", [apply(linen.GRU(H, dropout_rate=0.5), XS), made("GRU", D, H, dropout_rate=0.5)])
def test_dropout_on_one_layer_warns(call):
    with pytest.warns(UserWarning, match="GRU: dropout_rate has no effect with num_layers=1, got 0.5"):
        call()
