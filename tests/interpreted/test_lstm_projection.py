"""Tests what is specific to an LSTM with a projection on the kernels; the tables of all cells test the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
    PROJECTED,
    B,
    D,
    H,
    P,
    S,
    T,
    arguments,
    assert_close,
    every_implementation,
    kernels_only,
    launches,
    loss_of,
    random_like,
    reference,
    runner,
    stack,
    with_gradients,
)  # fmt: skip

import jaxrnn
from jaxrnn import kernel_vjp
from jaxrnn.call import Call, RecurrenceSpec
from jaxrnn.cells import LSTM
from jaxrnn.kernel_vjp import projected_state


@pytest.mark.quick("implementation")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@every_implementation
@pytest.mark.parametrize("hidden", [H, 70], ids=["one-program", "programs-that-share"])
def test_outputs_and_gradients_equal_torch(implementation, hidden):
    torch = pytest.importorskip("torch")
    params, carry, xs, _, _ = arguments(PROJECTED, hidden=hidden)
    call = runner(PROJECTED, implementation)
    outputs, vjp = jax.vjp(lambda params, carry, xs: call(params, carry, xs, None, None), params, carry, xs)
    cotangents = random_like(outputs)
    d_params, d_carry, d_xs = vjp(cotangents)

    def tensor(x, grad=False):
        return torch.tensor(np.asarray(x), requires_grad=grad)

    module = torch.nn.LSTM(D, hidden, proj_size=P, bias=True)
    weights = {"weight_ih_l0": params.w_ih.T, "weight_hh_l0": params.w_hh.T, "weight_hr_l0": params.w_hr.T}
    weights |= {"bias_ih_l0": params.b, "bias_hh_l0": jnp.zeros_like(params.b)}
    module.load_state_dict({name: tensor(x) for name, x in weights.items()})
    t_xs, (t_c, t_h) = tensor(xs, True), (tensor(x[None], True) for x in carry)
    t_ys, (t_last_h, t_last_c) = module(t_xs, (t_h, t_c))
    ((ct_c, ct_h), ct_ys) = cotangents
    torch.autograd.backward((t_ys, t_last_h[0], t_last_c[0]), [tensor(x) for x in (ct_ys, ct_h, ct_c)])

    want = (t_last_c[0], t_last_h[0]), t_ys
    assert_close(outputs, jax.tree.map(lambda x: x.detach().numpy(), want))
    d_weights = {name: x.grad.numpy() for name, x in module.named_parameters()}
    wanted = [d_weights[f"{name}_l0"].T for name in ("weight_ih", "weight_hh", "bias_ih", "weight_hr")]
    assert_close(d_params, jaxrnn.LSTMParams(*wanted))
    assert_close((d_carry, d_xs), ((t_c.grad.numpy()[0], t_h.grad.numpy()[0]), t_xs.grad.numpy()))


@kernels_only
@pytest.mark.parametrize("remat", [False, True], ids=["saved", "remat"])
@pytest.mark.parametrize("given", ["nothing", "resets", "reset-state"])
def test_gradients_take_one_launch_in_each_direction_and_one_to_recompute(implementation, given, remat):
    params, carry, xs, resets, state = arguments(PROJECTED)
    rest = {"nothing": (None, None), "resets": (resets, None), "reset-state": (resets, state)}[given]
    call = runner(PROJECTED, implementation, remat=remat)
    run = jax.jit(jax.value_and_grad(lambda *x: loss_of(call)(*x, *rest), (0, 1, 2)))
    assert launches(jax.jit(call), params, carry, xs, *rest) == (1, 0)
    assert launches(run, params, carry, xs) == (2 if remat else 1, 1)
    plain = jax.jit(jax.value_and_grad(lambda *x: loss_of(runner(PROJECTED, "xla"))(*x, *rest), (0, 1, 2)))
    assert_close(run(params, carry, xs), plain(params, carry, xs))


@kernels_only
def test_inputs_are_copied_only_if_episodes_start_from_a_state(implementation):
    """If episodes start from zeros, the inputs of the kernels' LSTM are those of the call."""
    params, carry, xs, resets, state = arguments(PROJECTED, hidden=H + 1)
    call = runner(PROJECTED, implementation)
    for state_, copied in ((None, False), (state, True)):
        text = str(jax.make_jaxpr(call)(params, carry, xs, resets, state_))
        assert (f"f32[{T},{B},{D + P}]" in text) == copied


@kernels_only
@pytest.mark.parametrize("mapped", ["w_hr", "w_hh", "carry"])
def test_vmap_over_one_operand_of_the_products(implementation, mapped):
    single, many = arguments(PROJECTED), arguments(PROJECTED, lead=(S,))
    weights = jaxrnn.LSTMParams(**{k: 0 if k == mapped else None for k in jaxrnn.LSTMParams._fields})
    axes = (weights, 0 if mapped == "carry" else None, None, None, None)
    if mapped == "carry":
        args = (single[0], many[1], *single[2:])
    else:
        args = (single[0]._replace(**{mapped: getattr(many[0], mapped)}), *single[1:])
    run = jax.vmap(with_gradients(runner(PROJECTED, implementation)), axes)

    def element(s):
        if mapped == "carry":
            return (args[0], jax.tree.map(lambda x: x[s], args[1]), *args[2:])
        return (args[0]._replace(**{mapped: getattr(args[0], mapped)[s]}), *args[1:])

    assert_close(jax.jit(run)(*args), stack([reference(PROJECTED)(*element(s)) for s in range(S)]))
    assert launches(run, *args) == (2, 1)  # one of the two forward launches computes outputs without gradients


@kernels_only
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_nonfinite_values_do_not_cross_the_start_of_an_episode(implementation, bad, reverse):
    """The carry is not finite, but the first step has a reset; reset states are not finite at steps without a reset."""
    params, carry, xs, _, state = arguments(PROJECTED, stepped=True)
    first = T - 1 if reverse else 0
    resets = jnp.zeros((T, B)).at[first].set(1)
    run = jax.jit(with_gradients(runner(PROJECTED, implementation, reverse=reverse)))
    want = run(params, carry, xs, resets, state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(want))
    carry = jax.tree.map(lambda x: jnp.full_like(x, bad), carry)
    state = jax.tree.map(lambda x: jnp.where((resets == 0)[..., None], bad, x), state)
    jax.tree.map(np.testing.assert_array_equal, run(params, carry, xs, resets, state), want)


@kernels_only
def test_a_nan_in_a_carry_stays_in_its_sequence(implementation):
    params, carry, xs, _, _ = arguments(PROJECTED)
    call = jax.jit(runner(PROJECTED, implementation))
    want = call(params, carry, xs, None, None)
    got = call(params, (carry[0], carry[1].at[1, 0].set(jnp.nan)), xs, None, None)
    (c, h), ys = got
    assert np.isnan(ys[:, 1]).all() and np.isnan(h[1]).all() and np.isnan(c[1]).all()
    for x, y in zip(jax.tree.leaves((c, h)), jax.tree.leaves(want[0]), strict=True):
        np.testing.assert_array_equal(x[::2], y[::2])
    np.testing.assert_array_equal(ys[:, ::2], want[1][:, ::2])


@kernels_only
@pytest.mark.parametrize(
    ("hidden", "width", "dtype", "precision"),
    [
        (32, 40, "float32", "tf32x3"),
        (40, 32, "float32", "tf32x3"),
        (33, 33, "float32", "tf32"),
        (40, 32, "float16", "tf32"),
        (32, 40, "float16", "tf32x3"),
    ],
)
def test_both_widths_decide_the_precision(implementation, hidden, width, dtype, precision):
    params, (c0, h0), xs, _, _ = arguments(PROJECTED, hidden=hidden)
    params = params._replace(w_hh=jnp.zeros((width, 4 * hidden)), w_hr=jnp.zeros((hidden, width)))
    h0 = jnp.zeros((*h0.shape[:-1], width))
    args = jax.tree.map(lambda x: x.astype(dtype), (params, (c0, h0), xs))
    text = str(jax.make_jaxpr(runner(PROJECTED, implementation, precision=None))(*args, None, None))
    assert f"precision={precision} " in text or f"precision={precision}\n" in text


@pytest.mark.interpret
def test_the_width_limit_applies_to_the_loop(monkeypatch):
    args = arguments(PROJECTED, hidden=40)
    call = runner(PROJECTED, "triton")
    monkeypatch.setattr("torch_bridge.tiling.max_hidden", lambda device: 39)
    with pytest.raises(NotImplementedError, match=r'hidden width of 40 is more than .*implementation="xla"'):
        call(*args)


def test_recurrent_weights_are_multiplied_in_full_precision():
    """The precision of the call does not matter: only the kernels round the product, once."""
    rng = np.random.default_rng(0)
    hidden, width = 128, 32
    w_hr, w_hh = rng.normal(size=(hidden, width)), rng.normal(size=(width, 4 * hidden))
    w_hr, w_hh = (x.astype(np.float32) for x in (w_hr, w_hh))
    params = jaxrnn.LSTMParams(jnp.zeros((D, 4 * hidden)), jnp.asarray(w_hh), jnp.zeros(4 * hidden), jnp.asarray(w_hr))
    spec = RecurrenceSpec(LSTM, reverse=False, time_major=True, precision="default", remat=False, returned=("h",))
    states = jnp.zeros((B, width)), jnp.zeros((B, hidden))
    call = Call(params, states, jnp.zeros((T, B, D)), resets=None, reset_states=(None, None))
    got = jax.jit(lambda call: projected_state.without_projection(spec, call).params.w_hh)(call)
    want = w_hr.astype(np.float64) @ w_hh
    assert np.linalg.norm(got - want) <= 2.0**-20 * np.linalg.norm(want)
    assert kernel_vjp.kernel_precision("default", hidden) == "tf32"
