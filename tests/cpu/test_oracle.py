"""Compares the oracle's hand-derived gradients with central differences of its own outputs."""

import numpy as np
import oracle
import pytest

T, B, H, D, P = 4, 3, 2, 3, 3
STEP = 1e-5
LEAD = {"h": (), "bh": (B,), "tbh": (T, B)}
CELLS = {
    "gru": {
        "weights": {"w_ih": (D, 3 * H), "w_hh": (H, 3 * H), "b_ih": (3 * H,), "b_hn": (H,)},
        "carry": {"carry": H},
        "reset": {"reset_state": H},
        "sequences": {"ys": H},
    },
    "lstm": {
        "weights": {"w_ih": (D, 4 * H), "w_hh": (H, 4 * H), "b": (4 * H,)},
        "carry": {"carry_c": H, "carry_h": H},
        "reset": {"reset_c": H, "reset_h": H},
        "sequences": {"ys": H, "cs": H},
    },
    "mgu": {
        "weights": {"w_ih": (D, 2 * H), "w_hh": (H, 2 * H), "b_ih": (2 * H,), "b_hn": (H,)},
        "carry": {"carry": H},
        "reset": {"reset_state": H},
        "sequences": {"ys": H},
    },
    **{
        name: {
            "weights": {"w_ih": (D, H), "w_hh": (H, H), "b": (H,)},
            "carry": {"carry": H},
            "reset": {"reset_state": H},
            "sequences": {"ys": H},
        }
        for name in ("simple_tanh", "simple_relu")
    },
    **{
        name: {
            "weights": {
                "w_ih": (D, 3 * H),
                "w_hh": (H, 3 * H),
                "b": (3 * H,),
                "scale_i": (D,),
                "scale_h": (H,),
                **shifts,
            },
            "carry": {"carry": H},
            "reset": {"reset_state": H},
            "sequences": {"ys": H},
        }
        for name, shifts in (("rms_norm_gru", {}), ("layer_norm_gru", {"shift_i": (D,), "shift_h": (H,)}))
    },
    "lstm-projected": {
        "weights": {"w_ih": (D, 4 * H), "w_hh": (P, 4 * H), "b": (4 * H,), "w_hr": (H, P)},
        "carry": {"carry_c": H, "carry_h": P},
        "reset": {"reset_c": H, "reset_h": P},
        "sequences": {"ys": P, "cs": H},
    },
}


@pytest.mark.quick("cell")
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("reset_state", [None, "h", "bh", "tbh"])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_equal_central_differences(cell, reset_state, reverse):
    rng = np.random.default_rng(0)
    names = CELLS[cell]
    inputs = {name: rng.normal(size=shape) for name, shape in names["weights"].items()}
    inputs |= {"xs": rng.normal(size=(T, B, D))} | {k: rng.normal(size=(B, n)) for k, n in names["carry"].items()}
    if reset_state is not None:
        inputs |= {name: rng.normal(size=(*LEAD[reset_state], n)) for name, n in names["reset"].items()}
    cotangents = {"ct_" + name: rng.normal(size=(T, B, n)) for name, n in names["sequences"].items()}
    cotangents |= {"ct_" + name: rng.normal(size=(B, n)) for name, n in names["carry"].items()}
    resets = np.array([[0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 0]], bool)

    def run(inputs):
        return oracle.CELLS[cell.split("-")[0]](inputs | cotangents | {"resets": resets}, reverse=reverse)

    def loss(inputs):
        results = run(inputs)
        return sum(np.vdot(ct, results[name.removeprefix("ct_")]) for name, ct in cotangents.items())

    gradients = run(inputs)
    for name, value in inputs.items():
        difference = np.empty(value.shape)
        for index in np.ndindex(value.shape):
            shift = np.zeros(value.shape)
            shift[index] = STEP
            up, down = loss(inputs | {name: value + shift}), loss(inputs | {name: value - shift})
            difference[index] = (up - down) / (2 * STEP)
        assert oracle.error(gradients["d" + name], difference) < 1e-8, name


def test_error_is_relative_propagates_nan_and_accepts_a_zero_reference():
    assert oracle.error(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    assert oracle.error(np.array([3.0, 4.0]), np.zeros(2)) == pytest.approx(5.0)
    assert oracle.error(np.zeros(2), np.zeros(2)) == 0
    assert np.isnan(oracle.error(np.array([np.nan, 0]), np.zeros(2)))
    assert np.isnan(oracle.error(np.zeros(2), np.array([np.nan, 0])))
    with pytest.raises(ValueError, match="shapes differ"):
        oracle.error(np.zeros((2, 1)), np.zeros(2))
