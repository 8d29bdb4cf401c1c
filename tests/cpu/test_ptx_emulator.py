"""Tests of the PTX emulator in `tests/ptx` on small kernels, whose results NumPy computes."""

import numpy as np
import pytest
from ptx import Kernel, PTXError

THREADS = 64
LANES = np.arange(THREADS)
RNG = np.random.default_rng(0)
BITS = RNG.integers(0, 2**32, THREADS, dtype=np.uint32)
SIGNED = BITS.view(np.int32)
FLOATS = (3 * RNG.standard_normal(THREADS)).astype(np.float32)


def kernel(code: str, inputs: int = 1, outputs: int = 1, shared: int = 1024) -> Kernel:
    """Returns a kernel of two warps: it loads `%a0`, `%a1`, ... of each thread, runs `code`, and stores `%d0`, ...

    Its parameters are two arrays `[registers, 64]` of 32 bits, at `%in` and `%out`, and a number in `%number`. `%t` is
    the thread, `%p` the program, `%programs` the number of programs, and `%s` the shared address of byte `4 * thread`.
    """
    loads = [f"ld.global.b32 %a{k}, [%mine+{4 * THREADS * k}];" for k in range(inputs)]
    stores = [f"st.global.b32 [%yours+{4 * THREADS * k}], %d{k};" for k in range(outputs)]
    ptx = f""".version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry test(
    .param .u64 .ptr .global .align 1 test_param_0,
    .param .u64 .ptr .global .align 1 test_param_1,
    .param .u32 test_param_2
)
.reqntid {THREADS}
{{
    .reg .pred %q<4>; .reg .b16 %h<8>; .reg .b32 %a<12>, %d<8>, %r<8>, %t, %p, %programs, %s, %number;
    .reg .b64 %in, %out, %mine, %yours, %offset, %w<4>;
    ld.param.b64 %in, [test_param_0]; ld.param.b64 %out, [test_param_1]; ld.param.b32 %number, [test_param_2];
    mov.u32 %t, %tid.x; mov.u32 %p, %ctaid.x; mov.u32 %programs, %nctaid.x;
    mul.wide.u32 %offset, %t, 4; add.s64 %mine, %in, %offset; add.s64 %yours, %out, %offset;
    mov.b32 %s, global_smem; mad.lo.s32 %s, %t, 4, %s;
    {" ".join(loads)}
{code}
    {" ".join(stores)}
    ret;
}}
"""
    return Kernel(ptx, "test", shared, THREADS // 32)


def run(code: str, *inputs: np.ndarray, outputs: int = 1, shared: int = 1024, seed: int | None = None) -> np.ndarray:
    """Returns `%d0`, ... of each thread, `[outputs, 64]`, given `%a0`, ..., each `[64]` of 32 bits."""
    given = np.stack([np.ascontiguousarray(x).view(np.uint32) for x in inputs or [BITS]])
    out = np.zeros((outputs, THREADS), np.uint32)
    kernel(code, len(given), outputs, shared).launch(1, {"given": given, "out": out, "number": 7}, seed=seed)
    return out


INTEGERS = {
    "add.s32 %d0, %a0, -7;": BITS - np.uint32(7),
    "mul.hi.u32 %d0, %a0, %a0;": (BITS.astype("u8") ** 2 >> 32).astype("u4"),
    "div.s32 %d0, %a0, -7;": (SIGNED / -7.0).astype("i4"),
    "div.u32 %d0, %a0, %t;": np.where(LANES == 0, 2**32 - 1, BITS // np.maximum(LANES, 1)).astype("u4"),
    "min.s32 %d0, %a0, 5;": np.minimum(SIGNED, 5),
    "max.u32 %d0, %a0, 5;": np.maximum(BITS, 5),
    "shl.b32 %d0, %a0, %t;": np.where(LANES < 32, BITS << (LANES % 32).astype("u4"), 0),
    "shr.u32 %d0, %a0, %t;": np.where(LANES < 32, BITS >> (LANES % 32).astype("u4"), 0),
    "shr.s32 %d0, %a0, 40;": SIGNED >> 31,
    "bfe.u32 %d0, %a0, 5, 7;": (BITS >> 5) & 127,
    "bfe.s32 %d0, %a0, 5, 7;": (SIGNED << 20) >> 25,
    "shf.l.wrap.b32 %d0, %a0, %t, 41;": (LANES.astype("u4") << 9) | (BITS >> 23),
    "prmt.b32 %d0, %a0, %a0, 0x0123U;": BITS.byteswap(),
    "prmt.b32 %d0, %a0, 0, 0x5410U;": BITS & 0xFFFF,
    "mov.b32 {%h0, %h1}, %a0; mov.b32 %d0, {%h1, %h0};": (BITS << 16) | (BITS >> 16),
    "mov.b32 {_, %h1}, %a0; cvt.u32.u16 %d0, %h1;": BITS >> 16,
    "mov.b32 %r0, %a0; mov.b32 %r1, 0; mov.b64 %w0, {%r1, %r0}; shr.u64 %w0, %w0, 40; cvt.u32.u64 %d0, %w0;": BITS >> 8,
    "cvt.s64.s32 %w0, %a0; setp.lt.s64 %q0, %w0, 0; selp.b32 %d0, 1, 2, %q0;": np.where(SIGNED < 0, 1, 2),
    "mul.wide.s32 %w0, %a0, -3; cvt.u32.u64 %d0, %w0;": BITS * np.uint32(2**32 - 3),
    "setp.eq.b32 %q0, %t, 5; setp.ne.or.b32 %q1, %a0, %a0, %q0; selp.b32 %d0, 1, 2, %q1;": np.where(LANES == 5, 1, 2),
    "mov.b32 %d0, 1; setp.lt.u32 %q0, %t, 9; @!%q0 mov.b32 %d0, 3;": np.where(LANES < 9, 1, 3),
}


@pytest.mark.parametrize("code", INTEGERS)
def test_integers_match_numpy(code):
    np.testing.assert_array_equal(run(code)[0], INTEGERS[code].astype(np.int64) & 0xFFFFFFFF)


FLOATING = {
    "fma.rn.f32 %d0, %a0, %a0, 0fBF800000;": (FLOATS.astype("f8") ** 2 - 1).astype("f4"),
    "div.full.f32 %d0, 0f3F800000, %a0;": 1 / FLOATS,
    "div.approx.f32 %d0, %a0, 0f40400000;": FLOATS / np.float32(3),
    "neg.f32 %d0, %a0; abs.f32 %d0, %d0;": np.abs(FLOATS),
    "ex2.approx.ftz.f32 %d0, %a0;": np.exp2(FLOATS.astype("f8")).astype("f4"),
    "cvt.rn.f16.f32 %h0, %a0; cvt.f32.f16 %d0, %h0;": FLOATS.astype("f2").astype("f4"),
    "max.f32 %d0, %a0, 0f7FC00000;": FLOATS,
    "max.NaN.f32 %d0, %a0, 0f7FC00000;": np.full(THREADS, np.nan, "f4"),
    "setp.num.f32 %q0, %a0, 0f7FC00000; selp.f32 %d0, %a0, 0f00000000, %q0;": np.zeros(THREADS, "f4"),
    "setp.ne.f32 %q0, %a0, 0f7FC00000; selp.f32 %d0, %a0, 0f00000000, %q0;": np.zeros(THREADS, "f4"),
}


@pytest.mark.parametrize("code", FLOATING)
def test_floating_point_matches_numpy(code):
    np.testing.assert_allclose(run(code, FLOATS)[0].view("f4"), FLOATING[code], rtol=2e-7)


def test_bfloat16_and_tf32_round_to_nearest():
    # one and a half of the last bit of each format: exactly half ways, and just below
    bits = np.resize(np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F801000, 0x3F803000, 0x3F800FFF], "u4"), THREADS)
    code = "cvt.rn.bf16x2.f32 %d0, %a0, 0f40000000; cvt.rna.tf32.f32 %d1, %a0; cvt.rn.bf16.f32 %h0, %a0;"
    pairs, tf32, single = run(code + "cvt.f32.bf16 %d2, %h0;", bits, outputs=3)
    np.testing.assert_array_equal(pairs[:3] >> 16, [0x3F80, 0x3F82, 0x3F80])  # half to even
    assert (pairs & 0xFFFF == 0x4000).all()  # the second source is in the low half
    np.testing.assert_array_equal(tf32[3:6], [0x3F802000, 0x3F804000, 0x3F800000])  # half away from zero
    np.testing.assert_array_equal(single, pairs & 0xFFFF0000)


def test_float16_saturates_only_if_asked():
    code = "cvt.rn.satfinite.f16x2.f32 %d0, %a0, 0fFF800000; cvt.rn.f16x2.f32 %d1, %a0, 0fFF800000;"
    saturated, rounded = run(code, np.full(THREADS, 1e6, "f4"), outputs=2)
    np.testing.assert_array_equal(saturated.view("f2"), np.resize([-65504, 65504], 2 * THREADS))
    np.testing.assert_array_equal(rounded.view("f2"), np.resize([-np.inf, np.inf], 2 * THREADS))


def test_shuffles_exchange_lanes():
    code = "shfl.sync.bfly.b32 %d0, %a0, 4, 31, -1; shfl.sync.idx.b32 %d1, %a0, 1, 7199, -1;"
    flipped, first_of_four = run(code, outputs=2)
    np.testing.assert_array_equal(flipped, BITS[LANES ^ 4])
    np.testing.assert_array_equal(first_of_four, BITS[LANES // 4 * 4 + 1])  # 7199: segments of four lanes


def test_redux_returns_the_maximum_of_a_warp():
    got = run("mov.b32 %r0, -1; redux.sync.max.s32 %d0, %a0, %r0;")[0].view("i4")
    np.testing.assert_array_equal(got, np.repeat(SIGNED.reshape(2, 32).max(1), 32))


def test_vote_returns_whether_a_predicate_of_a_warp_is_true():
    code = "setp.eq.u32 %q0, %t, 40; vote.sync.any.pred %q0, %q0, 0xffffffff; selp.b32 %d0, 1, 0, %q0;"
    np.testing.assert_array_equal(run(code)[0], LANES // 32)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    return (x.astype("f4").view("u4") >> 16).astype("u2")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "tf32"])
def test_mma_multiplies_matrices(dtype):
    """The layouts are those of the PTX manual for m16n8k16 and, in TF32, m16n8k8; values are small integers."""
    columns = 8 if dtype == "tf32" else 16
    A, B = RNG.integers(-8, 8, (2, 16, columns)), RNG.integers(-8, 8, (2, columns, 8))
    C = RNG.integers(-8, 8, (2, 16, 8)).astype("f4")
    warp, group, thread = LANES // 32, LANES % 32 // 4, LANES % 4
    if dtype == "tf32":
        a = [A[warp, group + 8 * (i % 2), thread + 4 * (i // 2)].astype("f4") for i in range(4)]
        b = [B[warp, thread + 4 * i, group].astype("f4") for i in range(2)]
    else:
        half = bfloat16_bits if dtype == "bf16" else lambda x: x.astype("f2").view("u2")
        pair = 2 * thread[:, None] + np.arange(2)
        w, g = warp[:, None], group[:, None]
        a = [half(A[w, g + 8 * (i % 2), pair + 8 * (i // 2)]).reshape(-1).view("u4") for i in range(4)]
        b = [half(B[w, pair + 8 * i, g]).reshape(-1).view("u4") for i in range(2)]
    c = [C[warp, group + 8 * (i // 2), 2 * thread + i % 2] for i in range(4)]
    registers = "{%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, {%a4, %a5}, {%a6, %a7, %a8, %a9}"
    name = f"mma.sync.aligned.m16n8k{columns}.row.col.f32.{dtype}.{dtype}.f32"
    got = run(f"{name} {registers};", *a, *b, *c, outputs=4).view("f4")
    product = A @ B + C
    for i in range(4):
        np.testing.assert_array_equal(got[i], product[warp, group + 8 * (i // 2), 2 * thread + i % 2])


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_loads_matrices(transposed):
    """Both warps load the two matrices `[8, 8]` in the first 256 bytes, whose rows are one after the other."""
    code = "st.shared.b32 [%s], %a0; bar.sync 0; and.b32 %r0, %t, 15; shl.b32 %r0, %r0, 4;"
    code += "mov.b32 %r1, global_smem; add.s32 %r0, %r0, %r1;"
    got = run(f"{code} ldmatrix.sync.aligned.m8n8.x2{'.trans' * transposed}.shared.b16 {{%d0, %d1}}, [%r0];", outputs=2)
    matrices = BITS.view("u2").reshape(2, 8, 8)
    want = np.ascontiguousarray(matrices.transpose(0, 2, 1) if transposed else matrices).reshape(2, 64).view("u4")
    np.testing.assert_array_equal(got, np.tile(want, (1, 2)))


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_stores_what_ldmatrix_loads(transposed):
    trans = ".trans" * transposed
    code = "and.b32 %r0, %t, 15; shl.b32 %r0, %r0, 4; shr.u32 %r2, %t, 5; shl.b32 %r2, %r2, 8; add.s32 %r0, %r0, %r2;"
    code += "mov.b32 %r1, global_smem; add.s32 %r0, %r0, %r1;"
    code += f"stmatrix.sync.aligned.m8n8.x2{trans}.shared.b16 [%r0], {{%a0, %a1}};"
    given = RNG.integers(0, 2**32, (2, THREADS), dtype=np.uint32)
    loads = f"ldmatrix.sync.aligned.m8n8.x2{trans}.shared.b16 {{%d0, %d1}}, [%r0];"
    np.testing.assert_array_equal(run(f"{code} {loads}", *given, outputs=2), given)
    words = run(f"{code} bar.sync 0; ld.shared.b32 %d0, [%s]; ld.shared.b32 %d1, [%s+256];", *given, outputs=2)
    matrices = np.ascontiguousarray(given.reshape(2, 2, 32).swapaxes(0, 1)).view("u2").reshape(2, 2, 8, 8)
    want = np.ascontiguousarray(matrices.swapaxes(2, 3) if transposed else matrices).reshape(2, THREADS, 2).view("u4")
    np.testing.assert_array_equal(words, want[..., 0])


OTHER_WARP = "xor.b32 %r0, %s, 128;"
COPY = "cp.async.ca.shared.global [%s+0], [%mine+0], 0x4, %r1; cp.async.commit_group;"


def test_asynchronous_copies_arrive_when_waited_for():
    code = f"{OTHER_WARP} shl.b32 %r1, %t, 2; and.b32 %r1, %r1, 4; {COPY} WAIT bar.sync 0; ld.shared.b32 %d0, [%r0];"
    got = run(code.replace("WAIT", "cp.async.wait_group 0;"))[0]
    np.testing.assert_array_equal(got, np.where(LANES % 2 == 1, BITS[LANES ^ 32], 0))  # a size of 0 fills with zeros
    for too_early in ("", "cp.async.wait_group 1;"):
        assert (run(code.replace("WAIT", too_early))[0] == 0xFFFFFFFF).all()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_warps_and_programs_poll_for_one_another(seed):
    """Each program waits for the word of the one before, and one of its warps waits for the other."""
    code = """
    mad.lo.s32 %r0, %p, 64, %t; mul.wide.u32 %w0, %r0, 4; add.s64 %w1, %in, %w0; add.s64 %yours, %out, %w0;
    again: ld.relaxed.gpu.global.b32 %r1, [%w1+0];
    setp.eq.b32 %q0, %r1, 0;
    @%q0 bra again;
    mov.b32 %d0, %r1; add.s32 %r1, %r1, 1; add.s32 %r2, %p, 1;
    setp.lt.s32 %q1, %r2, %programs;
    @%q1 st.relaxed.gpu.global.b32 [%w1+256], %r1;
    bar.sync 0;
    """
    words, out = np.zeros((5, THREADS), np.uint32), np.zeros((5, THREADS), np.uint32)
    words[0] = 1 + LANES
    kernel(code).launch(5, {"words": words, "out": out}, seed=seed)
    np.testing.assert_array_equal(out, 1 + LANES + np.arange(5)[:, None])


TO_NEXT = """
    { .shared .align 16 .b8 mailbox[256]; mov.u32 %r0, mailbox; }
    mad.lo.s32 %r0, %t, 4, %r0;
    st.shared.b32 [%r0], 0;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    add.s32 %r1, %p, 1; rem.u32 %r1, %r1, 3;
    mapa.shared::cluster.u32 %r2, %r0, %r1;
    add.s32 %r3, %p, 1;
    st.relaxed.cluster.shared::cluster.b32 [%r2], %r3;
    again: ld.relaxed.cluster.shared::cta.b32 %d0, [%r0];
    setp.eq.b32 %q0, %d0, 0;
    @%q0 bra again;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mul.wide.u32 %w0, %p, 256; add.s64 %yours, %yours, %w0;
"""


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_programs_of_a_cluster_write_into_the_shared_memory_of_one_another(seed):
    out = np.zeros((6, THREADS), np.uint32)
    kernel(TO_NEXT).launch(6, {"given": BITS, "out": out}, cluster=3, seed=seed)
    np.testing.assert_array_equal(out[:, 0], [3, 1, 2, 6, 4, 5])
    assert (out == out[:, :1]).all()


@pytest.mark.parametrize(
    ("message", "old", "new"),
    [
        ("address programs beyond a cluster of 3", "rem.u32 %r1, %r1, 3;", ""),
        ("3 programs wait without end", "@%q0 bra again", "bra again"),
        ("of a program that has ended", "mapa", "setp.eq.b32 %q1, %p, 2; @%q1 ret; mapa"),
        ("out of bounds by 64 threads", "cluster.b32 [%r2]", "cluster.b32 [%r2+4096]"),
        ("an address of the program itself", "cluster.b32 [%r2]", "cluster.b32 [%r0]"),
        ("mailbox is declared twice", "add.s32 %r3", "{ .shared .align 16 .b8 mailbox[256]; } add.s32 %r3"),
    ],
)
def test_what_is_invalid_in_a_cluster_raises(message, old, new):
    with pytest.raises(PTXError, match=message):
        kernel(TO_NEXT.replace(old, new)).launch(
            3, {"given": BITS, "out": np.zeros((3, THREADS), np.uint32)}, cluster=3
        )


def test_atomic_additions_count_threads():
    code = "mov.b32 %d0, 0; setp.lt.u32 %q0, %t, 40; mov.b32 %r0, 1;"
    code += "@%q0 atom.global.gpu.release.add.u32 %d0, [%in + 0], %r0;"
    code += "red.global.gpu.release.add.u32 [%in + 4], %r0;"
    given, out = np.zeros((1, THREADS), np.uint32), np.zeros((1, THREADS), np.uint32)
    kernel(code).launch(2, {"given": given, "out": out})
    assert given[0, 0] == 80 and given[0, 1] == 2 * THREADS
    np.testing.assert_array_equal(out[0, :40], 40 + np.arange(40))  # of the program that ran last


STORE = "st.shared::cta.b32 [%s], %a0;"
INVALID = {
    "reads what was written by warp": f"{STORE} {OTHER_WARP} ld.shared.b32 %d0, [%r0];",
    "writes what was read by warp": f"ld.shared.b32 %d0, [%s]; {OTHER_WARP} st.shared.b32 [%r0], %a0;",
    "writes what was written by warp": f"{STORE} {OTHER_WARP} st.shared.b32 [%r0], %a0;",
    "warps store different values": "mov.b32 %r0, global_smem; st.shared.b32 [%r0], %a0;",
    # the copy may already write
    "writes what was read by several warps": (
        f"and.b32 %r2, %t, 31; shl.b32 %r2, %r2, 2; mov.b32 %r3, global_smem; add.s32 %r2, %r2, %r3;"
        f"ld.shared.b32 %d0, [%r2]; mov.b32 %r1, 4; {COPY}"
    ),
    "out of bounds by 64 threads: 256 bytes after the start of given": "ld.global.b32 %d0, [%mine+256];",
    "store of 4 bytes out of bounds": "st.global.b32 [%in+-4], %a0;",
    "out of bounds by 1 threads: byte 1024 of 1024 in shared": "ld.shared.b32 %d0, [%s+772];",
    "misaligned access of 8 bytes at byte": "ld.global.v2.b32 {%d0, %d1}, [%in+4];",
    "misaligned access of 4 bytes at byte 2": "st.shared.b32 [%s+2], %a0;",
    "threads store different values": "st.global.b32 [%out], %a0;",
    "a part of a warp waits": "setp.lt.u32 %q0, %t, 3; @%q0 bra skip; bar.sync 0; skip:",
    "32 threads wait at a barrier without end, and 32 have returned": (
        "setp.lt.u32 %q0, %t, 32; @%q0 bra skip; ret; skip: bar.sync 0;"
    ),
    "programs wait without end": (
        "again: ld.relaxed.gpu.global.b32 %r0, [%out]; setp.eq.b32 %q0, %r0, 0; @%q0 bra again;"
    ),
    "a part of a warp runs": "setp.lt.u32 %q0, %t, 9; @%q0 shfl.sync.bfly.b32 %d0, %a0, 1, 31, -1;",
    r"not supported .*: popc.b32 %d0, %a0;": "popc.b32 %d0, %a0;",
    "(?#vote)a part of a warp runs": "setp.lt.u32 %q0, %t, 9; @%q0 vote.sync.any.pred %q1, %q0, -1;",
    r"not supported .*: vote.sync.any.pred %q1, %q0, 3": "vote.sync.any.pred %q1, %q0, 3;",
    "only a part of the warp": "mov.b32 %r0, 3; redux.sync.max.s32 %d0, %a0, %r0;",
    r"not supported .*: add.sat.s32": "add.sat.s32 %d0, %a0, %a0;",
    r"not supported .*: add.f64": "add.f64 %w0, %w1, %w2;",
    r"not supported .*: st.volatile": "st.volatile.global.b32 [%in], %a0;",
    r"not supported .*: bar.sync 1": "bar.sync 1;",
    r"not supported .*%unknown": "add.s32 %d0, %unknown, 1;",
}  # fmt: skip


@pytest.mark.parametrize("message", INVALID)
def test_what_is_invalid_raises_with_the_line(message):
    code = "mov.b32 %d0, 0;\n" + INVALID[message]
    with pytest.raises(PTXError, match=f"(?s){message}") as raised:
        run(code)
    assert "PTX line" in str(raised.value)


BETWEEN = f"{STORE} bar.sync 0; {OTHER_WARP} ld.shared.b32 %d0, [%r0];"


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_barrier_between_warps_prevents_a_race(seed):
    np.testing.assert_array_equal(run(BETWEEN, seed=seed)[0], BITS[LANES ^ 32])
    with pytest.raises(PTXError, match="race in shared memory"):
        run(BETWEEN.replace("bar.sync 0;", "bar.warp.sync -1;"), seed=seed)


def test_stores_of_what_is_there_are_no_race():
    """Triton lets several warps store the same value, such as a sum that each of them has."""
    code = "mov.b32 %r0, global_smem; st.shared.b32 [%r0], 5; bar.sync 0; ld.shared.b32 %d0, [%r0];"
    assert (run(code)[0] == 5).all()


def test_kernels_of_another_size_and_too_many_arguments_raise():
    with pytest.raises(PTXError, match="no kernel"):
        Kernel(".version 8.7", None)
    with pytest.raises(ValueError, match="4 arguments for 3 parameters"):
        kernel("mov.b32 %d0, 0;").launch(1, {"a": BITS, "b": BITS, "c": 1, "d": 2})
    with pytest.raises(ValueError, match="must be contiguous"):
        kernel("mov.b32 %d0, 0;").launch(1, {"a": BITS[::2]})
